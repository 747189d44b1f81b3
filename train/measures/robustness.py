"""`polyad robustness`: ImageNet models on ImageNet-C, -A, -R and -O.

Shapes: B images of a batch, N images of a set, K classes of the model, S classes of a set.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from polyad.data.errors import DataError
from polyad.data.images.samples import EvaluationImages, ImageBatch
from polyad.data.images.source import ImageSplit, list_files
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.measures.measure import Analysis
from polyad.train.reading import EvaluationContext, Subject
from polyad.train.results import Tables
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples

CLASSES_FILE = Path(__file__).with_name("imagenet_classes.txt")
ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's mean error on each corruption of ImageNet-C (Hendrycks and Dietterich 2019), by
folder name."""
_WORDNET_ID = re.compile(r"n\d{8}")


@dataclass(kw_only=True)
class Robustness(Analysis):
    """Scores a checkpoint on one of the sets."""

    name = "robustness"
    doing = "evaluating"
    reads_split = False

    set: str
    """A name in `_SETS`."""
    folder: Path
    """The unpacked set."""

    def check(self, opened: EvaluationContext) -> None:
        """Refuses a model of other classes."""
        self._task = task = opened.need(self.name, ImageClassification)
        classes = len(imagenet_classes())
        if task.model.num_classes != classes:
            raise ConfigError(
                f"robustness: is not allowed with model.num_classes: {task.model.num_classes}; the "
                f"sets are of ImageNet-1k's {classes:,} classes"
            )
        check_order(task.data.class_names, task.place)

    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads the images of the set."""
        self._model, self._batch_size, self._world = model, opened.batch_size, world
        tables = _SETS[self.set](self)
        about = {"set": f"ImageNet-{self.set.upper()}", "folder": str(self.folder)}
        return tables.with_facts(about, {"image_size": self._task.model.image_size})

    def _logits(
        self, images: EvaluationImages | Subset[ImageBatch], label: str
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, K] in fp32 and labels [N] of all images in order, on each process."""
        samples = ImageSamples(self._task, images=images)
        subject = Subject(self._model, [], samples, self._batch_size)
        own = [
            (each.number_R.cpu(), each.output.float().cpu(), each.batch.labels_B.cpu())
            for each in subject.read(self._world, label=label)
        ]
        parts = [part for parts in comm.from_all(own) for part in parts]
        number_N, logits_NK, labels_N = (torch.cat(each) for each in zip(*parts, strict=True))
        order_N = number_N.argsort()
        return logits_NK[order_N], labels_N[order_N]

    def _of_files(
        self, files: ImageSplit, label: str, resize: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for files, whose shorter side is resized to `resize` times the model's before
        the crop; None: as configured."""
        settings = self._task.settings
        if resize is not None:
            settings = settings.model_copy(update={"evaluation_resize": resize})
        images = EvaluationImages(files, settings, self._task.model.image_size)
        return self._logits(images, label)

    def _corrupted(self) -> Tables:
        """Top-1 error of each corruption over its severities, and relative to AlexNet's (mCE).

        Reads CORRUPTION/SEVERITY/WORDNET_ID/FILE; the four extra corruptions are not read.
        """
        import pandas as pd

        errors: dict[str, list[float]] = {name: [] for name in ALEXNET_ERRORS}
        for name, of_severities in errors.items():
            for severity in range(1, 6):
                files = by_wordnet_id(self.folder / name / str(severity))
                logits_NK, labels_N = self._of_files(files, f"{name} {severity}", 1.0)
                of_severities.append(float((logits_NK.argmax(-1) != labels_N).double().mean()))
        frame = pd.DataFrame({"corruption": errors.keys(), "error": map(fmean, errors.values())})
        frame["ce"] = frame["error"] / frame["corruption"].map(ALEXNET_ERRORS)
        frame["severities"] = [*errors.values()]
        return Tables(
            facts={"top1": 1 - fmean(frame["error"]), "mce": fmean(frame["ce"])},
            frames={"corruptions": frame},
            titles={"corruptions": "error, and ce: the error relative to AlexNet's"},
        )

    def _subset(self) -> Tables:
        """Top-1 accuracy among the set's classes only: ImageNet-A and -R have 200."""
        files = by_wordnet_id(self.folder)
        classes_S = torch.as_tensor(np.unique(files.labels))
        logits_NK, labels_N = self._of_files(files, self.folder.name)
        predicted_N = classes_S[logits_NK[:, classes_S].argmax(-1)]
        right = float((predicted_N == labels_N).double().mean())
        return Tables(facts={"top1": right, "images_scored": len(files), "classes": len(classes_S)})

    def _outliers(self) -> Tables:
        """Area under the precision-recall curve of detecting ImageNet-O's images among ImageNet's.

        The score of an outlier is -max softmax over the set's classes; the inliers are those images
        of ImageNet's own validation split that have one of these classes (Hendrycks et al. 2021).
        """
        from sklearn.metrics import average_precision_score

        data, files = self._task.data, by_wordnet_id(self.folder)
        classes_S = torch.as_tensor(np.unique(files.labels))
        split = data.own_validation
        labels = torch.as_tensor(data.split(split).labels if split else [])
        numbers = torch.isin(labels, classes_S).nonzero().flatten().tolist()
        if split is None or not numbers:
            raise ConfigError(
                f"robustness: {self._task.place} lacks ImageNet's own validation images of these "
                f"classes, which this set is compared with: {data.held_out}; data.held_out must be "
                "null"
            )
        outside_NK, _ = self._of_files(files, self.folder.name)
        inside_NK, _ = self._logits(Subset(self._task.held_out(split), numbers), split)
        logits_NS = torch.cat([outside_NK, inside_NK])[:, classes_S]
        is_outside = [True] * len(files) + [False] * len(numbers)
        area = average_precision_score(is_outside, -logits_NS.softmax(-1).amax(-1).numpy())
        facts = {"aupr": float(area), "images_scored": len(files), "images_inside": len(numbers)}
        return Tables(facts={**facts, "classes": len(classes_S)})


@functools.cache
def imagenet_classes() -> tuple[str, ...]:
    """Returns the WordNet ids of the 1,000 classes, in the order of their numbers.

    A class number is the rank of its WordNet id in alphabetical order, which is also the label
    number on the Hugging Face hub.
    """
    return tuple(CLASSES_FILE.read_text(encoding="ascii").split())


def by_wordnet_id(folder: Path) -> ImageSplit:
    """Lists the images of a tree with one folder per class, named by its WordNet id.

    Args:
        folder: The folder of ImageNet-A, -R or -O, or of one severity of ImageNet-C.

    Raises:
        DataError: A folder has another name, or there are no images.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    files, others = list_files(folder)
    names = files.class_names
    numbers = {wordnet_id: number for number, wordnet_id in enumerate(imagenet_classes())}
    strange = next((name for name in names if name not in numbers), None)
    if strange is not None or not len(files) or others:
        why = f"{strange} is not the folder of a class" if strange else "has no images"
        if others:
            why = f"holds {others:,} files that are not images"
        raise DataError(
            f"{folder}: {why}; it must have folders of images named by WordNet ids of "
            "ImageNet-1k, as n01440764"
        )
    files.labels = np.array([numbers[name] for name in names])[files.labels]
    return files


def check_order(names: list[str], place: str) -> None:
    """Checks that classes are numbered as in ImageNet, as far as their names show.

    The hub's names are words in the order of WordNet ids, which is not alphabetical.

    Args:
        names: names of the 1,000 classes that a model was trained with.
        place: names the data in the error.

    Raises:
        ConfigError: the classes or their order differ.
    """
    ids = list(imagenet_classes())
    by_id = all(_WORDNET_ID.fullmatch(name) for name in names)
    if names != ids and (by_id or names == sorted(names)):
        raise ConfigError(
            f"robustness: {place} has 1,000 classes that are not ImageNet-1k's in their "
            f"order, by WordNet id: it begins with {', '.join(map(repr, names[:3]))}, not "
            f"{', '.join(map(repr, ids[:3]))}"
        )


_SETS: dict[str, Callable[[Robustness], Tables]] = {
    "c": Robustness._corrupted,
    "a": Robustness._subset,
    "r": Robustness._subset,
    "o": Robustness._outliers,
}
