"""Losses that tasks share: cross-entropy, and distillation from a trained model.

In distillation a run also learns the outputs of a trained model, its teacher, on the same samples.

    loss = (1 - w) * task loss + w * KL(teacher || student),  both softmaxes at temperature T

Source: Hinton et al. 2015, "Distilling the knowledge in a neural network". The KL includes their
factor T^2, which keeps its gradient equally large at any T. In language models every token whose
loss counts has such a loss, and the classes are the vocabulary.

Shapes: B images or sequences of a micro-batch, or [B, T] samples and tokens; K classes, or a
vocabulary of V tokens.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from polyad.model.config import Config
from polyad.model.output import ModelOutput


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

    def taught(
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


class Learner:
    """A task that can learn from a teacher."""

    teacher: Teacher | None = None
    """The teacher, if any; None: the task learns from the data alone."""


def distillation_loss(teacher_BK: Tensor, student_BK: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of each sample [B], in nats."""
    theirs_BK = (teacher_BK / temperature).log_softmax(-1)
    ours_BK = (student_BK / temperature).log_softmax(-1)
    return temperature**2 * (theirs_BK.exp() * (theirs_BK - ours_BK)).sum(-1)
