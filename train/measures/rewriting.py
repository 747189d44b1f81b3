"""`polyad experts rewrite`: shifts one output of a muMoE head by a subpopulation's experts.

    y_o + lambda abar^T a        abar: the mean coefficients of the subpopulation

Corrects the model on a subpopulation through its experts, without training any weight.

Source: Oldfield et al. 2024, section 4.2 (equation 5); the measures: appendix J, and the rewrite
score section 4.2.1 of the earlier version.

Shapes: B images of a batch, K classes, S experts of the head (all levels side by side), G = 4
subpopulations: the output's value, 0 or 1, times the sensitive attribute's.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, routed_head
from polyad.train.measures.measure import Examination
from polyad.train.reading import Evaluated, Reader, Reading, read
from polyad.train.results import Tables
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples

FORM = "class=NAME,of=NAME[:0][+NAME[:0]...],by=NUMBER"
PART = re.compile(r"(?:^|,)(class|of|by)=(.*?)(?=,(?:class|of|by)=|$)", re.DOTALL)
"""Class names may contain commas."""


class Condition(NamedTuple):
    """A class that an image has or does not have."""

    number: int
    value: bool


class Rewrite(NamedTuple):
    """The option `--move`."""

    output: int
    """The class whose output is shifted."""
    of: tuple[Condition, ...]
    """The subpopulation: images with all of these."""
    by: float | None
    """lambda; None: the number of experts, with the sign of the subpopulation's value."""

    @property
    def value(self) -> bool:
        """Whether the images of the subpopulation have the class."""
        return next((each.value for each in self.of if each.number == self.output), True)

    def strength(self, experts: int) -> float:
        """lambda, for a head with this many experts."""
        if self.by is not None:
            return self.by
        return float(experts if self.value else -experts)

    def members(self, labels: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """Indices of the subpopulation's images, from labels [N] or [N, K]."""
        found = np.ones(len(labels), dtype=bool)
        for number, value in self.of:
            has = labels == number if labels.ndim == 1 else labels[:, number] == 1
            found &= has == value
        return np.flatnonzero(found)


def read_rewrite(text: str, task: ImageClassification) -> Rewrite:
    """Reads the option `--move`.

    Args:
        text: as in `FORM`.
        task: the task that has the classes.

    Raises:
        ConfigError: a part is missing, or names no class.
    """
    parts: dict[str, str] = dict(PART.findall(text))
    if text != ",".join(f"{key}={value}" for key, value in parts.items()) or "class" not in parts:
        raise ConfigError(
            f"--move: {text!r} is not allowed; the form is {FORM}, where of and by may be missing"
        )
    names = task.data.class_names
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
        raise ConfigError(f"--move: by={parts['by']} is not allowed; it must be a number")
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
    raise ConfigError(f"--move: {word!r} is not a class of the data, which has {shown}")


def _measures(
    accuracy_G: Tensor, images_G: Tensor, target: int, *, has_attributes: bool
) -> dict[str, float]:
    """The measures by name; NaN where a subpopulation is empty.

    Args:
        accuracy_G: share of correct images of each subpopulation; NaN if it is empty.
        images_G: their numbers.
        target: the subpopulation for which a rewrite is made.
        has_attributes: whether an image may have any number of classes; else there are two
            subpopulations: the images of the class, and all others.
    """
    right = (accuracy_G.nan_to_num() * images_G).sum()
    values = {"accuracy": right / images_G.sum(), "target_accuracy": accuracy_G[target]}
    if not has_attributes:
        values["others_accuracy"] = accuracy_G[0]
    else:
        some_G = accuracy_G[images_G > 0]
        counterpart = accuracy_G[target ^ 1]  # the other value of the sensitive attribute
        values["equality_of_opportunity"] = (accuracy_G[target] - counterpart).abs()
        values["standard_deviation"] = some_G.std(correction=0)
        values["lowest_accuracy"] = some_G.min()
    return {name: float(value) for name, value in values.items()}


def _rewrite_score(change_G: Tensor, target: int) -> float:
    """The target's gain minus changes elsewhere; at best 1 - its accuracy; NaN if it is empty."""
    others = change_G.nan_to_num().abs().sum() - change_G[target].abs()
    return float(change_G[target] - others)


class Rewriting(Examination):
    """Scores images before and after a rewrite with mean coefficients from training images."""

    name = "rewrite"
    doing = "rewriting"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> tuple[Rewrite, list[int]]:
        """Reads the option `move`, and finds the training images of the subpopulation."""
        task = opened.images(f"experts {cls.name}", attributes=True)
        rewrite = read_rewrite(options["move"], task)
        task.check_split(split)
        members = rewrite.members(task.data.split("train").labels).tolist()
        if not members:
            raise ConfigError("--move: no training image belongs to the subpopulation")
        return rewrite, members

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        settings: tuple[Rewrite, list[int]],
        model: nn.Module,
        world: comm.World,
    ) -> Tables:
        """Reads the subpopulation, and then the split."""
        import pandas as pd

        (rewrite, members), task = settings, opened.images(f"experts {cls.name}", attributes=True)
        head = routed_head(model)
        if head is None:
            raise ConfigError(
                f"--move: {opened.weights.folder}: its head has no experts; it needs a model with "
                f"model.head.kind: mumoe"
            )

        def read_all(samples: ImageSamples, measure: Reader, title: str) -> None:
            size = opened.batch_size
            read(model, [head], samples, [measure], batch_size=size, world=world, label=title)

        workers = task.settings.num_workers
        mean = _MeanCoefficients(head, world.device)
        images = task.held_out("train").subset(members)
        some = ImageSamples(task, images=images, num_workers=workers)
        read_all(some, mean, "read the subpopulation")
        mean_S = mean.result(len(members), world)
        by = rewrite.strength(head.num_experts)
        counted = _Counted(rewrite, head, mean_S, by, has_attributes=task.has_attributes)
        scored = ImageSamples(task, split, num_workers=workers)
        read_all(scored, counted, f"score {split}")
        accuracy_2G, images_G = counted.result(world)
        target = 2 * rewrite.value + task.has_attributes
        names = task.data.class_names
        of = "+".join(names[each.number] + ("" if each.value else ":0") for each in rewrite.of)
        facts = {
            "images_scored": scored.rows,
            "class": names[rewrite.output],
            "of": of,
            "by": by,
            "images_of_subpopulation": len(members),
        }
        groups = []
        if task.has_attributes:
            facts["rewrite_score"] = _rewrite_score(accuracy_2G[1] - accuracy_2G[0], target)
            groups = [
                {
                    "has_class": bool(group // 2),
                    "has_others": bool(group % 2),
                    "images": int(images_G[group]),
                    "before": float(accuracy_2G[0, group]),
                    "after": float(accuracy_2G[1, group]),
                }
                for group in (3, 2, 1, 0)
            ]
        measures = pd.DataFrame(
            {
                when: _measures(each_G, images_G, target, has_attributes=task.has_attributes)
                for when, each_G in zip(("before", "after"), accuracy_2G, strict=True)
            }
        )
        means = [
            {"module": head.name, "level": level, "expert": expert, "mean_coefficient": value}
            for column, value in enumerate(mean_S.tolist())
            for level, expert in [head.place(column)]
        ]
        return Tables(
            facts=facts,
            frames={
                "measures": measures.rename_axis("measure").reset_index(),
                "subpopulations": pd.DataFrame(groups),
                "experts": pd.DataFrame(means),
            },
            titles={
                "measures": "before and after the output moved by the similarity of coefficients",
                "subpopulations": "accuracy of subpopulations",
            },
        )


class _MeanCoefficients:
    """Accumulates the coefficients of the head's experts."""

    blocks: Sequence[int] = ()

    def __init__(self, head: RoutedLayer, device: torch.device) -> None:
        self._head = head
        self._sums_S = torch.zeros(head.num_experts, dtype=torch.float64, device=device)

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        self._sums_S += reading.decisions[self._head.name].coefficients().double().sum(0)

    def result(self, images: int, world: comm.World) -> Tensor:
        """abar [S], over this many images of all processes."""
        return (comm.sum_over_samples(self._sums_S, world) / images).float()


class _Counted:
    """Counts correct outputs before and after, by subpopulation.

    For attributes the subpopulations are the output's value times whether the image meets the other
    conditions; for classes whether the image belongs to the output's class (2) or not (0).
    """

    blocks: Sequence[int] = ()

    def __init__(
        self,
        rewrite: Rewrite,
        head: RoutedLayer,
        mean_S: Tensor,
        by: float,
        *,
        has_attributes: bool,
    ) -> None:
        self._rewrite, self._head, self._mean_S, self._by = rewrite, head, mean_S, by
        self._has_attributes = has_attributes
        # before and after; images and correct ones of each subpopulation
        self._counts_2G2 = torch.zeros(2, 4, 2, dtype=torch.float64, device=mean_S.device)

    def add(self, reading: Reading) -> None:
        """Counts a batch; labels are [B], or for attributes [B, K]."""
        logits_BK, labels = reading.output.float(), reading.batch.labels_B
        a_BS = reading.decisions[self._head.name].coefficients()
        output = self._rewrite.output
        rewritten_BK = logits_BK.clone()
        rewritten_BK[:, output] += self._by * (a_BS @ self._mean_S)
        if self._has_attributes:
            value_B = labels[:, output] == 1
            others = [each for each in self._rewrite.of if each.number != output]
            has_B = torch.stack([(labels[:, n] == 1) == value for n, value in others]).all(0)
        else:
            value_B, has_B = labels == output, torch.zeros_like(labels, dtype=torch.bool)
        group_B = 2 * value_B.long() + has_B.long()
        for place, each_BK in enumerate((logits_BK, rewritten_BK)):
            if self._has_attributes:
                right_B = (each_BK[:, output] > 0) == value_B
            else:
                right_B = each_BK.argmax(-1) == labels
            counted_B2 = torch.stack([torch.ones_like(group_B), right_B], dim=-1).double()
            self._counts_2G2[place].index_add_(0, group_B, counted_B2)

    def result(self, world: comm.World) -> tuple[Tensor, Tensor]:
        """The accuracies before and after [2, G], NaN where there is no image, and the numbers of
        images [G], over all processes."""
        counts = comm.sum_over_samples(self._counts_2G2.flatten(), world).view(2, 4, 2).cpu()
        images_2G, right_2G = counts.unbind(-1)
        return right_2G / images_2G, images_2G[0]
