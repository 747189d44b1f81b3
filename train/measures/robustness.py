"""`polyad robustness`: ImageNet models on the published sets of shifted images.

Shapes: B images of a batch, N images of a set, K classes of the model, S classes of a set.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.images.imagenet import (
    ALEXNET_ERRORS,
    FileSplit,
    LabelledFile,
    by_number,
    by_wordnet_id,
    classes_of,
    corruptions,
    imagenet_classes,
)
from polyad.data.images.samples import EvaluationImages
from polyad.data.json_reader import read_json
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.measures.measure import Examination, Result
from polyad.train.reading import Evaluated, Reading, read
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples

_NUMBER = re.compile(r"val_(\d{8})")
_WORDNET_ID = re.compile(r"n\d{8}")


class Corruption(NamedTuple):
    """A model's error under one kind of corruption."""

    error: float
    """Mean error over severities."""
    ce: float
    """The same divided by AlexNet's."""
    severities: list[float]
    """Error at each severity."""


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """The scores of one set; None for those that do not apply."""

    top1: float | None = None
    mce: float | None = None
    corruptions: Mapping[str, Corruption] | None = None
    aupr: float | None = None
    images_scored: int | None = None
    images_without_label: int | None = None
    images_inside: int | None = None
    classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Robust(Result):
    """Scores of a model on a set."""

    first: ClassVar[tuple[str, ...]] = ("checkpoint", "step")

    name: str
    """The name of the image set."""
    place: str
    """Its folder or file."""
    scores: Shifted
    image_size: int

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        scores = {name: each for name, each in vars(self.scores).items() if each is not None}
        return {"set": self.name, "folder": self.place, **scores, "image_size": self.image_size}

    def source(self, data: str) -> list[tuple[str, str]]:
        """The set that was read in place of a split."""
        return [("set", f"{_TITLES[self.name]}, {self.place}")]

    def facts(self) -> list[tuple[str, str]]:
        """The scores."""
        scores = self.scores
        known = (("top-1", scores.top1), ("mCE", scores.mce), ("AUPR", scores.aupr))
        rows = [(title, f"{score:.4f}") for title, score in known if score is not None]
        for name, each in (scores.corruptions or {}).items():
            said = f"error {each.error:.4f}, relative to AlexNet {each.ce:.4f}"
            rows.append((name.replace("_", " "), said))
        if scores.images_scored is not None:
            classes = "" if scores.classes is None else f", {scores.classes} classes"
            rows.append(("scored", f"{scores.images_scored:,} images{classes}"))
        return rows


class Robustness(Examination):
    """Scores a checkpoint on one of the sets."""

    name = "robustness"
    doing = "evaluating"
    reads_split = False

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> tuple[str, Path]:
        """Takes from the options the `set`, a name in `_SETS`, and its unpacked `folder`, or for
        ReaL the file `real.json`."""
        task = opened.images(cls.name)
        classes = len(imagenet_classes())
        if task.model.num_classes != classes:
            raise ConfigError(
                f"robustness: is not allowed with model.num_classes: {task.model.num_classes}; the "
                f"sets are of ImageNet-1k's {classes:,} classes"
            )
        check_order(task.data.manifest.class_names, task.place)
        return options["set"], options["folder"]

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: tuple[str, Path],
        model: nn.Module,
        world: comm.World,
    ) -> Robust:
        """Reads the images of the set."""
        (name, folder), task = asked, opened.images(cls.name)
        scores = _SETS[name](Scorer(task, model, opened.batch_size, world), folder)
        size = task.model.image_size
        return Robust(name=name, place=str(folder), scores=scores, image_size=size)


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


@dataclass(frozen=True)
class _Logits:
    """Collects a model's logits for the images that this process reads."""

    blocks: ClassVar[Sequence[int]] = ()
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Numbers, logits and labels of each batch."""

    def add(self, reading: Reading) -> None:
        """Stores a batch."""
        found = (reading.number_R, reading.output.float(), reading.batch.labels_B)
        self.parts.append(tuple(each.cpu() for each in found))  # type: ignore[arg-type]


class Scorer(NamedTuple):
    """A model that classifies images for these sets."""

    task: ImageClassification
    model: nn.Module
    batch_size: int
    world: comm.World

    def logits(self, images: EvaluationImages, told: str) -> tuple[Tensor, Tensor]:
        """Logits [N, K] in fp32 and labels [N] of all images in order, on each process."""
        samples = ImageSamples(self.task, images=images, num_workers=self.task.settings.num_workers)
        kept = _Logits()
        read(
            *(self.model, [], samples, [kept]),
            batch_size=self.batch_size,
            world=self.world,
            told=told,
        )
        parts = [part for parts in comm.from_all(kept.parts) for part in parts]
        number_N, logits_NK, labels_N = (torch.cat(each) for each in zip(*parts, strict=True))
        order_N = number_N.argsort()
        return logits_NK[order_N], labels_N[order_N]

    def files(
        self, files: Sequence[LabelledFile], told: str, resize: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for files, whose shorter side is resized to `resize` times the model's before
        the crop; None: as configured."""
        settings = self.task.settings
        if resize is not None:
            settings = settings.model_copy(update={"evaluation_resize": resize})
        images = EvaluationImages(FileSplit(files), settings, self.task.model.image_size)
        return self.logits(images, told)

    def own_validation(self) -> str:
        """The split that is ImageNet's own validation split."""
        manifest = self.task.data.manifest
        if manifest.own_validation is None:
            raise ConfigError(
                f"robustness: {self.task.place} lacks ImageNet's own validation images, which this "
                f"set is compared with: {manifest.held_out}; prepare it without --held-out"
            )
        return manifest.own_validation


