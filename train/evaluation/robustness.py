"""`polyad robustness`: ImageNet models on the published sets of shifted images.

Shapes: B images of a batch, K classes of the model, S classes of a set.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from polyad.data.sampler import evaluation_batches
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.reading import Evaluated, open_evaluated
from polyad.train.results import aligned
from polyad.train.tasks.images import ImageClassification

_NUMBER = re.compile(r"val_(\d{8})")
_WORDNET_ID = re.compile(r"n\d{8}")
Report = Callable[[float], None]


class Scorer(NamedTuple):
    """A model that classifies images for these sets."""

    opened: Evaluated
    task: ImageClassification
    model: torch.nn.Module
    world: comm.World

    @torch.inference_mode()
    def logits(self, images: EvaluationImages, report: Report) -> tuple[Tensor, Tensor]:
        """Logits [N, K] in fp32 and labels [N] of all images in their order, on each process."""
        world, found = self.world, []
        total = len(images)
        batches = evaluation_batches(
            images,
            total,
            self.opened.batch_size,
            rank=world.data_parallel_rank,
            ranks=world.data_parallel_size,
            num_workers=self.task.settings.num_workers,
        )
        done = 0
        for batch, _ in batches:
            inputs = self.task.inputs(batch.images_BCHW.to(world.device))
            logits_BK = self.model(inputs).logits.float().cpu()
            found.append((logits_BK, batch.labels_B))
            done += len(batch.labels_B) * world.data_parallel_size
            report(min(1.0, done / total))
        # Batch j of rank r is the (j * ranks + r)-th of all.
        gathered = comm.from_all(found)
        ordered = [part for parts in zip(*gathered, strict=True) for part in parts]
        logits = torch.cat([logits_BK for logits_BK, _ in ordered])[:total]
        return logits, torch.cat([labels_B for _, labels_B in ordered])[:total]

    def images(self, files: Sequence[LabelledFile], resize: float) -> EvaluationImages:
        """Files, whose shorter side is resized to so many times the model's before the crop."""
        settings = self.task.settings.model_copy(update={"evaluation_resize": resize})
        return EvaluationImages(FileSplit(files), settings, self.task.model.image_size)


def robustness(
    path: Path,
    set_name: str,
    folder: Path,
    *,
    data: str | None = None,
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
) -> dict[str, Any]:
    """Scores a checkpoint on one of the sets, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        set_name: a name of `ROBUSTNESS_SETS`.
        folder: that it was unpacked into; of ReaL the file `real.json`.
        data: prepared ImageNet; None takes the run's.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.

    Returns:
        JSON values, the same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base)
    task = opened.images("robustness")
    classes = len(imagenet_classes())
    if task.model.num_classes != classes:
        raise ConfigError(
            f"robustness: is not allowed with model.num_classes: {task.model.num_classes}; the "
            f"sets are of ImageNet-1k's {classes:,} classes"
        )
    check_order(task.data.manifest.class_names, task.place)
    score = _SCORES[set_name]
    config = opened.config
    started = time.monotonic()
    with opened.loaded("evaluating", None) as (model, world):
        found = score(Scorer(opened, task, model, world), folder)
    return {
        **opened.about(),
        "set": set_name,
        "folder": str(folder),
        **found,
        "image_size": task.model.image_size,
        "weights": weights,
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": time.monotonic() - started,
    }


def check_order(names: list[str], place: str) -> None:
    """Checks that a class has ImageNet's number, as far as names tell.

    The hub's names are words in the order of WordNet ids, which is not that of the alphabet.

    Args:
        names: Of the 1,000 classes that a model was trained with.
        place: Names the data in the error.

    Raises:
        ConfigError: They are other classes, or in another order.
    """
    ids = list(imagenet_classes())
    by_id = all(_WORDNET_ID.fullmatch(name) for name in names)
    if names != ids and (by_id or names == sorted(names)):
        raise ConfigError(
            f"robustness: {place} has 1,000 classes that are not ImageNet-1k's in their "
            f"order, by WordNet id: it begins with {', '.join(map(repr, names[:3]))}, not "
            f"{', '.join(map(repr, ids[:3]))}"
        )


def _own_validation(scorer: Scorer) -> str:
    """The split that is ImageNet's own validation split."""
    manifest = scorer.task.data.manifest
    if manifest.own_validation is None:
        raise ConfigError(
            f"robustness: {scorer.task.place} lacks ImageNet's own validation images, which this "
            f"set is compared with: {manifest.held_out}; prepare it without --held-out"
        )
    return manifest.own_validation


def _progress(scorer: Scorer, name: str, images: int) -> Report:
    if not scorer.world.is_main:
        return lambda share: None
    return Progress(name, images, "img")


def _corrupted(scorer: Scorer, folder: Path) -> dict[str, Any]:
    """Top-1 error of each corruption over its severities, and over AlexNet's (mCE)."""
    errors: dict[str, list[float]] = {name: [] for name in ALEXNET_ERRORS}
    for name, severity, files in corruptions(folder):
        report = _progress(scorer, f"{name} {severity}", len(files))
        logits_NK, labels_N = scorer.logits(scorer.images(files, 1.0), report)
        errors[name].append(1 - _accuracy(logits_NK, labels_N))
    means = {name: sum(each) / len(each) for name, each in errors.items()}
    relative = {name: mean / ALEXNET_ERRORS[name] for name, mean in means.items()}
    return {
        "top1": 1 - sum(means.values()) / len(means),
        "mce": sum(relative.values()) / len(relative),
        "corruptions": {
            name: {"error": means[name], "ce": relative[name], "severities": errors[name]}
            for name in means
        },
    }


