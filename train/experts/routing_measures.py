"""What is counted of any router in a pass over data: entropies, and information on labels.

Shapes: B samples of a batch, R rows of it, N tokens, T tokens of a window, P labels: the right ones
first, then shuffled ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyad.data.text.dataset import TokenStream
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.train.experts.gate_entropy import GateEntropies, LevelEntropy, Summed
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.experts.report.by_class import (
    SHUFFLES,
    ExpertCounts,
    ExpertsByClass,
    LevelByClass,
    given,
)
from polyad.train.experts.similarity import ExpertSimilarity, LevelSimilarity
from polyad.train.experts.token_classes import Labelling, Shifts, labellings


@dataclass(frozen=True, kw_only=True)
class Division:
    """How experts divide the work."""

    entropies: Mapping[str, list[LevelEntropy]]
    """Of each layer its levels, by the layer's name."""
    by_label: Mapping[str, Mapping[str, list[LevelByClass]]]
    """The same by the kind of label; without labels nothing."""
    similarity: Mapping[str, list[LevelSimilarity]] = field(default_factory=dict)
    """How alike experts are; nothing where they were not compared."""

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """JSON values: of each layer its levels."""
        return {
            name: [
                level.to_json()
                | {
                    "labels": {
                        label: _of_labels(found[name][number])
                        for label, found in self.by_label.items()
                    }
                }
                | (
                    {"similarity": self.similarity[name][number].to_json()}
                    if name in self.similarity
                    else {}
                )
                for number, level in enumerate(levels)
            ]
            for name, levels in self.entropies.items()
        }


def _of_labels(level: LevelByClass) -> dict[str, Any]:
    return {
        **{name: each.to_json() for name, each in level.measures.items()},
        "information_bits_by_chance": level.by_chance,
        **level.of_highest_to_json(),
        "experts": level.experts,
        "classes": level.groups,
        "counts": level.counts_SY.tolist(),
    }


class RoutingMeasures:
    """Adds up what the routers of a model decide.

    Args:
        layers: those that are looked at.
        samples: images, sequences or windows that all processes read.
        device: where decisions are.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: int, device: torch.device | str = "cpu"
    ) -> None:
        self.layers, self.samples, self._device = layers, samples, device
        self._entropies = GateEntropies(layers, samples, device)
        self._counts: dict[str, ExpertCounts] = {}
        self._similarity: ExpertSimilarity | None = None

    def by_class(self, groups: Sequence[str], group_A: Tensor) -> None:
        """Counts by the class of each sample, too.

        Args:
            groups: names of the classes.
            group_A: of each sample.
        """
        self._classes = ExpertsByClass(self.layers, groups, group_A, self._device)
        self._counts["class"] = self._classes

    def by_token(self, sorted_by: Sequence[Labelling]) -> None:
        """Counts by classes of tokens, too.

        Args:
            sorted_by: the ways to sort them.
        """
        for each in sorted_by:
            self._counts[each.name] = ExpertCounts(
                self.layers, each.classes, self.samples, self._device
            )

    def by_output(self, batch_size: int) -> None:
        """Compares what experts make of the same tokens, too.

        Args:
            batch_size: samples in a batch.
        """
        self._similarity = ExpertSimilarity(self.layers, self.samples, batch_size, self._device)

    def add(
        self, decisions: Mapping[str, Decision], row_N: Tensor | None, number_R: Tensor
    ) -> None:
        """Adds a batch of images or sequences.

        Args:
            decisions: of each layer, for tokens that are real.
            row_N: of each of them the row that it belongs to; None: as many of each row.
            number_R: that of each row among all samples.
        """
        for name, decision in decisions.items():
            rows_N = row_N
            if rows_N is None:
                each = len(decision.levels[0]) // len(number_R)
                rows_N = torch.arange(len(number_R), device=number_R.device).repeat_interleave(each)
            self._entropies.add(name, decision, number_R[rows_N])
            if self._similarity is not None:
                self._similarity.add(name, decision, number_R[rows_N])
            if "class" in self._counts:
                self._classes.add(name, decision, rows_N, number_R)

    def add_text(
        self, decisions: Mapping[str, Decision], labels: Mapping[str, Tensor], number_BT: Tensor
    ) -> None:
        """Adds a batch of text.

        Args:
            decisions: of each layer.
            labels: by the name of a labelling, right and shifted ones [P, B, T].
            number_BT: that of each token's window; -1: it does not count.
        """
        number_N = number_BT.flatten().to(self._device)
        labels = {name: each.flatten(1).to(self._device) for name, each in labels.items()}
        for name, decision in decisions.items():
            self._entropies.add(name, decision, number_N)
            if self._similarity is not None:
                self._similarity.add(name, decision, number_N)
            given_NS = given(decision)
            for labelling, label_PN in labels.items():
                self._counts[labelling].count(name, given_NS, label_PN, number_N)

    def result(self, summed: Summed = lambda values: values) -> Division:
        """What was found.

        Args:
            summed: over processes; every process calls it.

        Raises:
            ConfigError: coefficients are not finite.
        """
        return Division(
            entropies=self._entropies.result(summed),
            by_label={name: counts.result(summed) for name, counts in self._counts.items()},
            similarity={} if self._similarity is None else self._similarity.result(summed),
        )


class TokenLabels:
    """The labels of tokens, in all ways to sort them; see `token_classes.py`.

    Args:
        tokenizer: of the ids.
        stream: the split that windows are of.
        windows: how many are read.
        length: of each, in tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, stream: TokenStream, windows: int, length: int
    ) -> None:
        self.sorted_by = labellings(tokenizer, stream, length)
        self._shifts = Shifts(windows, length, SHUFFLES)

    def __call__(
        self, ids_BT: Tensor, counted_BT: Tensor, number_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Labels and numbers as `RoutingMeasures.add_text` takes them, on the CPU.

        Args:
            ids_BT: token ids.
            counted_BT: which of them count.
            number_B: of the windows among all that are read.
        """
        labels = {
            each.name: self._shifts(each.of(ids_BT).where(counted_BT, -1), number_B)
            for each in self.sorted_by
        }
        number_BT = number_B.unsqueeze(1).expand_as(ids_BT)
        return labels, number_BT.where(counted_BT, -1)
