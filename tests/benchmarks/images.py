"""`images.py`: our loader of training images beside plain ones, on one core.

All of them read the same class folders and hand over the same: a random crop of 224 pixels,
bicubic, half of them mirrored, normalized, in batches. The peers are a DataLoader over files with
Pillow, and where torchvision can be imported one over its ImageFolder with its transforms.
"""

import io
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from polyad.data.errors import user_path
from polyad.data.images.augmentation import random_crop
from polyad.data.images.config import AugmentationConfig, ImageDataConfig, RandAugmentConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import ImageSamples
from polyad.data.sampler import micro_batches
from polyad.launch.command import Json, results
from polyad.train.tasks.pixels import normalize
from tests.benchmarks.comparison import Repeats, benchmark, clocked, start, summary, take_turns

SIZE, BATCH = 224, 16
GOAL = 1.3
READ = 128
"""Images that each loader reads in a turn."""
MADE, MADE_SIZE = 128, (500, 375)


def _compared(folder: Path, place: Path, repeats: int, randaugment: bool) -> dict[str, Any]:
    """JSON values: images a second, how many times as fast as each peer, and the goal."""
    chosen = RandAugmentConfig(operations=2, magnitude=15) if randaugment else None
    settings = ImageDataConfig(
        path=str(folder),
        augmentation=AugmentationConfig(crop_scale=(0.08, 1.0), randaugment=chosen),
    )
    split = ImageData.open(settings).split("train")
    files = [Path(split.name_of(number)) for number in range(len(split))]
    samples = ImageSamples(split, settings, SIZE, seed=0)

    def ours() -> None:
        batches = micro_batches(
            samples,
            start_step=0,
            num_steps=READ // BATCH,
            global_batch_size=BATCH,
            micro_batch_size=BATCH,
        )
        for batch in batches:
            normalize(batch.images_BCHW, settings.mean, settings.std)

    runs = {"ours": clocked(ours)}
    if not randaugment:
        runs["pillow"] = clocked(_read(PillowFiles(files, settings)))
    if find_spec("torchvision") is not None:
        runs["torchvision"] = clocked(_read(_image_folder(folder, settings)))
    times = take_turns(runs, repeats)
    rows = summary(times, "ours")
    peers = {
        name: {
            "images_per_second": READ / row["seconds"],
            "times_as_fast": row["seconds_ratio"],
            "times_as_fast_interval": row["seconds_ratio_interval"],
        }
        for name, row in rows.items()
        if name != "ours"
    }
    least = min((peer["times_as_fast"] for peer in peers.values()), default=0.0)
    return {
        "source": "made" if str(folder).startswith(str(place)) else str(folder),
        "images": READ,
        "mean_bytes": int(np.mean([file.stat().st_size for file in files])),
        "size": SIZE,
        "randaugment": randaugment,
        "ours": {"images_per_second": READ / rows["ours"]["seconds"]},
        "peers": peers,
        "goal": GOAL,
        "reached": least >= GOAL,
    }


class PillowFiles(Dataset[tuple[Tensor, int]]):
    """Files as torchvision's ImageFolder and its usual transforms read them, in plain Pillow.

    Args:
        files: of images.
        settings: of the augmentation.
    """

    def __init__(self, files: list[Path], settings: ImageDataConfig) -> None:
        self._files, self._settings = files, settings
        self._generator = np.random.default_rng(0)

    def __len__(self) -> int:
        """Counts the files."""
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Opens, crops, resizes, mirrors and normalizes."""
        generator = self._generator
        with self._files[number % len(self._files)].open("rb") as file:
            image = Image.open(file).convert("RGB")
        scale = self._settings.augmentation.crop_scale or (1.0, 1.0)
        top, left, height, width = random_crop((image.height, image.width), scale, generator)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        if generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255
        mean, std = (
            torch.tensor(x).view(3, 1, 1) for x in (self._settings.mean, self._settings.std)
        )
        return (pixels - mean) / std, 0


def _image_folder(folder: Path, settings: ImageDataConfig) -> Dataset[Any]:
    import importlib

    v2 = importlib.import_module("torchvision.transforms.v2")
    datasets = importlib.import_module("torchvision.datasets")
    chosen = settings.augmentation
    augment = chosen.randaugment
    between = [v2.RandAugment(augment.operations, augment.magnitude)] if augment else []
    bicubic = importlib.import_module("torchvision.transforms").InterpolationMode.BICUBIC
    scale = chosen.crop_scale
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, scale=scale, interpolation=bicubic, antialias=True),
            v2.RandomHorizontalFlip(),
            *between,
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(settings.mean, settings.std),
        ]
    )
    read: Dataset[Any] = datasets.ImageFolder(str(folder), transform)
    return read


def _read(images: Dataset[Any]) -> Callable[[], None]:
    def run() -> None:
        numbers = torch.arange(READ) % len(images)  # type: ignore[arg-type]
        for _ in DataLoader(images, batch_size=BATCH, sampler=numbers.tolist()):
            pass

    return run


def _made(root: Path) -> Path:
    """Images like photographs: smooth, with noise, as JPEG files of about 50 kB."""
    generator = np.random.default_rng(0)
    for number in range(MADE):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(MADE_SIZE, Image.Resampling.BICUBIC)
        noise = generator.normal(0, 8, (*MADE_SIZE[::-1], 3))
        pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=85)
        place = root / str(number % 4) / f"{number:04}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.getvalue())
    return root


def images_table(result: dict[str, Any]) -> str:
    """A result for a person."""
    with_augment = ", RandAugment" if result["randaugment"] else ""
    lines = [
        f"{result['images']:,} images of {result['mean_bytes'] / 1000:,.0f} kB to {result['size']} "
        f"pixels{with_augment}, one core",
        f"{'':12}  images/s  ours is faster",
        f"{'ours':12}  {result['ours']['images_per_second']:8,.0f}",
    ]
    for name, peer in result["peers"].items():
        interval = peer["times_as_fast_interval"]
        within = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        times = f"{peer['times_as_fast']:.2f} times{within}"
        lines.append(f"{name:12}  {peer['images_per_second']:8,.0f}  {times}")
    return "\n".join(lines)


@benchmark("images", "--json images.json", "--randaugment")
def images(
    folder: str | None = None,
    *,
    randaugment: bool = False,
    repeats: Repeats = 5,
    json: Json = None,
) -> None:
    """Times our loader of training images beside plain ones, on one core.

    Args:
        folder (DIR): a folder of classes; default: images that are made.
        randaugment: with torchvision's RandAugment.
    """
    with results(json) as show:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as place:
            path = user_path(folder) if folder else _made(Path(place) / "made")
            result = _compared(path, Path(place), repeats, randaugment)
        show(result, images_table(result))


if __name__ == "__main__":
    start(images)
