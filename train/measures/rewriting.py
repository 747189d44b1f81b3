"""`polyad experts rewrite`: shifts one output of a muMoE head by a subpopulation's experts.

    y_o + lambda abar^T a        abar: the mean coefficients of the subpopulation

Corrects the model on a subpopulation through its experts, without training any weight.

Source: Oldfield et al. 2024, section 4.2 (equation 5); the measures: appendix J, and the rewrite
score section 4.2.1 of the earlier version.

Shapes: B images of a batch, K classes, S experts of the head (all levels side by side), G = 4
subpopulations: the output's value, 0 or 1, times the sensitive attribute's.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import routed_head
from polyad.train.measures.measure import Analysis
from polyad.train.reading import Evaluated, Reading, Subject
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
    def target(self) -> int:
        """The `group` of the subpopulation."""
        value = next((each.value for each in self.of if each.number == self.output), True)
        return 2 * value + 1

    def strength(self, experts: int) -> float:
        """lambda, for a head with this many experts."""
        if self.by is not None:
            return self.by
        return float(experts if self.target == 3 else -experts)

    def group(self, labels: Tensor) -> Tensor:
        """The subpopulation [B] of images: twice whether they have the output's class, plus whether
        they meet the other conditions, which classes do not have.

        Args:
            labels: [B], or for attributes [B, K].
        """
        others = [each for each in self.of if each.number != self.output and labels.ndim > 1]
        return 2 * _has(labels, self.output).long() + _meets(labels, others).long()

    def is_right(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        """Which images have the right class, or for attributes the right value of the output."""
        if labels.ndim == 1:
            return logits_BK.argmax(-1) == labels
        return (logits_BK[:, self.output] > 0) == _has(labels, self.output)


def _has(labels: Tensor, number: int) -> Tensor:
    """Which images have a class [B]."""
    return labels == number if labels.ndim == 1 else labels[:, number] == 1


def _meets(labels: Tensor, conditions: Iterable[Condition]) -> Tensor:
    """Which images meet all conditions [B]."""
    meets_B = torch.ones_like(labels.select(-1, 0) if labels.ndim > 1 else labels).bool()
    for number, value in conditions:
        meets_B &= _has(labels, number) == value
    return meets_B


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
    words = parts.get("of", parts["class"])
    if task.has_attributes:
        of = tuple(_condition(word, names) for word in words.split("+"))
    else:
        of = (Condition(_class_number(words, names), value=True),)
    numbers = {each.number for each in of}
    if task.has_attributes and (output not in numbers or len(numbers) < 2):
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
        values["others_accuracy"] = accuracy_G[target ^ 2]  # of all that lack the class
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


@dataclass(kw_only=True)
class Rewriting(Analysis):
    """Scores images before and after a rewrite with mean coefficients from training images."""

    name = "rewrite"
    doing = "rewriting"

    move: str
    """As in `FORM`."""

    def check(self, opened: Evaluated, split: str) -> None:
        """Finds the training images of the subpopulation."""
        task = opened.need(f"experts {self.name}", ImageClassification)
        self._rewrite = read_rewrite(self.move, task)
        task.check_split(split)
        labels = torch.as_tensor(task.data.split("train").labels)
        self._members = _meets(labels, self._rewrite.of).nonzero()[:, 0].tolist()
        if not self._members:
            raise ConfigError("--move: no training image belongs to the subpopulation")

    def run(self, opened: Evaluated, split: str, model: nn.Module, world: comm.World) -> Tables:
        """Reads the subpopulation, and then the split."""
        import pandas as pd

        rewrite, members = self._rewrite, self._members
        task = opened.need(f"experts {self.name}", ImageClassification)
        head = routed_head(model)
        if head is None:
            raise ConfigError(
                f"--move: {opened.weights.folder}: its head has no experts; it needs a model with "
                f"model.head.kind: mumoe"
            )

        def readings(samples: ImageSamples, label: str) -> Iterator[tuple[Reading, Tensor]]:
            """Each batch with its coefficients [B, S]."""
            subject = Subject(model, [head], samples, opened.batch_size)
            for each in subject.read(world, label=label):
                yield each, each.decisions[head.name].coefficients()

        images = Subset(task.held_out("train"), members)
        sums_S = torch.zeros(head.num_experts, dtype=torch.float64, device=world.device)
        some = ImageSamples(task, images=images)
        for _, a_BS in readings(some, "read the subpopulation"):
            sums_S += a_BS.double().sum(0)
        mean_S = (comm.sum_over_samples(sums_S, world) / len(members)).float()
        by = rewrite.strength(head.num_experts)
        # before and after; images and correct ones of each subpopulation
        counts_2G2 = torch.zeros(2, 4, 2, dtype=torch.float64, device=world.device)
        scored = ImageSamples(task, split)
        for reading, a_BS in readings(scored, f"score {split}"):
            logits_BK, labels = reading.output.float(), reading.batch.labels_B
            rewritten_BK = logits_BK.clone()
            rewritten_BK[:, rewrite.output] += by * (a_BS @ mean_S)
            group_B = rewrite.group(labels)
            for place, each_BK in enumerate((logits_BK, rewritten_BK)):
                right_B = rewrite.is_right(each_BK, labels)
                counted_B2 = torch.stack([torch.ones_like(group_B), right_B], dim=-1).double()
                counts_2G2[place].index_add_(0, group_B, counted_B2)
        counts_2G2 = comm.sum_over_samples(counts_2G2.flatten(), world).view(2, 4, 2).cpu()
        images_G, accuracy_2G = counts_2G2[0, :, 0], counts_2G2[..., 1] / counts_2G2[..., 0]
        target, names = rewrite.target, task.data.class_names
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
