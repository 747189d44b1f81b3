"""An example measure: the share of routing that goes to experts with even numbers.

A plugin: `POLYAD_PLUGINS=tests.helpers.even`. The last line of this file registers it.

Shapes: N tokens of a batch, S experts of a layer.
"""

import pandas as pd
import torch

from polyad.train.experts.information import Summed
from polyad.train.measures.measure import Measure
from polyad.train.measures.registry import MEASURES
from polyad.train.reading import ForwardPass, Subject
from polyad.train.results import Tables


class EvenExperts(Measure):
    name = "even"

    def begin(self, subject: Subject) -> None:
        super().begin(subject)
        device = next(subject.model.parameters()).device
        self._sums_L2 = torch.zeros(len(subject.layers), 2, dtype=torch.float64, device=device)

    def add(self, forward_pass: ForwardPass) -> None:
        for sums_2, layer in zip(self._sums_L2, self.subject.layers, strict=True):
            a_NS = forward_pass.decisions[layer.name].coefficients().double()
            sums_2 += torch.stack([a_NS[:, ::2].sum(), a_NS.sum()])

    def result(self, summed: Summed = lambda values: values) -> Tables:
        even_L, all_L = summed(self._sums_L2).unbind(-1)
        names = [layer.name for layer in self.subject.layers]
        shares = pd.DataFrame({"module": names, "even": (even_L / all_L).tolist()})
        facts = {"rows_read": self.subject.samples.rows}
        return Tables(facts=facts, frames={"layers": shares}, titles={"layers": "even experts"})


MEASURES[EvenExperts.name] = EvenExperts
