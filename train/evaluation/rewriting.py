"""`polyad experts rewrite`: moves one output of a muMoE head by a subpopulation's experts.

Shapes: B images of a batch, K classes, S experts of the head, G = 4 subpopulations.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, routed_head
from polyad.train.experts.rewriting import Fairness, fairness_of, moved, subpopulations
from polyad.train.reading import Reader, Reading, open_evaluated, read
from polyad.train.results import aligned
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples

FORM = "class=NAME,of=NAME[:0][+NAME[:0]...],by=NUMBER"
PART = re.compile(r"(?:^|,)(class|of|by)=(.*?)(?=,(?:class|of|by)=|$)", re.DOTALL)
"""Names of classes may hold commas."""


class Condition(NamedTuple):
    """A class that an image has, or has not."""

    number: int
    value: bool


class Rewrite(NamedTuple):
    """What `--move` says."""

    output: int
    """The class whose output is moved."""
    of: tuple[Condition, ...]
    """The subpopulation: images with all of these."""
    by: float | None
    """lambda; None: the number of experts, with the sign that the subpopulation's value has."""


def read_rewrite(text: str, task: ImageClassification) -> Rewrite:
    """Reads the option.

    Args:
        text: as in `FORM`.
        task: of the classes.

    Raises:
        ConfigError: a part is missing, or names no class.
    """
    parts: dict[str, str] = dict(PART.findall(text))
    if text != ",".join(f"{key}={value}" for key, value in parts.items()) or "class" not in parts:
        raise ConfigError(f"--move: {text!r} is not allowed; {FORM} is, of and by may be missing")
    names = task.data.manifest.class_names
    output = _class_number(parts["class"], names)
    words = parts["of"] if "of" in parts else parts["class"]
    of: tuple[Condition, ...]
    if task.has_attributes:
        of = tuple(_condition(word, names) for word in words.split("+"))
    else:
        of = (Condition(_class_number(words, names), value=True),)
    if task.has_attributes and (
        output not in {each.number for each in of} or len({each.number for each in of}) < 2
    ):
        other = names[1 if output == 0 and len(names) > 1 else 0]
        raise ConfigError(
            f"--move: of={words} is not allowed with class={parts['class']}: a subpopulation "
            f"has a value of {parts['class']} and of another attribute, as "
            f"{parts['class']}+{other}"
        )
    try:
        by = float(parts["by"]) if "by" in parts else None
    except ValueError:
        by = float("nan")
    if by is not None and not abs(by) < float("inf"):
        raise ConfigError(f"--move: by={parts['by']} is not allowed: a number is")
    return Rewrite(output, of, by)


def _condition(word: str, names: Sequence[str]) -> Condition:
    name, colon, value = word.rpartition(":")
    if colon and value in ("0", "1"):
        return Condition(_class_number(name, names), value == "1")
    return Condition(_class_number(word, names), value=True)


def _class_number(word: str, names: Sequence[str]) -> int:
    if word in names:
        return list(names).index(word)
    if word.isdecimal() and int(word) < len(names):
        return int(word)
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise ConfigError(f"--move: {word!r} is no class of the data; it has {shown}")


