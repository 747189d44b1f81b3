"""`polyad experts rewrite`: shifts one output of a muMoE head by a subpopulation's experts.

    y_o + lambda abar^T a        abar: the mean coefficients of the subpopulation

Corrects the model on a subpopulation through its experts, without training any weight.

Source: Oldfield et al. 2024, section 4.2 (equation 5); the measures: appendix J, and the rewrite
score section 4.2.1 of the earlier version.

Shapes: B images of a batch, K attributes, S experts of the head (all levels side by side), G = 4
subpopulations: the output's value, 0 or 1, times the sensitive attribute's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import routed_head
from polyad.train.measures.measure import Analysis
from polyad.train.reading import EvaluationContext, ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.images import AttributeClassification
from polyad.train.tasks.samples import ImageSamples

FORM = "class=NAME,of=NAME[:0]+NAME[:0]...[,by=NUMBER]"


class Rewrite(NamedTuple):
    """The option `--move`."""

    output: int
    """The attribute whose output is shifted."""
    of: Mapping[int, bool]
    """The subpopulation: the values that its images have of some attributes, this one among
    them."""
    by: float | None
    """lambda; None: the number of experts, with the sign of the subpopulation's value."""

    @property
    def target(self) -> int:
        """The `group` of the subpopulation."""
        return 2 * self.of[self.output] + 1

    def group(self, labels_BK: Tensor) -> Tensor:
        """The subpopulation [B] of images: twice the value of the output's attribute, plus whether
        they meet the other conditions."""
        others = [number for number in self.of if number != self.output]
        values = torch.tensor([self.of[number] for number in others], device=labels_BK.device)
        is_member_B = ((labels_BK[:, others] == 1) == values).all(-1)
        return 2 * (labels_BK[:, self.output] == 1).long() + is_member_B.long()


def read_rewrite(text: str, names: Sequence[str]) -> Rewrite:
    """Reads the option `--move`.

    Args:
        text: as in `FORM`.
        names: the attributes.

    Raises:
        ConfigError: a part is missing, or names no attribute.
    """
    parts = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
    if not {"class", "of"} <= parts.keys() <= {"class", "of", "by"}:
        raise ConfigError(f"--move: {text!r} is not allowed; the form is {FORM}")
    pairs = [word.partition(":") for word in parts["of"].split("+")]
    for name in (parts["class"], *(name for name, *_ in pairs)):
        if name not in names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ConfigError(f"--move: {name!r} is not an attribute, which are {shown}")
    output, of = names.index(parts["class"]), {names.index(name): v != "0" for name, _, v in pairs}
    if output not in of or len(of) < 2:
        raise ConfigError(
            f"--move: of={parts['of']} is not allowed with class={parts['class']}: a subpopulation "
            f"has a value of {parts['class']} and of another attribute"
        )
    try:
        return Rewrite(output, of, float(parts["by"]) if "by" in parts else None)
    except ValueError:
        raise ConfigError(f"--move: by={parts['by']} is not allowed; it must be a number") from None