def _corrupted(scorer: Scorer, folder: Path) -> Shifted:
    """Top-1 error of each corruption over its severities, and relative to AlexNet's (mCE)."""
    errors: dict[str, list[float]] = {name: [] for name in ALEXNET_ERRORS}
    for name, severity, files in corruptions(folder):
        logits_NK, labels_N = scorer.files(files, f"{name} {severity}", 1.0)
        errors[name].append(1 - _accuracy(logits_NK, labels_N))
    means = {name: sum(each) / len(each) for name, each in errors.items()}
    relative = {name: mean / ALEXNET_ERRORS[name] for name, mean in means.items()}
    return Shifted(
        top1=1 - sum(means.values()) / len(means),
        mce=sum(relative.values()) / len(relative),
        corruptions={name: Corruption(means[name], relative[name], errors[name]) for name in means},
    )


def _subset(scorer: Scorer, folder: Path) -> Shifted:
    """Top-1 accuracy among the set's classes only: ImageNet-A and -R have 200."""
    files = by_wordnet_id(folder)
    classes_S = torch.tensor(classes_of(files))
    logits_NK, labels_N = scorer.files(files, folder.name)
    predicted_N = classes_S[logits_NK[:, classes_S].argmax(-1)]
    right = float((predicted_N == labels_N).double().mean())
    return Shifted(top1=right, images_scored=len(files), classes=len(classes_S))


def _whole(read_files: Callable[[Path], list[LabelledFile]]) -> Callable[[Scorer, Path], Shifted]:
    """Top-1 accuracy among all classes."""

    def score(scorer: Scorer, folder: Path) -> Shifted:
        files = read_files(folder)
        top1 = _accuracy(*scorer.files(files, folder.name))
        return Shifted(top1=top1, images_scored=len(files))

    return score


def _outliers(scorer: Scorer, folder: Path) -> Shifted:
    """Area under the precision-recall curve of detecting ImageNet-O's images among ImageNet's.

    The score of an outlier is -max softmax over the set's classes; the inliers are those images of
    ImageNet's own validation split that have one of these classes (Hendrycks et al. 2021).
    """
    from polyad.data.images.imagenet import average_precision

    split, files = scorer.own_validation(), by_wordnet_id(folder)
    classes_S = torch.tensor(classes_of(files))
    outside_NK, _ = scorer.files(files, folder.name)
    labels = torch.as_tensor(scorer.task.data.split(split).labels)
    numbers = torch.isin(labels, classes_S).nonzero().flatten().tolist()
    if not numbers:
        raise ConfigError(f"{scorer.task.place}: its {split} split has none of these classes")
    inside_NK, _ = scorer.logits(scorer.task.held_out(split).subset(numbers), split)
    confidences = [
        logits_NK[:, classes_S].softmax(-1).amax(-1) for logits_NK in (outside_NK, inside_NK)
    ]
    is_outside = [1] * len(files) + [0] * len(numbers)
    return Shifted(
        aupr=average_precision(is_outside, (-torch.cat(confidences)).tolist()),
        images_scored=len(files),
        images_inside=len(numbers),
        classes=len(classes_S),
    )


def _real(scorer: Scorer, file: Path) -> Shifted:
    """Share of validation images whose top class is one of the ReaL labels.

    Images without a label do not count (Beyer et al. 2020). `real.json` has a list of labels for
    each image, in the order of the file names.
    """
    labels, name = real_labels(file), scorer.own_validation()
    split, images = scorer.task.data.split(name), scorer.task.held_out(name)
    logits_NK, _ = scorer.logits(images, name)
    right, count = 0, 0
    for number, predicted in enumerate(logits_NK.argmax(-1).tolist()):
        found = _NUMBER.search(split.name_of(number))
        if found is None or not 1 <= int(found[1]) <= len(labels):
            raise ConfigError(
                f"{split.name_of(number)}: is not the name of a validation image, such as "
                f"ILSVRC2012_val_00000001.JPEG; {file} has {len(labels):,} of these"
            )
        allowed = labels[int(found[1]) - 1]
        if allowed:
            count, right = count + 1, right + (predicted in allowed)
    if not count:
        raise ConfigError(f"{file}: has no label of any image of the validation split")
    return Shifted(
        top1=right / count,
        images_scored=count,
        images_without_label=len(images) - count,
    )


def real_labels(file: Path) -> list[list[int]]:
    """Reads the labels of ReaL's real.json."""
    labels = read_json(file, error=ConfigError)
    if not isinstance(labels, list) or not all(isinstance(each, list) for each in labels):
        raise ConfigError(f"{file}: is not a list of lists of class numbers, as ReaL's real.json")
    return labels


def _accuracy(logits_NK: Tensor, labels_N: Tensor) -> float:
    return float((logits_NK.argmax(-1) == labels_N).double().mean())


_SETS: dict[str, Callable[[Scorer, Path], Shifted]] = {
    "c": _corrupted,
    "a": _subset,
    "r": _subset,
    "o": _outliers,
    "v2": _whole(by_number),
    "sketch": _whole(by_wordnet_id),
    "real": _real,
}
_TITLES = {
    "c": "ImageNet-C",
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "o": "ImageNet-O",
    "v2": "ImageNet-V2",
    "sketch": "ImageNet-Sketch",
    "real": "ReaL labels",
}
