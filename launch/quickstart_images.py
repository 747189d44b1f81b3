"""`make quickstart-images`: images to accuracy, and a table; see `launch/journey.py`."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from polyad.launch.ending import guard
from polyad.launch.journey import Journey, model_rows, run_polyad, run_rows
from polyad.launch.signals import stop_at_signals

CONFIG = Path("configs/quickstart/vmoe.yaml")
FOLDER = Path("runs/quickstart-images")
SOURCE = "digits"
LARGER = ("model.image_size=32", "model.patch_size=4", "data.augmentation.flip=true")
"""Keys for images of other sources, as CIFAR's: digits have 8 x 8 pixels."""


class ImageJourney(Journey):
    """Images to a V-MoE, beside the nearest neighbour among the training images.

    Args:
        config: of the run, relative to the clone.
        folder: that everything is written below, relative to the clone.
        source: of the images, as `polyad prepare --images` takes it.
    """

    trains = "a V-MoE"
    compares = "compare with the nearest training image, and draw the report"

    def __init__(self, config: Path, folder: Path, source: str) -> None:
        super().__init__(config, folder, () if source == SOURCE else LARGER)
        self.source = source
        named = "handwritten digits" if source == SOURCE else source
        self.prepares = f"{named} -> PNG files in folders of classes -> an index of them"
        if source != SOURCE:
            self.prepares = f"{named} -> an index of its images"

    def prepare_arguments(self) -> list[str]:
        """See `Journey.prepare_arguments`."""
        return [
            *("--images", self.source, "--output", str(self.data)),
            *("--held-out", "0.2", "--overwrite"),
        ]

    def finish(self, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
        """See `Journey.finish`."""
        run_polyad("report", str(self.run))
        return summary(self.run, self.data, result, half)


def summary(run: Path, data: Path, result: dict[str, Any], half: int) -> list[tuple[str, str]]:
    """What the quickstart shows.

    Args:
        run: the run's folder.
        data: its prepared images.
        result: what `polyad evaluate` wrote.
        half: the step it went on from.

    Returns:
        Names and values.
    """
    from polyad.data.images.dataset import ImageData
    from polyad.train.evaluation.baselines import nearest_neighbour_accuracy

    opened = ImageData.open(data)
    nearest = nearest_neighbour_accuracy(
        opened.split("train"), opened.split("validation"), result["image_size"]
    )
    size = f"{result['image_size']} x {result['image_size']} pixels"
    return [
        *model_rows(run, "patch"),
        ("accuracy", f"{result['top1']:.4f} on {result['images_scored']:,} held-out images"),
        ("of the nearest image", f"{nearest:.4f}: the class of the nearest one of train, {size}"),
        ("calibration error", f"{result['calibration_error']:.4f}"),
        ("held out", str(result["held_out"])),
        *run_rows(run, half, "image"),
        ("report", f"{run / 'report.html'}: images and patches of each expert"),
    ]


def main() -> int:
    """Runs it with the images that the command line names."""
    parser = ArgumentParser(prog="python -m polyad.launch.quickstart_images", description=__doc__)
    parser.add_argument("--images", default=SOURCE, metavar="SOURCE", help="default: digits")
    return ImageJourney(CONFIG, FOLDER, parser.parse_args().images).main()


if __name__ == "__main__":
    stop_at_signals()
    sys.exit(guard(main))
