"""Accuracy on images without each expert of a layer.

Class polysemanticity measures how many classes an expert matters to, by removing it:

    d_c = (accuracy_c - accuracy_c without the expert) / accuracy_c      p = |d - onehot(argmax d)|

An expert that only one class needs has p = 0. Source: Oldfield et al. 2024, section 4.1.2.

An expert with a coefficient of exactly 0 on every token of an image does not affect it: only other
pairs of images and experts, few with entmax, are recomputed, from the expert's layer on.

Shapes: B images, or samples, M tokens of a forward pass, T tokens of an image, D width, P pairs of
an image and an expert, N experts of a level, S experts of all levels side by side, K classes, or
experts of a token.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.model.vision import classified
from polyad.train.experts.actions import intervening
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import RoutedLayer, deciding


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
        a_MS = decisions[self.layer.name].coefficients()
        a_BTS = a_MS.view(len(labels_B), -1, a_MS.shape[-1])
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
