"""Cross-entropy, and distillation from a trained model: from its logits, or from its feed-forwards.

In distillation a run also learns the outputs of a trained model, its teacher, on the same samples.

    loss = (1 - w) * task loss + w * KL(teacher || student),  both softmaxes at temperature T

Source: Hinton et al. 2015, "Distilling the knowledge in a neural network". The KL includes their
factor T^2, which keeps its gradient equally large at any T. In language models every token whose
loss counts has such a loss, and the classes are the vocabulary.

In block-wise distillation each replaced feed-forward learns from the original of its block, all
blocks at once, in one pass of the teacher.

    y = f(x)   the original feed-forward, frozen        ŷ = g(x)   the new one
    normalized   mean over tokens and units of (ŷ - y)^2 / |y|        (|y| the norm of a token's y)
    squared      mean over tokens and units of (ŷ - y)^2
    nMSE         sum |ŷ - y|^2 / sum |y|^2, which is measured, not trained on

In training the block passes on y, so that later blocks get the same inputs as in the teacher, and ŷ
enters no other loss. In evaluation it passes on ŷ: validation scores the spliced model.

Source: MxD (Oldfield et al. 2025, "Towards interpretability without sacrifice: faithful dense layer
decomposition with mixture of decoders"), whose loss is the normalized one.

Shapes: B images or sequences of a micro-batch, or [B, T] samples and tokens; K classes, or a
vocabulary of V tokens; D width.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from polyad.model.config import Config
from polyad.model.decoder import Decoder
from polyad.model.feedforward import FeedForward
from polyad.model.output import ModelOutput, RoutingStats
from polyad.train.tasks.task import Predictor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats.

    Args:
        logits: [..., V] of any precision; the softmax runs in fp32.
        targets: [...], the right class of each position.

    Returns:
        [...] in fp32.
    """
    flat = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), reduction="none"
    )
    return flat.view_as(targets)


BlockLoss: TypeAlias = Literal["normalized", "squared"]


class DistillConfig(Config):
    """Distillation: a trained model that a run learns from, in addition to its data."""

    teacher: str | None = None
    """A run or checkpoint of the teacher, which must have the same outputs as the student: the same
    classes of images or sequences, or the same tokenizer for language models; null: no
    distillation."""
    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight w of KL(teacher || student) in the loss; the task's own loss has weight 1 - w."""
    temperature: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Temperature by which the logits of teacher and student are divided before the softmax."""
    blocks: BlockLoss | None = None
    """Block-wise distillation of a language model: only the feed-forwards of model.replaced are
    trained, each on the inputs and outputs of the teacher's feed-forward in the same block; all
    other weights are copied from the teacher and frozen. The loss is `normalized`, each token's
    squared error divided by the norm of the teacher's output (as in MxD), or `squared`, the mean
    over tokens and units; it is summed over blocks. weight and temperature do not apply. null: the
    student learns from the teacher's output logits."""


class Teacher:
    """A trained model, and its part of the loss.

    Args:
        model: In evaluation mode, on the training device.
        config: Weight and temperature.
    """

    def __init__(self, model: Callable[..., ModelOutput], config: DistillConfig) -> None:
        self._model, self._config = model, config

    def mix_in(
        self, losses_B: Tensor, logits_BK: Tensor, *inputs: Tensor, **named: Tensor
    ) -> Tensor:
        """Returns the loss of each sample with the distillation loss mixed in [B].

        Args:
            losses_B: The task's losses.
            logits_BK: The student's logits, fp32.
            inputs: The student's inputs.
            named: Its keyword inputs.
        """
        with torch.no_grad():
            theirs_BK = self._model(*inputs, **named).logits.float().view_as(logits_BK)
        weight = self._config.weight
        kl_B = distillation_loss(theirs_BK, logits_BK, self._config.temperature)
        return (1 - weight) * losses_B + weight * kl_B


def distillation_loss(teacher_BK: Tensor, student_BK: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of each sample [B], in nats."""
    theirs_BK = (teacher_BK / temperature).log_softmax(-1)
    ours_BK = (student_BK / temperature).log_softmax(-1)
    return temperature**2 * (theirs_BK.exp() * (theirs_BK - ours_BK)).sum(-1)


def feed_forward_losses(ours_BTD: Tensor, theirs_BTD: Tensor, loss: BlockLoss) -> dict[str, Tensor]:
    """Computes the distance of outputs from the original's, by their names in `RoutingStats`:
    the loss, and the mean over tokens of the squared norms of the difference and of the
    original's output.

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

    def attach_to(self, model: nn.Module) -> None:
        """Attaches the originals to the replaced feed-forwards of a model. Everything else in it
        stays in evaluation mode, even in training.

        Args:
            model: a decoder, on any layout, that has not run yet.
        """
        assert isinstance(model, Decoder)
        for block, original in self.originals.items():
            layer = model.get_submodule(f"blocks.{block}.feed_forward")
            layer.register_forward_hook(_compared_with(original, self._loss))
        model.distilled_blocks = tuple(sorted(self.originals))
        model.train(model.training)

    def losses(
        self, model: Predictor, input_ids_BT: Tensor
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Returns the summed loss of all replaced blocks, and their statistics."""
        routing = model(input_ids_BT).routing
        distilled = tuple(each for each in routing if "distill_loss" in each.losses)
        return torch.stack([each.losses["distill_loss"] for each in distilled]).sum(), distilled


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
        measures = feed_forward_losses(ours_BTD, theirs_BTD, loss)
        losses = {"distill_loss": measures.pop("distill_loss")}
        return theirs_BTD, stats._replace(
            losses=stats.losses | losses, measures=stats.measures | measures
        )

    return compare