def _measures(accuracy_G: Tensor, images_G: Tensor, target: int) -> dict[str, float]:
    """The measures by name; NaN where a subpopulation is empty.

    Args:
        accuracy_G: share of correct images of each subpopulation; NaN if it is empty.
        images_G: their numbers.
        target: the subpopulation for which a rewrite is made.
    """
    right, some_G = (accuracy_G.nan_to_num() * images_G).sum(), accuracy_G[images_G > 0]
    counterpart = accuracy_G[target ^ 1]  # the other value of the sensitive attribute
    values = {
        "accuracy": right / images_G.sum(),
        "target_accuracy": accuracy_G[target],
        "equality_of_opportunity": (accuracy_G[target] - counterpart).abs(),
        "standard_deviation": some_G.std(correction=0),
        "lowest_accuracy": some_G.min(),
    }
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
    """The option `--move`, in the form `FORM`."""

    def check(self, opened: EvaluationContext) -> None:
        """Finds the training images of the subpopulation."""
        self._task = task = opened.need(f"experts {self.name}", AttributeClassification)
        self._rewrite = read_rewrite(self.move, task.data.class_names)
        group_N = self._rewrite.group(torch.as_tensor(task.data.split("train").labels))
        self._members = (group_N == self._rewrite.target).nonzero()[:, 0].tolist()
        if not self._members:
            raise ConfigError("--move: no training image belongs to the subpopulation")

    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads the subpopulation, and then the split."""
        import pandas as pd

        task, rewrite, members = self._task, self._rewrite, self._members
        head = routed_head(model)
        if head is None:
            raise ConfigError(
                f"--move: {opened.weights.folder}: its head has no experts; it needs a model with "
                f"model.head.kind: mumoe"
            )

        def readings(samples: ImageSamples, label: str) -> Iterator[tuple[ForwardPass, Tensor]]:
            """Each batch with its coefficients [B, S]."""
            subject = Subject(model, [head], samples, opened.batch_size)
            for each in subject.read(world, label=label):
                yield each, each.decisions[head.name].coefficients()

        images = Subset(task.held_out("train"), members)
        sums_S = torch.zeros(head.num_experts, dtype=torch.float64, device=world.device)
        for _, a_BS in readings(ImageSamples(task, images=images), "read the subpopulation"):
            sums_S += a_BS.double().sum(0)
        mean_S = (comm.sum_over_samples(sums_S, world) / len(members)).float()
        by = rewrite.by
        if by is None:
            by = float(head.num_experts if rewrite.of[rewrite.output] else -head.num_experts)
        # images of each subpopulation, and those that are correct before and after
        counts_G3 = torch.zeros(4, 3, dtype=torch.float64, device=world.device)
        scored = ImageSamples(task, opened.split)
        for forward_pass, a_BS in readings(scored, f"score {opened.split}"):
            labels_BK = forward_pass.batch.labels_B
            before_B = forward_pass.output.float()[:, rewrite.output]
            after_B = before_B + by * (a_BS @ mean_S)
            truth_B = labels_BK[:, rewrite.output] == 1
            right = [(each_B > 0) == truth_B for each_B in (before_B, after_B)]
            counted_B3 = torch.stack([torch.ones_like(truth_B), *right], dim=-1).double()
            counts_G3.index_add_(0, rewrite.group(labels_BK), counted_B3)
        counts_G3 = comm.sum_over_samples(counts_G3.flatten(), world).view(4, 3).cpu()
        images_G, accuracy_2G = counts_G3[:, 0], (counts_G3[:, 1:] / counts_G3[:, :1]).T
        target, names = rewrite.target, task.data.class_names
        of = "+".join(names[n] + ("" if value else ":0") for n, value in rewrite.of.items())
        facts = {
            "images_scored": scored.rows,
            "class": names[rewrite.output],
            "of": of,
            "by": by,
            "images_of_subpopulation": len(members),
            "rewrite_score": _rewrite_score(accuracy_2G[1] - accuracy_2G[0], target),
        }
        groups = {
            "has_class": [False, False, True, True],
            "has_others": [False, True, False, True],
            "images": images_G.int().tolist(),
            "before": accuracy_2G[0].tolist(),
            "after": accuracy_2G[1].tolist(),
        }
        both = [_measures(accuracy_G, images_G, target) for accuracy_G in accuracy_2G]
        measures = pd.DataFrame(both, index=["before", "after"]).T
        experts = pd.DataFrame(map(head.named, range(head.num_experts)))
        return Tables(
            facts=facts,
            frames={
                "measures": measures.rename_axis("measure").reset_index(),
                "subpopulations": pd.DataFrame(groups)[::-1].reset_index(drop=True),
                "experts": experts.assign(mean_coefficient=mean_S.tolist()),
            },
            titles={
                "measures": "before and after the output moved by the similarity of coefficients",
                "subpopulations": "accuracy of subpopulations",
            },
        )
