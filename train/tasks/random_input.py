"""Samples that say nothing, for a model of any kind: to try a layout, or to plan one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.images.samples import ImageBatch
from model.gpt2 import GPT2Config
from model.output import RoutingStats
from model.settings import ModelSettings
from model.vision import ImageModelSettings
from train.tasks.cross_entropy import cross_entropy
from train.tasks.language import TextBatch, text_losses
from train.tasks.task import Predictor


def random_batch(model: ModelSettings, seeds: Sequence[int]) -> TextBatch | ImageBatch:
    """A micro-batch as the model's task would give it.

    Args:
        model: Of text or of images.
        seeds: Of each sample.
    """
    samples = [_sample(model, seed) for seed in seeds]
    return type(samples[0])(*map(torch.stack, zip(*samples, strict=True)))


def _sample(model: ModelSettings, seed: int) -> TextBatch | ImageBatch:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT2Config):
        length = model.sequence_length + 1
        return TextBatch.of(torch.randint(model.known_vocab_size(), (length,), generator=generator))
    assert isinstance(model, ImageModelSettings)
    side = model.image_size
    return ImageBatch(
        torch.randn((model.channels, side, side), generator=generator),
        torch.randint(model.known_num_classes(), (), generator=generator),
        torch.ones(()),
        torch.zeros(4, dtype=torch.int16),
    )


def losses_for(model: ModelSettings) -> Any:
    """The loss on such a micro-batch, of the next token or of the class; see `Task.losses`."""
    if not isinstance(model, GPT2Config):
        return _image_losses
    return text_losses if model.head is None else _sequence_losses


def _sequence_losses(model: Predictor, batch: TextBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Of whole sequences without padding: a class each, by a token; or the square of one output."""
    logits_BK, routing = model(batch.input_ids_BT)
    classes = logits_BK.shape[-1]
    if classes == 1:
        return logits_BK[:, 0].float().square(), routing
    return cross_entropy(logits_BK, batch.target_ids_BT[:, -1] % classes), routing


def _image_losses(model: Predictor, batch: ImageBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    logits_BK, routing = model(batch.images_BCHW)
    return cross_entropy(logits_BK, batch.labels_B), routing
