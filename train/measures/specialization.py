"""How experts divide the work, and for images how many classes each expert matters to.

Measures, for every router, the entropies of its probabilities, the similarity of its experts, and
how much an expert reveals about labels: classes of images and sequences, or for text classes of
tokens. Images with attributes have no single class, so labels are not used. For images with one
class each also the class polysemanticity of all experts, by removing each.

Shapes: R rows of a batch, T tokens of a window, P labels: the true ones first, then shuffled ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyad.model.mixture import Mixture
from polyad.parallel.weights import device_of
from polyad.train.experts.by_class import (
    SHUFFLES,
    ExpertCounts,
    LevelByClass,
    assigned,
    shuffled_classes,
)
from polyad.train.experts.information import GateEntropies, Summed
from polyad.train.experts.leaving_out import LeaveOneOut
from polyad.train.experts.similarity import ExpertSimilarity
from polyad.train.experts.token_classes import Labelling, Shifts, labellings
from polyad.train.measures.measure import Measure
from polyad.train.reading import ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.samples import ImageSamples, Passages, TextSamples

Labels = Mapping[str, LevelByClass]
"""The experts of a level by kind of label; empty without labels."""


@dataclass(kw_only=True)
class Specialization(Measure):
    """Accumulates routing decisions, and for images the losses without each expert."""

    name = "specialize"
    needs_whole = None

    leave_out: bool = True
    """For images with one class each, whether to remove each expert."""
    counts_only: bool = False
    """Whether only experts are known, as of a trace, and no scores and outputs."""

    def begin(self, subject: Subject) -> None:
        """Makes the accumulators."""
        super().begin(subject)
        model, layers, samples, batch_size = subject
        device = torch.device("cpu") if self.counts_only else device_of(model)
        self._measures: dict[str, list[GateEntropies | ExpertSimilarity]] = {
            layer.name: [] for layer in layers
        }
        for layer in () if self.counts_only else layers:
            rows, batch = samples.rows, batch_size * samples.rows_of_sample
            similarity = ExpertSimilarity(layer, rows, batch, device)
            self._measures[layer.name] += [GateEntropies(layer, rows, device), similarity]
        self._tokens = torch.zeros(1, dtype=torch.float64, device=device)
        self._labellings: dict[str, Labelling] = {}
        self._left_out: list[LeaveOneOut] = []
        names: dict[str, Sequence[str]] = {}
        if (classes := samples.classes()) is not None:
            names["class"] = classes[0]
            self._class_PA = shuffled_classes(classes[1]).to(device)
        if isinstance(samples, TextSamples):
            self._labellings = labellings(samples.tokenizer, samples.stream, samples.length)
            self._shifts = Shifts(samples.rows, samples.length, SHUFFLES)
            names |= {name: each.classes for name, each in self._labellings.items()}
        self._counts = {
            layer.name: {
                by: ExpertCounts(layer, classes_of, samples.rows, device)
                for by, classes_of in names.items()
            }
            for layer in layers
        }
        if self.leave_out and classes is not None and isinstance(samples, ImageSamples):
            self._left_out = [
                LeaveOneOut(model, layer, classes[0], batch_size)
                for layer in layers
                if not isinstance(model.get_submodule(layer.name), Mixture)  # whole networks
            ]

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch."""
        labels = self._labels(forward_pass.batch) if self._labellings else {}
        if forward_pass.counted_M is not None and forward_pass.is_first:
            self._tokens += len(forward_pass.counted_M)
        for name, decision in forward_pass.decisions.items():
            number_N = forward_pass.numbers_of(decision)
            for measure in self._measures[name]:
                measure.add(decision, number_N)
            assigned_NS = assigned(decision)
            for by, counts in self._counts[name].items():
                label_PM = (
                    self._class_PA[:, number_N]
                    if by == "class"
                    else labels[by][:, forward_pass.counted_M]
                )
                counts.count(assigned_NS, label_PM, number_N)
        for each in self._left_out:
            each.add(forward_pass.batch.images_BCHW, forward_pass.batch.labels_B)

    def _labels(self, passages: Passages) -> dict[str, Tensor]:
        """True and shifted labels of the tokens [P, N], by name of the labeling."""
        assert isinstance(self.subject.samples, TextSamples)
        ids_BT = passages.ids_BT.cpu()
        counted_BT = self.subject.samples.counted_BT(passages).cpu()
        labels = {}
        for name, each in self._labellings.items():
            label_BT = each.of(ids_BT).where(counted_BT, -1)
            label_PBT = self._shifts(label_BT, passages.number_B)
            labels[name] = label_PBT.flatten(1).to(passages.ids_BT.device)
        return labels

    def labels(self, summed: Summed = lambda values: values) -> dict[str, list[Labels]]:
        """Returns the experts and labels of each layer's levels, by layer name; all processes call
        this.

        Args:
            summed: sums over processes.
        """
        labels: dict[str, list[Labels]] = {}
        for layer in self.subject.layers:
            levels = {by: each.result(summed) for by, each in self._counts[layer.name].items()}
            labels[layer.name] = [
                {by: each[level] for by, each in levels.items()}
                for level in range(len(layer.levels))
            ]
        return labels

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        import pandas as pd

        samples, facts = self.subject.samples, dict[str, Any]()
        labels_of = self.labels(summed)
        if isinstance(samples, TextSamples):
            facts = {"tokens_scored": int(summed(self._tokens)), "windows_scored": samples.rows}
        else:
            unit = "images" if isinstance(samples, ImageSamples) else "sequences"
            facts = {f"{unit}_scored": samples.rows}
        if not any(map(any, labels_of.values())):
            facts["not_measured"] = "information and purity: they need one class per image"
        if self.counts_only:
            facts["not_measured"] = "entropies and similarity: a trace has no scores and outputs"
        levels, labels, counts = [], [], []
        for layer in self.subject.layers:
            measured = [each.result(summed) for each in self._measures[layer.name]]
            for number, size in enumerate(layer.levels):
                of = {"module": layer.name, "level": number}
                row = {**of, "experts": size, "highest_entropy_bits": math.log2(size)}
                for each in measured:
                    row |= each[number]
                levels.append(row)
                for by, level in labels_of[layer.name][number].items():
                    labels.append({**of, "by": by, **level.columns()})
                    counts.append(_counts(of, by, level))
        frames = {
            "levels": pd.DataFrame(levels),
            "labels": pd.DataFrame(labels),
            "counts": pd.concat(counts, ignore_index=True) if counts else pd.DataFrame(),
        }
        titles = {
            "levels": "entropies in bits, and how similar experts' outputs are on the same tokens",
            "labels": "how much an expert reveals about a label, in bits; 95% intervals",
        }
        if self._left_out:
            titles["polysemanticity"] = "accuracy without each expert, and polysemanticity"
            results = [each.result(summed) for each in self._left_out]
            frames["polysemanticity"] = pd.DataFrame([row for row, _ in results])
            frames["experts"] = pd.DataFrame([row for _, experts in results for row in experts])
        return Tables(facts=facts, frames=frames, titles=titles)


def _counts(of: dict[str, Any], by: str, level: LevelByClass) -> Any:
    """A table of the tokens of each class that every expert gets, without zeros."""
    import pandas as pd

    expert_N, class_N = level.counts_SY.nonzero()
    columns = {
        **of,
        "expert": expert_N,
        "by": by,
        "class": [level.groups[each] for each in class_N],
        "tokens": level.counts_SY[expert_N, class_N],
    }
    return pd.DataFrame(columns)