TITLES = {
    "target_accuracy": "target's accuracy",
    "others_accuracy": "others' accuracy",
    "equality_of_opportunity": "equality of opportunity",
    "standard_deviation": "standard deviation",
    "lowest_accuracy": "lowest accuracy",
    "accuracy": "accuracy",
}


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """Scores of a model before and after a rewrite."""

    checkpoint: str
    step: int
    data: str
    split: str
    images_scored: int
    output: str
    """The class whose output is moved."""
    of: str
    """The subpopulation."""
    by: float
    images_of_subpopulation: int
    mean_coefficients: list[float]
    scores: dict[str, Any]
    """`before` and `after`, and of attributes the `rewrite_score`."""
    weights: Choice
    precision: str
    processes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            found |= value if name == "scores" else {name.replace("output", "class"): value}
        return found

    def text(self) -> str:
        """What people get."""
        facts = [
            ("checkpoint", f"{self.checkpoint} (step {self.step:,})"),
            ("split", f"{self.split} of {self.data}, {self.images_scored:,} images"),
            ("output", self.output),
            ("subpopulation", f"{self.of}, {self.images_of_subpopulation:,} training images"),
            ("moved by", f"{self.by:g} times the likeness of the experts"),
            ("processes", f"{self.processes}"),
        ]
        before, after = self.scores["before"], self.scores["after"]
        table = [("", " before", "  after")]
        for name, title in TITLES.items():
            if name in before:
                table.append((title, _shown(before[name]), _shown(after[name])))
        if "rewrite_score" in self.scores:
            table.append(("rewrite score", "", _shown(self.scores["rewrite_score"])))
        return "\n".join([*aligned(facts, "<"), "", *aligned(table)])


def _shown(value: float | None) -> str:
    return f"{'none':>7}" if value is None else f"{value:7.4f}"


