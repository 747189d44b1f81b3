"""Samples that say nothing, for a model of any kind: to try a layout, or to plan one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from data.images.samples import ImageBatch
from data.text.masking import MaskedBatch
from model.bert import BertConfig, MaskedLanguageHeadConfig
from model.gpt2 import GPT2Config
from model.heads import ClassificationHeadConfig
from model.output import RoutingStats
from model.settings import ModelSettings
from model.vision import ImageSettings
from train.errors import ConfigError
from train.tasks.cross_entropy import cross_entropy
from train.tasks.language import TextBatch, text_losses
from train.tasks.masked_language import masked_losses
from train.tasks.task import Predictor

RandomBatch: TypeAlias = "TextBatch | MaskedBatch | SequenceBatch | ImageBatch"


class SequenceBatch(NamedTuple):
    """Sequences without padding, each with a class."""

    input_ids_BT: Tensor
    labels_B: Tensor


def random_batch(model: ModelSettings, seeds: Sequence[int]) -> RandomBatch:
    """A micro-batch as the model's task would give it.

    Args:
        model: Of text or of images.
        seeds: Of each sample.
    """
    samples = [_sample(model, seed) for seed in seeds]
    return type(samples[0])(*map(torch.stack, zip(*samples, strict=True)))


def _sample(model: ModelSettings, seed: int) -> RandomBatch:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT2Config):
        if model.head is not None:
            return _sequence_sample(model, model.head, generator)
        length = model.sequence_length + 1
        return TextBatch.of(torch.randint(model.known_vocab_size(), (length,), generator=generator))
    if isinstance(model, BertConfig):
        return _bert_sample(model, generator)
    assert isinstance(model, ImageSettings)
    side = model.image_size
    return ImageBatch(
        torch.randn((model.channels, side, side), generator=generator),
        torch.randint(model.known_num_classes(), (), generator=generator),
        torch.ones(()),
        torch.zeros(4, dtype=torch.int16),
    )


def _bert_sample(model: BertConfig, generator: torch.Generator) -> MaskedBatch | SequenceBatch:
    if isinstance(model.head, ClassificationHeadConfig):
        return _sequence_sample(model, model.head, generator)
    if isinstance(model.head, MaskedLanguageHeadConfig):
        length = model.sequence_length
        ids_T = torch.randint(model.known_vocab_size(), (length,), generator=generator)
        hidden = model.head.num_masked(length)
        positions_P = torch.randperm(length, generator=generator)[:hidden].sort().values
        return MaskedBatch(ids_T, positions_P, ids_T[positions_P].roll(1))
    raise ConfigError(
        f"model.head.kind: {model.head.kind} has no loss to train by; language and classification "
        f"have one"
    )


def _sequence_sample(
    model: GPT2Config | BertConfig, head: ClassificationHeadConfig, generator: torch.Generator
) -> SequenceBatch:
    length, vocabulary = model.sequence_length, model.known_vocab_size()
    ids_T = torch.randint(vocabulary, (length,), generator=generator)
    return SequenceBatch(ids_T, torch.randint(head.num_classes or 1, (), generator=generator))


def losses_for(model: ModelSettings) -> Any:
    """The loss on such a micro-batch, of tokens or of the class; see `Task.losses`."""
    if isinstance(model, GPT2Config):
        return text_losses if model.head is None else _sequence_losses
    if isinstance(model, BertConfig):
        return masked_losses if model.head.kind == "language" else _sequence_losses
    return _image_losses


def _sequence_losses(
    model: Predictor, batch: SequenceBatch
) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """The loss of the class; of a single output its square."""
    logits_BK, routing = model(batch.input_ids_BT)
    if logits_BK.shape[-1] == 1:
        return logits_BK[:, 0].float().square(), routing
    return cross_entropy(logits_BK, batch.labels_B), routing


def _image_losses(model: Predictor, batch: ImageBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    logits_BK, routing = model(batch.images_BCHW)
    return cross_entropy(logits_BK, batch.labels_B), routing
