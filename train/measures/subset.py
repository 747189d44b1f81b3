"""`polyad experts subset`: the cost of keeping only the experts that a domain's examples choose.

In each layer the experts that some examples rank highest are kept, such as those with the highest
mean probability (EMO). The others are removed with their rows of the router, so that the next best
experts replace them. The loss on held-out text is measured for several shares of the experts, and
compared with the whole model and equally many random experts; unlike `experts prune`, this writes
no smaller model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from polyad.parallel import comm
from polyad.train.exchange.pruning import Groups
from polyad.train.experts.interventions import intervened
from polyad.train.measures.measure import Examination, Result, needs_one_process, needs_text
from polyad.train.measures.removal import (
    RANDOM_CHOICES,
    TOKENS,
    By,
    calibration_of,
    check_share,
    config_of,
    highest,
    mean_loss,
    random_groups,
    scored,
    sections_of,
    sparse_layers,
    text_of,
    without,
)
from polyad.train.reading import Evaluated
from polyad.train.results import aligned

EXAMPLES = 4_096
"""Approximate number of tokens to read for choosing experts."""


@dataclass(frozen=True, kw_only=True)
class SubsetOptions:
    """Which shares to keep, and how to choose experts."""

    keep: Sequence[float]
    by: By = "probability"
    calibrate: str | None = None
    """Prepared data on whose train split experts are chosen; None: the scored data."""
    examples: int = EXAMPLES
    tokens: int = TOKENS
    seed: int = 0


class Subset(NamedTuple):
    """A subset of the experts, and mean losses over held-out text in nats per token."""

    keep: float
    kept: Mapping[str, Sequence[int]]
    """The kept experts, by layer."""
    loss: float
    at_random: Sequence[float]
    """Losses with equally many random experts."""


@dataclass(frozen=True, kw_only=True)
class Subsets(Result):
    """The cost of fewer experts."""

    by: By
    chosen_on: str
    examples: int
    experts: int
    tokens: int
    whole: float
    """The loss of the whole model."""
    subsets: Sequence[Subset]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "by": self.by,
            "chosen_on": self.chosen_on,
            "examples_tokens": self.examples,
            "experts": self.experts,
            "tokens_scored": self.tokens,
            "loss": self.whole,
            "subsets": [
                {
                    "keep": each.keep,
                    "experts_left": len(next(iter(each.kept.values()))),
                    "loss": each.loss,
                    "loss_random": list(each.at_random),
                    "kept": each.kept,
                }
                for each in self.subsets
            ],
        }

    def amount(self) -> str:
        """The number of tokens, in words."""
        return f": {self.tokens:,} tokens"

    def facts(self) -> list[tuple[str, str]]:
        """How experts were chosen."""
        layers = len(self.subsets[0].kept)
        return [
            ("experts", f"{self.experts} in each of {layers} layers"),
            ("chosen by", f"{self.by}, on {self.examples:,} tokens of {self.chosen_on}"),
        ]

    def rows(self) -> list[str]:
        """The loss at each share."""
        rows = [
            ("experts", "loss", "change", "random experts", "change"),
            (f"{self.experts}", f"{self.whole:.4f}", "", "", ""),
        ]
        for each in self.subsets:
            left, mean = len(next(iter(each.kept.values()))), sum(each.at_random)
            mean /= len(each.at_random)
            low, high = (bound(each.at_random) - self.whole for bound in (min, max))
            rows.append(
                (
                    f"{left} ({100 * left / self.experts:.3g}%)",
                    *(f"{each.loss:.4f}", f"{each.loss - self.whole:+.4f}"),
                    *(f"{mean:.4f}", f"{mean - self.whole:+.4f} ({low:+.4f} to {high:+.4f})"),
                )
            )
        return ["", *aligned(rows, "<>>>>")]


class Subsetting(Examination):
    """Chooses experts on some examples, and reads held-out text without the others."""

    name = "experts subset"
    doing = "choosing experts"
    needs_whole = "experts are left out of a whole model"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> SubsetOptions:
        """The fields of `SubsetOptions`."""
        needs_text(cls.name, opened)
        asked = SubsetOptions(**options)
        for key, each in sections_of(cls.name, opened).items():
            for share in asked.keep:
                check_share(key, each, share)
        return asked

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: SubsetOptions,
        model: nn.Module,
        world: comm.World,
    ) -> Subsets:
        """Reads the examples, and held-out text with each subset."""
        needs_one_process(cls.name, world)
        layers = sparse_layers(model)
        calibration = calibration_of(opened, asked.calibrate)
        scores, moments = scored(
            *(calibration, model, layers, world),
            by=asked.by, tokens=asked.examples, seed=asked.seed,
        )  # fmt: skip
        samples = text_of(opened, split, asked.tokens)

        def loss(told: str, groups: Groups) -> float:
            with intervened(model, without(layers, groups)):
                return mean_loss(model, samples, opened.batch_size, told)[0]

        whole, tokens = mean_loss(model, samples, opened.batch_size, "all experts")
        subsets = []
        for keep in asked.keep:
            groups = {
                each.name: highest(
                    scores[each.name], moments[each.name], config_of(model, each), keep
                )
                for each in layers
            }
            chosen = loss(f"{100 * keep:.3g}% of experts", groups)
            at_random = [
                loss(
                    f"{100 * keep:.3g}% at random {number}/{RANDOM_CHOICES}",
                    random_groups(model, layers, keep, seed=asked.seed + number),
                )
                for number in range(1, RANDOM_CHOICES + 1)
            ]
            kept = {name: [group.experts[0] for group in each] for name, each in groups.items()}
            subsets.append(Subset(keep, kept, chosen, at_random))
        return Subsets(
            by=asked.by,
            chosen_on=f"train of {calibration.task.name}",
            examples=next(iter(moments.values())).tokens,
            experts=layers[0].num_experts,
            tokens=tokens,
            whole=whole,
            subsets=subsets,
        )
