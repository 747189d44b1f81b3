"""Block-wise distillation: each replaced feed-forward learns from the original of its block, all
blocks at once, in one pass of the teacher.

    y = f(x)   the original feed-forward, frozen        ŷ = g(x)   the new one
    normalized   mean over tokens and units of (ŷ - y)^2 / |y|        (|y| the norm of a token's y)
    squared      mean over tokens and units of (ŷ - y)^2
    nMSE         sum |ŷ - y|^2 / sum |y|^2, which is measured, not trained on

In training the block passes on y, so that later blocks get the same inputs as in the teacher, and ŷ
enters no other loss. In evaluation it passes on ŷ: validation scores the spliced model.

Source: MxD (Oldfield et al. 2025, "Towards interpretability without sacrifice: faithful dense layer
decomposition with mixture of decoders"), whose loss is the normalized one.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.decoder import Decoder
from polyad.model.feedforward import FeedForward
from polyad.model.output import RoutingStats
from polyad.train.tasks.losses import BlockLoss
from polyad.train.tasks.task import Predictor


def feed_forward_losses(ours_BTD: Tensor, theirs_BTD: Tensor, loss: BlockLoss) -> dict[str, Tensor]:
    """Computes the distance of outputs from the original's, as fields of `RoutingStats`.

    A token whose original output is 0 (dropped by a capacity limit, say) counts with norm 1.

    Args:
        ours_BTD: Outputs of the new feed-forward, with gradient.
        theirs_BTD: Outputs of the original.
        loss: Which of the losses gets a gradient.
    """
    wide = torch.promote_types(theirs_BTD.dtype, torch.float32)
    theirs_BTD = theirs_BTD.to(wide)
    error_BT = (ours_BTD.to(wide) - theirs_BTD).square().sum(-1)
    square_BT = theirs_BTD.square().sum(-1)
    weighed_BT = error_BT
    if loss == "normalized":
        norm_BT = square_BT.sqrt()
        weighed_BT = error_BT / norm_BT.where(norm_BT > 0, 1)
    return {
        "distill_loss": weighed_BT.mean() / theirs_BTD.shape[-1],
        "distill_error": error_BT.detach().mean(),
        "distill_square": square_BT.mean(),
    }


class BlockTeacher:
    """The original feed-forwards of replaced blocks.

    Args:
        originals: Feed-forwards by block number; frozen, in evaluation mode, on the training
            device, and not part of the model.
        loss: The loss to train with.
    """

    def __init__(self, originals: Mapping[int, FeedForward], loss: BlockLoss) -> None:
        self.originals, self._loss = originals, loss

    def teach(self, model: nn.Module) -> None:
        """Attaches the originals to the replaced feed-forwards of a model. Everything else in it
        stays in evaluation mode, even in training.

        Args:
            model: a decoder, on any layout, that has not run yet.
        """
        assert isinstance(model, Decoder)
        for block, original in self.originals.items():
            layer = model.get_submodule(f"blocks.{block}.feed_forward")
            layer.register_forward_hook(_compared_with(original, self._loss))
        model.taught = tuple(sorted(self.originals))
        model.train(model.training)

    def losses(
        self, model: Predictor, input_ids_BT: Tensor
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Returns the summed loss of all replaced blocks, and their statistics."""
        taught = [each for each in model(input_ids_BT).routing if each.distill_loss is not None]
        losses = [each.distill_loss for each in taught if each.distill_loss is not None]
        return torch.stack(losses).sum(), tuple(taught)


def _compared_with(original: FeedForward, loss: BlockLoss) -> Callable[..., Any]:
    """Returns a hook that replaces a feed-forward's output by the original's in training."""

    def compare(module: nn.Module, given: tuple[Any, ...], found: tuple[Any, Any]) -> Any:
        if not module.training:
            return None
        ours_BTD, stats = found
        with torch.no_grad():
            theirs_BTD, _ = original(*given)
        if stats is None:  # not routed: all tokens go to one expert
            stats = RoutingStats("", load_E=ours_BTD.new_ones(1, dtype=torch.float32))
        return theirs_BTD, stats.but(**feed_forward_losses(ours_BTD, theirs_BTD, loss))

    return compare
