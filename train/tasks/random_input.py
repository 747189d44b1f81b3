"""Random samples for any kind of model, to try or plan a layout and to count FLOPs."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyad.data.config import DataSettings
from polyad.data.images.samples import ImageBatch
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.text.masking import MaskedBatch
from polyad.model.bert import BertConfig, MaskedLanguageHeadConfig
from polyad.model.build import build_model
from polyad.model.decoder import DecoderSettings
from polyad.model.heads import ClassificationHeadConfig
from polyad.model.output import RoutingStats
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.vision import ImageSettings
from polyad.parallel.plan import forward_flops
from polyad.train.tasks.distillation import BlockTeacher, Teacher, cross_entropy
from polyad.train.tasks.language import TextBatch, masked_losses, text_losses
from polyad.train.tasks.task import Predictor

RandomBatch: TypeAlias = "TextBatch | MaskedBatch | ClassBatch | ImageBatch"


class ClassBatch(NamedTuple):
    """Inputs, such as sequences without padding, each with a class."""

    inputs: Tensor
    labels_B: Tensor


def _sequences(model: ModelSettings, data: DataSettings | None) -> tuple[int, int | None]:
    """Sequences per sample according to the configuration: the number of choices, or 1; and their
    maximum length in tokens, None for the model's."""
    if isinstance(model, DecoderSettings | BertConfig) and isinstance(data, SequenceDataConfig):
        longest = min(data.max_length or model.sequence_length, model.sequence_length)
        return max(1, len(data.schema_of.choices or [])), longest
    return 1, None


def flops_of_unit(model: ModelSettings, data: DataSettings | None = None) -> int:
    """Training FLOPs per unit of throughput with sequences of maximum length; see `training_flops`.

    Args:
        model: The complete configuration.
        data: As for `random_batch`.
    """
    return training_flops(model, *_sequences(model, data))


def training_flops(model: ModelSettings, sequences: int = 1, length: int | None = None) -> int:
    """Counts the training FLOPs per unit of throughput.

    Counts the matrix products of a forward pass three times, since the backward pass has two for
    each. Causal attention counts in full and recomputation does not count, so that the share of a
    device's peak is the "model FLOPs utilization" of PaLM (Chowdhery et al. 2022, appendix B). If
    the number of experts per token grows, the mean of first and last counts, since each number has
    an equal share of the run; a token graph counts as if on from the start. What a layer computes
    once per batch counts as for a batch of one sample.

    Args:
        model: Complete.
        sequences: Sequences per sample.
        length: Tokens of a sequence that is scored as a whole; None: the model's maximum.

    Returns:
        FLOPs; a multiply-add counts as two.

    Raises:
        ValueError: Values that the data determines are missing.
    """
    key = repr(model), sequences, length
    if key not in _counted:
        begin, end = _in_run(model, at_end=False), _in_run(model, at_end=True)
        forward = [
            forward_flops(
                build_model(each), _batch(each, range(sequences), length), losses_for(each)
            )
            for each in ([begin] if begin == end else [begin, end])
        ]
        _counted[key] = round(3 * sum(forward) / (len(forward) * model.units_per_sample()))
    return _counted[key]


_counted: dict[tuple[str, int, int | None], int] = {}
"""Cache of counts, since the variants of a study often share one model."""


def _in_run(model: ModelSettings, *, at_end: bool) -> ModelSettings:
    """The model at the start or end of a run, whose K is that of then."""
    changed = {}
    for key, each in model.feed_forwards().items():
        if isinstance(each, SparseMoEConfig):
            top_k = each.known_final_top_k() if at_end else each.top_k
            changed[key] = each.model_copy(update={"top_k": top_k, "final_top_k": None})
    return model.with_feed_forwards(changed)


def random_batch(
    model: ModelSettings, samples: Sequence[int], data: DataSettings | None = None
) -> RandomBatch:
    """Makes a micro-batch like those of the model's task.

    Args:
        model: A text or image model.
        samples: The number of each sample, which is its seed.
        data: The run's data, which gives the length of labelled sequences and their number per
            sample; None: one sequence per sample, of the model's length.
    """
    each, length = _sequences(model, data)
    seeds = [each * sample + number for sample in samples for number in range(each)]
    return _batch(model, seeds, length)


def _batch(model: ModelSettings, seeds: Sequence[int], length: int | None) -> RandomBatch:
    samples = [_sample(model, length, seed) for seed in seeds]
    return type(samples[0])(*map(torch.stack, zip(*samples, strict=True)))


def _sample(model: ModelSettings, length: int | None, seed: int) -> RandomBatch:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, ImageSettings):
        side = model.image_size
        return ImageBatch(
            torch.randn((model.channels, side, side), generator=generator),
            torch.randint(model.number("num_classes"), (), generator=generator),
            torch.ones(()),
            torch.zeros(4, dtype=torch.int16),
        )
    if not isinstance(model, DecoderSettings | BertConfig):
        return ClassBatch(*model.random_sample(generator))
    length, vocabulary = length or model.sequence_length, model.number("vocab_size")
    if model.head is None:
        return TextBatch.of(torch.randint(vocabulary, (length + 1,), generator=generator))
    ids_T = torch.randint(vocabulary, (length,), generator=generator)
    if isinstance(model.head, MaskedLanguageHeadConfig):
        hidden = model.head.num_masked(length)
        positions_P = torch.randperm(length, generator=generator)[:hidden].sort().values
        return MaskedBatch(ids_T, positions_P, ids_T[positions_P].roll(1))
    assert isinstance(model.head, ClassificationHeadConfig)
    return ClassBatch(ids_T, torch.randint(model.head.num_classes or 1, (), generator=generator))


def losses_for(model: ModelSettings, teacher: Teacher | BlockTeacher | None = None) -> Any:
    """Returns a function for the loss on such a micro-batch; see `Task.losses`.

    Args:
        model: A text or image model.
        teacher: Adds its distillation loss; None: no distillation.
    """
    if isinstance(model, DecoderSettings) and model.head is None:
        return partial(text_losses, teacher=teacher)
    if isinstance(model, BertConfig) and model.head.kind == "language":
        return masked_losses
    assert not isinstance(teacher, BlockTeacher)
    return partial(_class_losses, teacher)


def _class_losses(
    teacher: Teacher | None, model: Predictor, batch: ClassBatch | ImageBatch
) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """The cross-entropy of the class; for a single output its square."""
    inputs = batch[0]
    logits_BK, routing = model(inputs)
    if logits_BK.shape[-1] == 1:
        losses_B = logits_BK[:, 0].float().square()
    else:
        losses_B = cross_entropy(logits_BK, batch.labels_B)
    if teacher is not None:
        losses_B = teacher.mix_in(losses_B, logits_BK.float(), inputs)
    return losses_B, routing
