"""How experts divide the work, and for images how many classes each expert matters to.

Measures, for every router, the entropies of its probabilities, the similarity of its experts, and
how much an expert reveals about labels: classes of images and sequences, or for text classes of
tokens. Images with attributes have no single class, so labels are not used. For images with one
class each also the class polysemanticity of all experts, by removing each.

Shapes: R rows of a batch, T tokens of a window, P labels: the true ones first, then shuffled ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyad.model.mixture import Mixture
from polyad.parallel.streamed import device_of
from polyad.train.experts.by_class import (
    SHUFFLES,
    ExpertCounts,
    ExpertsByClass,
    LevelByClass,
    given,
)
from polyad.train.experts.information import GateEntropies, LevelEntropy, Summed
from polyad.train.experts.leaving_out import LeaveOneOut, LeftOut
from polyad.train.experts.similarity import ExpertSimilarity, LevelSimilarity
from polyad.train.experts.token_classes import Shifts, labellings
from polyad.train.measures.measure import Measure, Result, Subject
from polyad.train.reading import Evaluated, Reading
from polyad.train.results import aligned
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.samples import ImageSamples, Passages, TextSamples
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.text import TextTask


@dataclass(frozen=True, kw_only=True)
class Level:
    """The results for one level of a layer."""

    entropy: LevelEntropy
    labels: Mapping[str, LevelByClass]
    """By kind of label; empty without labels."""
    similarity: LevelSimilarity
    """Similarity of the experts."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        labels = {name: _of_labels(each) for name, each in self.labels.items()}
        return self.entropy.to_json() | {"labels": labels, "similarity": self.similarity}


def _of_labels(level: LevelByClass) -> dict[str, Any]:
    return {
        **level.measures,
        "information_bits_by_chance": level.by_chance,
        **level.of_highest_to_json(),
        "experts": level.experts,
        "classes": level.groups,
        "counts": level.counts_SY,
    }