def _subset(scorer: Scorer, folder: Path) -> dict[str, Any]:
    """Top-1 among the classes of the set alone: ImageNet-A and -R have 200."""
    files = by_wordnet_id(folder)
    classes_S = torch.tensor(classes_of(files))
    images = scorer.images(files, scorer.task.settings.evaluation_resize)
    logits_NK, labels_N = scorer.logits(images, _progress(scorer, folder.name, len(files)))
    predicted_N = classes_S[logits_NK[:, classes_S].argmax(-1)]
    right = float((predicted_N == labels_N).double().mean())
    return {"top1": right, "images_scored": len(files), "classes": len(classes_S)}


def _whole(
    read: Callable[[Path], list[LabelledFile]],
) -> Callable[[Scorer, Path], dict[str, Any]]:
    """Top-1 among all classes."""

    def score(scorer: Scorer, folder: Path) -> dict[str, Any]:
        files = read(folder)
        images = scorer.images(files, scorer.task.settings.evaluation_resize)
        logits_NK, labels_N = scorer.logits(images, _progress(scorer, folder.name, len(files)))
        return {"top1": _accuracy(logits_NK, labels_N), "images_scored": len(files)}

    return score


def _outliers(scorer: Scorer, folder: Path) -> dict[str, Any]:
    """Area under the precision-recall curve of finding ImageNet-O's images among ImageNet's.

    The score of an outlier is -max softmax over the set's classes; the images that belong are those
    of ImageNet's own validation split with one of these classes (Hendrycks et al. 2021).
    """
    from polyad.data.images.imagenet import average_precision

    split, files = _own_validation(scorer), by_wordnet_id(folder)
    classes_S = torch.tensor(classes_of(files))
    outside = scorer.images(files, scorer.task.settings.evaluation_resize)
    outside_NK, _ = scorer.logits(outside, _progress(scorer, folder.name, len(files)))
    labels = torch.as_tensor(scorer.task.data.split(split).labels)
    numbers = torch.isin(labels, classes_S).nonzero().flatten().tolist()
    if not numbers:
        raise ConfigError(f"{scorer.task.place}: its {split} split has none of the classes")
    inside = scorer.task.held_out(split).subset(numbers)
    inside_NK, _ = scorer.logits(inside, _progress(scorer, split, len(numbers)))
    confidences = [
        logits_NK[:, classes_S].softmax(-1).amax(-1) for logits_NK in (outside_NK, inside_NK)
    ]
    is_outside = [1] * len(files) + [0] * len(numbers)
    return {
        "aupr": average_precision(is_outside, (-torch.cat(confidences)).tolist()),
        "images_scored": len(files),
        "images_inside": len(numbers),
        "classes": len(classes_S),
    }


def _real(scorer: Scorer, file: Path) -> dict[str, Any]:
    """Share of the validation images whose highest class is one of the ReaL labels.

    Images without a label do not count (Beyer et al. 2020). `real.json` has a list of labels for
    each image, in the order of the file names.
    """
    labels = _real_labels(file)
    name = _own_validation(scorer)
    split, images = scorer.task.data.split(name), scorer.task.held_out(name)
    logits_NK, _ = scorer.logits(images, _progress(scorer, name, len(images)))
    right, count = 0, 0
    for number, predicted in enumerate(logits_NK.argmax(-1).tolist()):
        found = _NUMBER.search(split.name_of(number))
        if found is None or not 1 <= int(found[1]) <= len(labels):
            raise ConfigError(
                f"{split.name_of(number)}: is no name of a validation image, as "
                f"ILSVRC2012_val_00000001.JPEG, of which {file} has {len(labels):,}"
            )
        allowed = labels[int(found[1]) - 1]
        if allowed:
            count, right = count + 1, right + (predicted in allowed)
    if not count:
        raise ConfigError(f"{file}: has no label of any image of the validation split")
    return {
        "top1": right / count,
        "images_scored": count,
        "images_without_label": len(images) - count,
    }


def _real_labels(file: Path) -> list[list[int]]:
    labels = read_json(file, error=ConfigError)
    if not isinstance(labels, list) or not all(isinstance(each, list) for each in labels):
        raise ConfigError(f"{file}: is not a list of lists of class numbers, as ReaL's real.json")
    return labels


def _accuracy(logits_NK: Tensor, labels_N: Tensor) -> float:
    return float((logits_NK.argmax(-1) == labels_N).double().mean())


_SCORES: dict[str, Callable[[Scorer, Path], dict[str, Any]]] = {
    "c": _corrupted,
    "a": _subset,
    "r": _subset,
    "o": _outliers,
    "v2": _whole(by_number),
    "sketch": _whole(by_wordnet_id),
    "real": _real,
}


def robustness_table(result: dict[str, Any]) -> str:
    """A result for a person."""
    rows = [
        ("checkpoint", f"{result['checkpoint']} (step {result['step']:,})"),
        ("set", f"{_TITLES[result['set']]}, {result['folder']}"),
    ]
    rows += [
        (title, f"{result[key]:.4f}")
        for key, title in (("top1", "top-1"), ("mce", "mCE"), ("aupr", "AUPR"))
        if key in result
    ]
    rows += list(_corruption_rows(result))
    if "images_scored" in result:
        of = f", {result['classes']} classes" if "classes" in result else ""
        rows.append(("scored", f"{result['images_scored']:,} images{of}"))
    rows.append(("processes", f"{result['processes']}"))
    return "\n".join(aligned(rows, "<"))


_TITLES = {
    "c": "ImageNet-C",
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "o": "ImageNet-O",
    "v2": "ImageNet-V2",
    "sketch": "ImageNet-Sketch",
    "real": "ReaL labels",
}


def _corruption_rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, found in result.get("corruptions", {}).items():
        yield (
            name.replace("_", " "),
            f"error {found['error']:.4f}, over AlexNet's {found['ce']:.4f}",
        )
