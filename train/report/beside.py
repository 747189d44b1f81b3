"""Two runs on one page: overlaid curves, and pairs of experts that get the same tokens.

Both models read the same held-out samples. The similarity of two experts of a level is the
correlation of their coefficients over tokens; the assignment with the largest sum pairs them.

Shapes: N tokens, S and Z experts of a level of either run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from polyad.train.experts.information import Matrix
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.page.charts import WIDE, Line, line_chart
from polyad.train.page.html import Figure, Table
from polyad.train.page.template import SERIES
from polyad.train.reading import Reading
from polyad.train.report.history import History
from polyad.train.tasks.samples import Samples

UNITS = 65_536
"""Maximum number of tokens or images that both read."""
CURVES = (
    ("loss", "Training loss"),
    ("validation_loss", "Validation loss"),
    ("routing/load_max", "Load of the busiest expert over all layers"),
    ("routing/unused", "Share of unused experts, mean over layers"),
    ("routing/entropy", "Routing entropy, mean over layers"),
)


class Pair(NamedTuple):
    """An expert, and its counterpart in the other run."""

    expert: str
    other: str
    similarity: float
    """Correlation of their coefficients over the same tokens."""
    next_best: float | None
    """Highest correlation with any other expert of the other run; None if there is no other.
    """


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """The second run on a page."""

    run: str
    checkpoint_step: int
    history: History
    pairs: Mapping[str, Sequence[Pair]]
    """Pairs by layer name; empty if no layer was read with both."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the curves."""
        return {
            "run": self.run,
            "checkpoint_step": self.checkpoint_step,
            "step": self.history.last_record["step"],
            "loss": self.history.final_loss,
            "pairs": self.pairs,
        }


class Alike:
    """Accumulates correlations between the experts of two models over the same tokens.

    Args:
        layers: layers of the first model.
        samples: the samples that both read.
        other: the second model, which reads the first one's batches.
        others: its layers, in the same order.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        samples: Samples,
        other: nn.Module,
        others: Sequence[RoutedLayer],
    ) -> None:
        self._layers, self._samples = layers, samples
        self._other, self._others = other, others
        self._sums: dict[str, Tensor] = {}
        """Products of all columns (both models' experts, and ones), by layer."""

    def add(self, reading: Reading) -> None:
        """Adds a batch, which the other model reads, too."""
        with torch.inference_mode(), deciding(self._other, self._others) as decisions:
            self._samples.forward(self._other, reading.batch, {})
        other = reading.counted(decisions)
        for layer in self._layers:
            both = (each[layer.name].coefficients() for each in (reading.decisions, other))
            self.count(layer.name, *both)

    def count(self, name: str, own_NS: Tensor, other_NZ: Tensor) -> None:
        """Adds the coefficients of a layer's experts for the same tokens."""
        rows = torch.cat([own_NS, other_NZ, torch.ones_like(own_NS[:, :1])], 1).double()
        self._sums[name] = self._sums.get(name, torch.zeros(())) + rows.T @ rows

    def result(self) -> dict[str, list[Pair]]:
        """The pairs of each layer."""
        found = {}
        for layer, other in zip(self._layers, self._others, strict=True):
            alike_SZ = _correlations(self._sums[layer.name].cpu().numpy(), layer.num_experts)
            found[layer.name] = pairs(layer, other, alike_SZ)
        return found


def _correlations(products: Matrix, experts: int) -> Matrix:
    """The correlations of the first columns with the others; 0 for constant ones."""
    tokens, sums = products[-1, -1], products[-1, :-1]
    covariance = products[:-1, :-1] / tokens - np.outer(sums, sums) / tokens**2
    deviation = np.sqrt(np.maximum(np.diagonal(covariance), 0))
    scale = np.outer(deviation, deviation)
    known = scale > 1e-12
    correlation: Matrix = np.where(known, covariance / np.where(known, scale, 1), 0)
    return correlation[:experts, experts:]


def pairs(layer: RoutedLayer, other: RoutedLayer, alike_SZ: Matrix) -> list[Pair]:
    """Pairs the experts of two layers so that the sum of similarities is largest, level by level.

    Args:
        layer: the layer of one run.
        other: the layer of the other run, with equally many levels.
        alike_SZ: similarities, all levels side by side.
    """
    found, first, first_of_other = [], 0, 0
    for size, size_of_other in zip(layer.levels, other.levels, strict=True):
        level = alike_SZ[first : first + size, first_of_other : first_of_other + size_of_other]
        for row, column in zip(*linear_sum_assignment(level, maximize=True), strict=True):
            others = np.delete(level[row], column)
            found.append(
                Pair(
                    expert=layer.expert_name(first + int(row)),
                    other=other.expert_name(first_of_other + int(column)),
                    similarity=float(level[row, column]),
                    next_best=float(others.max()) if others.size else None,
                )
            )
        first, first_of_other = first + size, first_of_other + size_of_other
    return found


def beside_figures(
    run: str, history: History, layers: Sequence[RoutedLayer], other: OtherRun
) -> list[Figure]:
    """Draws curves of both runs, and the pairs of experts.

    Args:
        run: the name of the first run.
        history: its history.
        layers: its layers.
        other: the second run.
    """
    steps = sorted({*history.steps, *other.history.steps})
    figures = []
    for key, heading in CURVES:
        lines = []
        for name, each, colour in (
            (run, history, SERIES[0]),
            (other.run, other.history, SERIES[3]),
        ):
            known = dict(zip(each.steps, each.scalars.get(key, ()), strict=False))
            values = [known.get(step) for step in steps]
            if any(value is not None for value in values):
                dots = key.startswith("validation")
                lines.append(Line(label=name, values=values, colour=colour, is_joined=True,
                                  with_points=dots))  # fmt: skip
        if len(lines) > 1:
            width = {"width": WIDE} if key == "loss" else {}
            chart = line_chart(steps, lines, title=heading, **width)
            figures.append(
                Figure(heading=heading, body=chart, caption="", legend=lines, wide=key == "loss")
            )
    curves = len(figures)
    rows = [
        (
            layer.title.capitalize(),
            Markup('<a href="#{}">{}</a>').format(layer.anchor(pair.expert), pair.expert),
            pair.other,
            f"{pair.similarity:.3f}",
            "–" if pair.next_best is None else f"{pair.next_best:.3f}",
        )
        for layer in layers
        for pair in other.pairs.get(layer.name, ())
    ]
    if rows:
        heads = ("layer", "expert", "expert of the second run", "similarity", "next best")
        figures.append(
            Figure(
                heading="Experts that get the same tokens",
                body=Table(heads=heads, rows=rows),
                caption="Similarity: correlation of the two experts' routing weights over the same "
                "held-out tokens; 1 means identical routing, 0 unrelated. Each expert is in "
                "one pair, chosen so that the total similarity is largest. Next best: the "
                "highest similarity with any other expert of the second run.",
                wide=True,
            )
        )
    return [*figures[curves:], *figures[:curves]]
