"""An example measure: the share of routing that goes to experts with even numbers.

A plugin: `POLYAD_PLUGINS=tests.helpers.even`. The last line of this file registers it.

Shapes: N tokens of a batch, S experts of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyad.train.experts.information import Summed
from polyad.train.measures.measure import Measure, Result, Subject
from polyad.train.measures.registry import MEASURES
from polyad.train.reading import Reading
from polyad.train.results import aligned


@dataclass(frozen=True)
class EvenShare(Result):
    share: Mapping[str, float]
    """The value of each layer, by its name."""
    rows_read: int

    def to_json(self) -> dict[str, Any]:
        return {"rows_read": self.rows_read, "layers": self.share}

    def amount(self) -> str:
        return f", {self.rows_read:,} rows"

    def rows(self) -> list[str]:
        return ["", *aligned([("", "even"), *((n, f"{s:.4f}") for n, s in self.share.items())])]


class EvenExperts(Measure):
    name = "even"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        device = next(subject.model.parameters()).device
        self._sums_L2 = torch.zeros(len(subject.layers), 2, dtype=torch.float64, device=device)

    def add(self, reading: Reading) -> None:
        for sums_2, layer in zip(self._sums_L2, self.subject.layers, strict=True):
            a_NS = reading.decisions[layer.name].coefficients().double()
            sums_2 += torch.stack([a_NS[:, ::2].sum(), a_NS.sum()])

    def result(self, summed: Summed = lambda values: values) -> EvenShare:
        even_L, all_L = summed(self._sums_L2).unbind(-1)
        names = [layer.name for layer in self.subject.layers]
        shares = dict(zip(names, (even_L / all_L).tolist(), strict=True))
        return EvenShare(shares, self.subject.samples.rows)


MEASURES[EvenExperts.name] = EvenExperts
