"""How experts divide the work, and for images how many classes each expert matters to.

Measures, for every router, the entropies of its probabilities, the similarity of its experts, and
how much an expert reveals about labels: classes of images and sequences, or for text classes of
tokens. Images with attributes have no single class, so labels are not used. For images with one
class each also the class polysemanticity of all experts, by removing each.

Class polysemanticity measures how many classes an expert matters to, by removing it:

    d_c = (accuracy_c - accuracy_c without the expert) / accuracy_c      p = |d - onehot(argmax d)|

An expert that only one class needs has p = 0. Source: Oldfield et al. 2024, section 4.1.2.

An expert with a coefficient of exactly 0 on every token of an image does not affect it: only other
pairs of images and experts, few with entmax, are recomputed, from the expert's layer on.

Shapes: R rows of a batch, T tokens of a window, P labels: the true ones first, then shuffled ones;
without experts B images, or samples, M tokens of a forward pass, T tokens of an image, D width, P
pairs of an image and an expert, N experts of a level, S experts of all levels side by side, K
classes, or experts of a token.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.mixture import Mixture
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.vision import classified
from polyad.parallel.weights import device_of
from polyad.train.experts.actions import intervening
from polyad.train.experts.by_class import (
    SHUFFLES,
    ExpertCounts,
    LevelByClass,
    assigned,
    shuffled_classes,
)
from polyad.train.experts.information import GateEntropies, Summed
from polyad.train.experts.probing import RoutedLayer, deciding
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


@contextmanager
def without_capacity(model: nn.Module) -> Iterator[None]:
    """A context in which no sparse layer drops tokens that exceed a capacity.

    Args:
        model: in evaluation mode.
    """
    layers = [part for part in model.modules() if isinstance(part, SelectingMoE)]
    before = [layer.config for layer in layers]
    unlimited = {"capacity_factor": None, "evaluation_capacity_factor": None}
    try:
        for layer in layers:
            layer.config = layer.config.model_copy(update=unlimited)
        yield
    finally:
        for layer, config in zip(layers, before, strict=True):
            layer.config = config


def polysemanticity(right_K: Tensor, lost_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the measure from counts; a class without correct images counts as unchanged.

    Args:
        right_K: Correct images of each class with the whole model.
        lost_SK: How many fewer without each expert.

    Returns:
        p of each expert [S], NaN if removing it changes no accuracy; and the class that needs it
        most [S], -1 if none does.
    """
    d_SK = torch.where(right_K > 0, lost_SK / right_K.clamp_min(1), 0).double()
    matters_S, class_S = (d_SK != 0).any(-1), d_SK.argmax(-1)
    onehot_SK = nn.functional.one_hot(class_S, d_SK.shape[1])
    p_S = (d_SK - onehot_SK).norm(dim=-1)
    return p_S.where(matters_S, torch.nan), class_S.where(matters_S, -1)


class LeaveOneOut:
    """Counts a model's correct images without each expert of a layer, one expert at a time.

    A capacity of experts is ignored, since it depends on the rest of the batch and pairs are
    rebatched here.

    Args:
        model: in evaluation mode, on one device.
        layer: a feed-forward of a block, or the head.
        classes: class names.
        rows: pairs per forward pass.
    """

    def __init__(
        self, model: nn.Module, layer: RoutedLayer, classes: Sequence[str], rows: int
    ) -> None:
        self._model, self.layer, self._rows, self.classes = model, layer, rows, classes
        device = next(model.parameters()).device
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self.right_K, self.images_K = zeros(len(classes)), zeros(len(classes))
        self.lost_SK = zeros(layer.num_experts, len(classes))
        self._single_SS = torch.eye(layer.num_experts, dtype=torch.bool, device=device)

    @torch.inference_mode()
    def add(self, images_BCHW: Tensor, labels_B: Tensor) -> None:
        """Counts a batch.

        Args:
            images_BCHW: Normalized.
            labels_B: Their classes.
        """
        with without_capacity(self._model):
            self._add(images_BCHW, labels_B)

    def _add(self, images_BCHW: Tensor, labels_B: Tensor) -> None:
        x = self._before(images_BCHW)
        with deciding(self._model, [self.layer]) as decisions:
            logits_BK = self._from(x)
        a_BTS = decisions[self.layer.name].by_row(len(labels_B))
        right_B = logits_BK.argmax(-1) == labels_B
        self.right_K.index_add_(0, labels_B, right_B.double())
        self.images_K.index_add_(0, labels_B, torch.ones_like(right_B, dtype=torch.float64))
        image_P, expert_P = (a_BTS != 0).any(1).nonzero().unbind(-1)
        if not len(image_P):
            return
        with intervening(self._model, self.layer) as intervene:
            parts = (torch.split(each_P, self._rows) for each_P in (image_P, expert_P))
            for image_R, expert_R in zip(*parts, strict=True):
                intervene(self._single_SS[expert_R], None)
                changed_RK = self._from(x[image_R])
                still_R = changed_RK.argmax(-1) == labels_B[image_R]
                lost_R = right_B[image_R].double() - still_R.double()
                self.lost_SK.index_put_((expert_R, labels_B[image_R]), lost_R, accumulate=True)

    def result(
        self, summed: Summed = lambda counts: counts
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns a row of a table of layers, and rows of the experts that matter to a class.

        Args:
            summed: sums over processes.
        """
        layer, own = self.layer, torch.stack([self.right_K, self.images_K])
        right_K, images_K, *lost = summed(torch.cat([own, self.lost_SK])).cpu()
        p_S, class_S = polysemanticity(right_K, torch.stack(lost))
        experts = []
        for column, (p, class_) in enumerate(zip(p_S.tolist(), class_S.tolist(), strict=True)):
            if class_ >= 0:
                of_class = {"polysemanticity": p, "class": self.classes[class_]}
                experts.append(layer.named(column) | of_class)
        row = {
            "module": layer.name,
            "experts": layer.num_experts,
            "polysemanticity": float(p_S.nanmean()),
            "experts_that_matter": len(experts),
            "top1": float(right_K.sum() / images_K.sum()),
        }
        return row, experts

    def _before(self, images_BCHW: Tensor) -> Tensor:
        """The input of the layer's block, or of the head."""
        model: Any = self._model
        x_BTD: Tensor = model.embed(images_BCHW)
        blocks = model.blocks[: self.layer.block] if self.layer.in_block else model.blocks
        for block in blocks:
            x_BTD, *_ = block(x_BTD)
        return x_BTD if self.layer.in_block else model.pool(x_BTD)

    def _from(self, x: Tensor) -> Tensor:
        """Logits [B, K] from it."""
        model: Any = self._model
        logits_BK: Tensor
        if self.layer.in_block:
            logits_BK = model.tail(x, self.layer.block)
        else:
            logits_BK, _ = classified(model.head, x)
        return logits_BK