def rewriting(
    path: Path,
    rewrite: str,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
) -> Rewritten:
    """Scores a model before and after a rewrite, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken; its head is a muMoE.
        rewrite: as in `FORM`; the mean coefficients are those of training images.
        data: prepared images; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.

    Returns:
        The same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base)
    task, config = opened.images("experts rewrite", attributes=True), opened.config
    chosen = read_rewrite(rewrite, task)
    task.check_split(split)
    members = np.flatnonzero(_members(task.data.split("train").labels, chosen.of))
    if not len(members):
        raise ConfigError("--move: no training image is of the subpopulation")
    started = time.monotonic()
    with opened.loaded("rewriting", split) as (model, world):
        head = routed_head(model)
        if head is None:
            raise ConfigError(
                f"--move: {path}: its head has no experts; it needs a model with "
                f"model.head.kind: mumoe"
            )

        def read_all(samples: ImageSamples, measure: Reader, title: str) -> None:
            size = opened.batch_size
            read(model, [head], samples, [measure], batch_size=size, world=world, told=title)

        workers = task.settings.num_workers
        mean = _MeanCoefficients(head, world.device)
        images = task.held_out("train").subset(members.tolist())
        some = ImageSamples(task, "train", of=images, num_workers=workers)
        read_all(some, mean, "read the subpopulation")
        mean_S = mean.result(len(members), world)
        by = chosen.by if chosen.by is not None else _strength(chosen, head)
        counted = _Counted(chosen, head, mean_S, by, has_attributes=task.has_attributes)
        read_all(ImageSamples(task, split, num_workers=workers), counted, f"score {split}")
        scores = counted.result(world)
    names = task.data.manifest.class_names
    return Rewritten(
        **opened.about(),
        data=task.name,
        split=split,
        images_scored=task.units_of(split),
        output=names[chosen.output],
        of="+".join(names[each.number] + ("" if each.value else ":0") for each in chosen.of),
        by=by,
        images_of_subpopulation=len(members),
        mean_coefficients=mean_S.tolist(),
        scores=scores,
        weights=weights,
        precision=config.train.precision,
        processes=world.size,
        seconds=time.monotonic() - started,
    )


def _members(labels: npt.NDArray[np.integer], of: Sequence[Condition]) -> npt.NDArray[np.bool_]:
    """Which images have all of the conditions."""
    found = np.ones(len(labels), dtype=bool)
    for number, value in of:
        has = labels == number if labels.ndim == 1 else labels[:, number] == 1
        found &= has == value
    return found


def _strength(chosen: Rewrite, head: RoutedLayer) -> float:
    """The number of experts, negative where the subpopulation lacks the class."""
    lacks = any(each.number == chosen.output and not each.value for each in chosen.of)
    return float(-head.num_experts if lacks else head.num_experts)


class _MeanCoefficients:
    """The mean coefficients of some images' experts.

    Args:
        head: the layer of the experts.
        device: of the model.
    """

    blocks: Sequence[int] = ()

    def __init__(self, head: RoutedLayer, device: torch.device) -> None:
        self._head = head
        self._sums_S = torch.zeros(head.num_experts, dtype=torch.float64, device=device)

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        self._sums_S += reading.decisions[self._head.name].coefficients().double().sum(0)

    def result(self, images: int, world: comm.World) -> Tensor:
        """abar [S], over so many images of all processes."""
        return (comm.sum_over_samples(self._sums_S, world) / images).float()


class _Counted:
    """Counts what is right before and after, by subpopulation.

    Of attributes the subpopulations are the output's value times whether the image has the other
    conditions; of classes whether the image is of the output's class (2) or not (0).

    Args:
        chosen: the rewrite.
        head: the layer of the experts.
        mean_S: abar.
        by: lambda.
        has_attributes: whether an image has any number of classes.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self,
        chosen: Rewrite,
        head: RoutedLayer,
        mean_S: Tensor,
        by: float,
        *,
        has_attributes: bool,
    ) -> None:
        self._chosen, self._head, self._mean_S, self._by = chosen, head, mean_S, by
        self._has_attributes = has_attributes
        # before and after; images and right ones of each subpopulation
        self._counts_2G2 = torch.zeros(2, 4, 2, dtype=torch.float64, device=mean_S.device)

    def add(self, reading: Reading) -> None:
        """Counts a batch; labels are [B], or [B, K] of attributes."""
        logits_BK, labels = reading.output.float(), reading.batch.labels_B
        a_BS = reading.decisions[self._head.name].coefficients()
        output = self._chosen.output
        rewritten_BK = logits_BK.clone()
        rewritten_BK[:, output] = moved(logits_BK[:, output], a_BS, self._mean_S, self._by)
        if self._has_attributes:
            value_B = labels[:, output] == 1
            others = [each for each in self._chosen.of if each.number != output]
            has_B = torch.stack([(labels[:, n] == 1) == value for n, value in others]).all(0)
        else:
            value_B, has_B = labels == output, torch.zeros_like(labels, dtype=torch.bool)
        group_B = subpopulations(value_B, has_B)
        for place, each_BK in enumerate((logits_BK, rewritten_BK)):
            if self._has_attributes:
                right_B = (each_BK[:, output] > 0) == value_B
            else:
                right_B = each_BK.argmax(-1) == labels
            counted_B2 = torch.stack([torch.ones_like(group_B), right_B], dim=-1).double()
            self._counts_2G2[place].index_add_(0, group_B, counted_B2)

    def result(self, world: comm.World) -> dict[str, Any]:
        """Scores over all processes, before and after."""
        counts = comm.sum_over_samples(self._counts_2G2.flatten(), world).view(2, 4, 2).cpu()
        value = next(
            (each.value for each in self._chosen.of if each.number == self._chosen.output), True
        )
        target = 2 * value + (1 if self._has_attributes else 0)
        before, after = (fairness_of(each[:, 1], each[:, 0], target) for each in counts)
        if not self._has_attributes:
            return {"before": _of_classes(before), "after": _of_classes(after)}
        return {
            "before": before.measures() | {"subpopulations": _groups(before)},
            "after": after.measures() | {"subpopulations": _groups(after)},
            "rewrite_score": after.rewrite_score(before),
        }


def _of_classes(found: Fairness) -> dict[str, Any]:
    measures = found.measures()
    others = float(found.accuracy_G[0]) if found.images_G[0] > 0 else None
    return {
        "accuracy": measures["accuracy"],
        "target_accuracy": measures["target_accuracy"],
        "others_accuracy": others,
    }


def _groups(found: Fairness) -> list[dict[str, Any]]:
    """What each subpopulation has, its images and its accuracy."""
    return [
        {
            "has_class": bool(group // 2),
            "has_others": bool(group % 2),
            "images": int(found.images_G[group]),
            "accuracy": float(found.accuracy_G[group]) if found.images_G[group] > 0 else None,
        }
        for group in (3, 2, 1, 0)
    ]