@dataclass(frozen=True, kw_only=True)
class Specialized(Result):
    """How the experts of a model divide the work."""

    scored: Mapping[str, int]
    """Amounts read, by unit: images, sequences, tokens."""
    layers: Mapping[str, list[Level]]
    """The levels of each layer, by layer name."""
    left_out: Mapping[str, LeftOut]
    """Losses without each expert, by layer; empty if no expert was removed."""
    has_one_class: bool
    """Whether what was read has labels."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        layers = {
            name: (vars(self.left_out[name]) if name in self.left_out else {}) | {"levels": levels}
            for name, levels in self.layers.items()
        }
        return {f"{name}_scored": count for name, count in self.scored.items()} | {"layers": layers}

    def amount(self) -> str:
        """The amounts read, in words."""
        name, count = next(iter(self.scored.items()))
        return f", {count:,} {name}"

    def facts(self) -> list[tuple[str, str]]:
        """What is not measured for images with attributes."""
        if self.has_one_class:
            return []
        return [
            (
                "not measured",
                "polysemanticity, information, purity: they need exactly one class per image",
            )
        ]

    def rows(self) -> list[str]:
        """Tables of polysemanticity, of entropies and information, and of similarity."""
        heads = ("", "H_s", "H_u", "maximum", "I(E; Y)", "by chance", "normalized", "purity",
                 "with the highest share", "by chance")  # fmt: skip
        told: list[tuple[str, ...]] = [heads]
        alike = [("", "experts", "tokens", "cosine", "CKA")]
        for title, level in self._titled():
            entropies = (level.entropy.of_token.shown(), level.entropy.of_usage.shown())
            told.append((title, *entropies, f"{level.entropy.highest:.2f}", *[""] * 6))
            told += [
                (f"  by {label}", "", "", "", *_told(each)) for label, each in level.labels.items()
            ]
            same = level.similarity
            sizes = (f"{len(same.experts)}", f"{same.tokens:,}")
            alike.append((title, *sizes, same.cosine.shown(), same.cka.shown()))
        lines = ["", "entropies and information in bits, 95% intervals over samples"]
        lines += [*aligned(told), ""]
        lines.append(
            "similarity of experts' outputs on the same tokens, means over pairs, 95% intervals "
            "over batches"
        )
        return [*self._left_out_rows(), *lines, *aligned(alike)]

    def _left_out_rows(self) -> list[str]:
        if len(self.left_out) < len(self.layers) or not self.layers:
            return []
        rows = [("", "polysemanticity", "experts that matter", "recomputed")]
        rows += [(name, *each.cells()) for name, each in self.left_out.items()]
        return ["", *aligned(rows)]

    def _titled(self) -> Iterator[tuple[str, Level]]:
        """Yields all levels with their titles."""
        for name, levels in self.layers.items():
            for number, level in enumerate(levels):
                yield (name + (f", level {number}" if len(levels) > 1 else "")), level


def _told(level: LevelByClass) -> list[str]:
    """How much an expert reveals about a label, in the order of the tables."""
    information, *ratios = (each.shown() for each in level.measures.values())
    said = [information, f"{level.by_chance:.4f}", *ratios]
    if level.of_highest is None:
        return [*said, "", ""]
    return [*said, level.of_highest.shown(), f"{level.highest_by_chance:.4f}"]


class Specialization(Measure):
    """Accumulates routing decisions, and for images the losses without each expert.

    Args:
        subject: the model, layers and samples.
        leave_out: for images with one class each, whether to remove each expert.
    """

    name = "specialization"
    told = "measure routing"
    needs_whole = None

    def __init__(self, subject: Subject, *, leave_out: bool = True) -> None:
        super().__init__(subject)
        model, layers, samples, batch_size = subject
        device = device_of(model)
        self._entropies = GateEntropies(layers, samples.rows, device)
        rows = batch_size * samples.rows_of_sample
        self._similarity = ExpertSimilarity(layers, samples.rows, rows, device)
        self._tokens = torch.zeros(1, dtype=torch.float64, device=device)
        self._by_class: ExpertsByClass | None = None
        self._by_token: dict[str, ExpertCounts] = {}
        self._left_out: list[LeaveOneOut] = []
        if (classes := samples.classes()) is not None:
            self._by_class = ExpertsByClass(layers, *classes, device)
        if isinstance(samples, TextSamples):
            self._labellings = labellings(samples.tokenizer, samples.stream, samples.length)
            self._shifts = Shifts(samples.rows, samples.length, SHUFFLES)
            self._by_token = {
                each.name: ExpertCounts(layers, each.classes, samples.rows, device)
                for each in self._labellings
            }
        if leave_out and classes is not None and isinstance(samples, ImageSamples):
            self._left_out = [
                LeaveOneOut(model, layer, classes[0], batch_size)
                for layer in layers
                if not isinstance(model.get_submodule(layer.name), Mixture)  # whole networks
            ]

    @classmethod
    def refusal(cls, opened: Evaluated) -> str | None:
        """Rejects data whose rows cannot be counted."""
        if isinstance(opened.task, ImageClassification | SequenceTask | TextTask):
            return None
        return (
            f"is not allowed with data.kind: {opened.config.data.kind}; images, attributes, "
            f"sequences, text and masked_text have it"
        )

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        labels = self._labels(reading.batch) if self._by_token else {}
        if reading.counted_M is not None and reading.is_first:
            self._tokens += len(reading.counted_M)
        for name, decision in reading.decisions.items():
            number_N = reading.numbers_of(decision)
            self._entropies.add(name, decision, number_N)
            self._similarity.add(name, decision, number_N)
            if self._by_class is not None:
                self._by_class.add(name, decision, reading.rows_of(decision), reading.number_R)
            if labels:
                given_NS = given(decision)
                for label, label_PN in labels.items():
                    counted_PM = label_PN[:, reading.counted_M]
                    self._by_token[label].count(name, given_NS, counted_PM, number_N)
        for each in self._left_out:
            each.add(reading.batch.images_BCHW, reading.batch.labels_B)

    def _labels(self, passages: Passages) -> dict[str, Tensor]:
        """True and shifted labels of the tokens [P, N], by name of the labeling."""
        assert isinstance(self.subject.samples, TextSamples)
        ids_BT = passages.ids_BT.cpu()
        counted_BT = self.subject.samples.counted_BT(passages).cpu()
        found = {}
        for each in self._labellings:
            label_BT = each.of(ids_BT).where(counted_BT, -1)
            label_PBT = self._shifts(label_BT, passages.number_B)
            found[each.name] = label_PBT.flatten(1).to(passages.ids_BT.device)
        return found

    def result(self, summed: Summed = lambda values: values) -> Specialized:
        """The result."""
        samples = self.subject.samples
        entropies, alike = self._entropies.result(summed), self._similarity.result(summed)
        counts = {name: each.result(summed) for name, each in self._by_token.items()}
        if self._by_class is not None:
            counts["class"] = self._by_class.result(summed)
        layers = {
            name: [
                Level(
                    entropy=level,
                    labels={label: found[name][number] for label, found in counts.items()},
                    similarity=alike[name][number],
                )
                for number, level in enumerate(levels)
            ]
            for name, levels in entropies.items()
        }
        if isinstance(samples, TextSamples):
            scored = {"tokens": int(summed(self._tokens)), "windows": samples.rows}
        else:
            scored = {"images" if isinstance(samples, ImageSamples) else "sequences": samples.rows}
        return Specialized(
            scored=scored,
            layers=layers,
            left_out={
                each.layer.name: each.result(samples.rows, summed) for each in self._left_out
            },
            has_one_class=bool(counts),
        )
