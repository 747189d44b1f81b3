"""Held-out samples for measures, spread evenly over a split and divided among processes.

Each is read once. The unit is a row: a window of text, an image, or a sequence (a sample with
choices has several). Batches are not padded with extra rows, so a process's last one may be empty.

Shapes: B samples and R rows of a batch, T tokens of a row, P predicted tokens of a window, N tokens
that the layers of a model get, D width, K classes.
"""

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from polyad.data.images.samples import EvaluationImages, ImageBatch
from polyad.data.sampler import held_out_batches
from polyad.data.sequences.samples import SequenceBatch
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import Bert, BertConfig
from polyad.model.decoder import Decoder, DecoderSettings
from polyad.model.feedforward import NOTHING_ELSE
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import LanguageModelling, MaskedLanguageModelling
from polyad.train.tasks.sequences import SequenceTask, model_inputs
from polyad.train.tasks.task import Task
from polyad.train.tasks.text import TextTask


class Samples(ABC):
    """Samples of a split, each read once.

    Attributes:
        dataset: the samples.
        amount: their number.
        rows: number of rows that all processes read together.
        rows_of_sample: rows per sample.
        unit: the unit of `amount`, for progress messages.
        num_workers: loader processes; 0: this process reads.
    """

    dataset: Dataset[Any]
    amount: int
    rows: int
    rows_of_sample: int = 1
    unit: str
    num_workers: int = 0

    def batches(
        self, batch_size: int, rank: int, ranks: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yields the batches of a process; all processes have equally many.

        Args:
            batch_size: samples in a batch.
            rank: the process's number.
            ranks: number of processes that share the samples.
            device: the model's.

        Yields:
            Each row's number among all rows read, on the CPU; and the task's batch on the device.
        """
        choice_C = torch.arange(self.rows_of_sample)
        for batch, own_B, number_B in held_out_batches(
            self.dataset, batch_size, rank, ranks, device, num_workers=self.num_workers
        ):
            number_BC = number_B.unsqueeze(1) * self.rows_of_sample + choice_C
            own = type(batch)(*(part[own_B] for part in batch))
            yield number_BC.flatten(), self.as_read(number_B, own)

    def inputs(self, batch_size: int, world: comm.World) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields model inputs, equally many batches on each process, so the model may be sharded.

        Args:
            batch_size: samples in a batch.
            world: this process.

        Yields:
            Input ids [B, T], or images [B, C, H, W]; and which tokens [B, T] or images [B] count.
        """
        rank, ranks = world.data_parallel_rank, world.data_parallel_size
        for batch, own_B, number_B in held_out_batches(
            self.dataset, batch_size, rank, ranks, world.device
        ):
            yield self.counted(self.as_read(number_B, batch), own_B)

    def as_read(self, number_B: Tensor, batch: Any) -> Any:
        """What `forward` reads of some samples.

        Args:
            number_B: their numbers, on the CPU.
            batch: as in `dataset`, on the model's device.
        """
        return batch

    def counted(self, batch: Any, own_B: Tensor) -> tuple[Tensor, Tensor]:
        """The input of a model, and what of it counts, for `inputs`."""
        return batch[0], own_B

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any, entering: dict[int, Tensor]) -> Any:
        """Runs the model on a batch.

        Args:
            model: in evaluation mode, whole on this process.
            batch: one of `batches`.
            entering: for text, is filled with the input of each block whose number is a key.

        Returns:
            For text the output of the last block [B, T, D], which `losses` scores; for images
            logits [B, K]; for sequences those of each row [R, K].
        """

    def row_N(self, batch: Any) -> Tensor | None:
        """The row of the batch that each token belongs to, -1 for a token that does not count, such
        as padding; None: all tokens count, and all rows have equally many."""
        return None

    def classes(self) -> tuple[list[str], Tensor] | None:
        """Names of the classes, and each row's class [rows]; None unless a row has exactly one."""
        return None


def samples_of(task: Task[Any], split: str | None, most: int | None = None) -> Samples:
    """Returns the samples of a split.

    Args:
        task: a task on images, sequences or text.
        split: name of the split; None: the validation split, for a mixture those of all sources.
        most: approximate number of tokens or images to read; None: all.

    Raises:
        ConfigError: there are no measures for this task.
    """
    if isinstance(task, TextTask):
        return TextSamples(task, split, most)
    if isinstance(task, ImageClassification):
        return ImageSamples(task, split or "validation", most)
    if isinstance(task, SequenceTask):
        return SequenceSamples(task, split or "validation", most)
    raise ConfigError(f"{task.place}: there are no measures of experts for this kind of data")


def probe_of(task: Task[Any], units: int, split: str | None = None) -> Samples:
    """Returns samples on which the routing of several checkpoints is compared: text or images.

    Args:
        task: their task.
        units: minimum number of tokens or images (if there are as many), spread evenly.
        split: as for `samples_of`.

    Raises:
        ConfigError: routing cannot be compared on this data.
    """
    samples = samples_of(task, split, units)
    if isinstance(samples, SequenceSamples):
        raise ConfigError(f"{task.place}: routing cannot be compared on this kind of data")
    return samples


class Passages(NamedTuple):
    """A batch of windows."""

    number_B: Tensor
    """Each window's number among all windows read, on the CPU."""
    ids_BT: Tensor
    """The input tokens."""
    places_BP: Tensor
    """Positions at which tokens are predicted."""
    target_BP: Tensor
    """The predicted tokens."""
    scored_BP: Tensor
    """Which predicted tokens count."""

    def rows(self, row_R: Tensor) -> "Passages":
        """Selects windows by index; an index may occur several times.

        Args:
            row_R: indices, on the device of the tokens.
        """
        others = (each[row_R] for each in self[1:])
        return Passages(self.number_B[row_R.cpu()], *others)


class TextSamples(Samples):
    """Whole windows of text without overlap.

    Args:
        task: the text task.
        split: name of the split; None: all validation splits, one after the other.
        most: approximate number of tokens to read; None: all.
        hidden: for a BERT, whether tokens are hidden for it to predict; else it reads the text
            unchanged and predicts nothing. A GPT-2 always predicts each token from those before.

    Raises:
        ConfigError: the text has not even one whole window for a BERT.
    """

    unit = "tok"

    def __init__(
        self,
        task: TextTask[Any],
        split: str | None,
        most: int | None = None,
        *,
        hidden: bool = False,
    ) -> None:
        streams = [part.data.split("validation") for part in task.data.validation()]
        if split is not None:
            streams = [task.split(split)[0]]
        assert isinstance(task.model, DecoderSettings | BertConfig)
        self.stream, self.length, self._data = streams[0], task.model.sequence_length, task.data
        self.predicts_both_ways = isinstance(task, MaskedLanguageModelling)
        self._hidden = hidden
        self.stride = self.length - 2 * self.predicts_both_ways  # less two special tokens
        """Tokens from the start of one window to the start of the next."""
        parts: list[Dataset[Any]] = []
        for stream in streams:
            if isinstance(task, MaskedLanguageModelling):
                windows = task.windows(stream)
                parts.append(Subset(windows, range(windows.num_full)))
            elif isinstance(task, LanguageModelling):
                parts.append(task.windows(stream, stride=self.length))
        self._every: ConcatDataset[Any] = ConcatDataset(parts)
        if not len(self._every):
            raise ConfigError(
                f"{task.place}: its held-out text is shorter than one window of "
                f"model.sequence_length: {self.length} tokens"
            )
        total, count = len(self._every), len(self._every)
        if most is not None:
            count = min(total, max(1, -(-most // self.stride)))
        self._choose([number * total // count for number in range(count)])

    def _choose(self, windows: Sequence[int]) -> None:
        self._windows = list(windows)
        """Each window's number in the split."""
        self.dataset, self.rows = Subset(self._every, windows), len(windows)
        self.amount = self.rows * self.length

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return self._data.parts[0].data.tokenizer()

    def some(self, windows: Sequence[int]) -> "TextSamples":
        """Returns other windows of the same split.

        Args:
            windows: their numbers in the split.
        """
        other = copy.copy(self)
        other._choose(windows)
        return other

    def as_read(self, number_B: Tensor, batch: Any) -> Passages:
        """`Passages`."""
        if not self.predicts_both_ways:
            return Passages(number_B, batch[0], _places(batch[0]), *batch[1:])
        ids_BT, _, *predicted = batch
        if self._hidden:
            return Passages(number_B, ids_BT, *predicted)
        place_BP, target_BP, scored_BP = predicted
        row_BP = torch.arange(len(ids_BT), device=ids_BT.device).unsqueeze(1).expand_as(place_BP)
        hidden = row_BP[scored_BP], place_BP[scored_BP]
        text_BT = ids_BT.index_put(hidden, target_BP[scored_BP])
        return Passages(number_B, text_BT, _places(text_BT), text_BT, _text(text_BT))

    def counted(self, batch: Passages, own_B: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, and which of them count."""
        return batch.ids_BT, self.counted_BT(batch) & own_B.unsqueeze(1)

    def forward(self, model: nn.Module, batch: Passages, entering: dict[int, Tensor]) -> Tensor:
        """The output of the last block [B, T, D]."""
        return through(model, embedded(model, batch), kept=entering)

    def row_N(self, batch: Passages) -> Tensor:
        """The window of each token that counts; see `counted_BT`."""
        counted_BT = self.counted_BT(batch)
        window_B1 = torch.arange(len(counted_BT), device=counted_BT.device).unsqueeze(1)
        return window_B1.where(counted_BT, -1).flatten()

    def counted_BT(self, batch: Passages) -> Tensor:
        """Which tokens count: those of the text, whether or not some are hidden or scored.

        Neither padding, nor a BERT's special tokens, nor the last token of a split, which a GPT-2
        only predicts.
        """
        if self.predicts_both_ways:
            return _text(batch.ids_BT)
        # A token that begins a document is read, and never scored.
        begin = self._data.tokenizer.begin_of_text_id
        return batch.scored_BP | (batch.target_BP == (-1 if begin is None else begin))

    def position_BT(self, batch: Passages) -> Tensor:
        """The position in the split of each token that a GPT-2 reads; -1 where it does not
        count."""
        _, position_BT, _ = self.places(batch)
        return position_BT.where(self.counted_BT(batch), -1)

    def places(self, batch: Passages) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of all input tokens, whether they count or not.

        Returns:
            Each window's number in the split [B]; each token's position in the split [B, T], -1 for
            the end-of-text token before the first; and which of them are text [B, T], neither
            padding nor a BERT's special tokens.
        """
        windows = [self._windows[number] for number in batch.number_B.tolist()]
        window_B = torch.tensor(windows, dtype=torch.int64, device=batch.ids_BT.device)
        # Each window starts with the token before its text, or with a special token.
        first_B1 = window_B.unsqueeze(1) * self.stride - 1
        position_BT = first_B1 + torch.arange(self.length, device=first_B1.device)
        if self.predicts_both_ways:
            return window_B, position_BT, _text(batch.ids_BT)
        # The last token of a split is only predicted, not read.
        return window_B, position_BT, position_BT < self.stream.num_tokens - 1


def _text(ids_BT: Tensor) -> Tensor:
    """Which of a BERT's input tokens are text [B, T], not the special tokens at the ends."""
    counted_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    counted_BT[:, [0, -1]] = False
    return counted_BT


def _places(ids_BT: Tensor) -> Tensor:
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)


def embedded(model: nn.Module, passages: Passages) -> Tensor:
    """The input of the first block [B, T, D]."""
    embed = cast(Any, model).embed
    positions = []
    if isinstance(model, Decoder):
        positions = [torch.arange(passages.ids_BT.shape[1], device=passages.ids_BT.device)]
    x_BTD: Tensor = embed(passages.ids_BT, *positions)
    return x_BTD


def through(
    model: nn.Module, x_BTD: Tensor, first: int = 0, kept: dict[int, Tensor] | None = None
) -> Tensor:
    """Runs the blocks from `first` on; returns the output of the last one [B, T, D].

    Args:
        model: a decoder or a BERT.
        x_BTD: input of block `first`.
        first: the first block to run.
        kept: is filled with the input of each block whose number is a key.
    """
    text_model: Any = model
    given = NOTHING_ELSE
    if isinstance(model, Decoder):
        given = model.given(torch.arange(x_BTD.shape[1], device=x_BTD.device), x_BTD.dtype)
    for number, block in enumerate(text_model.blocks[first:], first):
        if kept is not None and number in kept:
            kept[number] = x_BTD
        x_BTD, *_ = block(x_BTD, given)
    return x_BTD


def losses(model: nn.Module, x_BTD: Tensor, passages: Passages) -> Tensor:
    """Computes the loss of each predicted token in nats [B, P] from the last block's output.

    Args:
        model: a decoder or a BERT, without gradients.
        x_BTD: output of the last block on the passages.
        passages: the tokens to predict.
    """
    if isinstance(model, Bert):
        return model.score(x_BTD, passages.places_BP, passages.target_BP)[..., 0]
    losses_BP: Tensor = cast(Any, model).score(x_BTD, passages.target_BP)
    return losses_BP


class ImageSamples(Samples):
    """Images without augmentation.

    Args:
        task: the image task.
        split: name of the split; empty where `images` belong to none.
        most: number of images to read; None: all.
        images: images to read in place of the split's.
    """

    def __init__(
        self,
        task: ImageClassification,
        split: str = "",
        most: int | None = None,
        *,
        images: EvaluationImages | Subset[ImageBatch] | None = None,
    ) -> None:
        images = task.held_out(split) if images is None else images
        total = len(images)
        self.rows = self.amount = total if most is None else min(total, most)
        self.numbers = [number * total // self.rows for number in range(self.rows)]
        """The images' numbers in their split."""
        self.task, self.split, self.dataset = task, split, Subset(images, self.numbers)
        self.unit, self.num_workers = task.unit.short, task.settings.num_workers

    def as_read(self, number_B: Tensor, batch: ImageBatch) -> ImageBatch:
        """`ImageBatch` with normalized images."""
        return batch._replace(images_BCHW=self.task.inputs(batch.images_BCHW))

    def forward(self, model: nn.Module, batch: ImageBatch, entering: dict[int, Tensor]) -> Tensor:
        """Logits [B, K]."""
        logits_BK: Tensor = model(batch.images_BCHW).logits
        return logits_BK

    def classes(self) -> tuple[list[str], Tensor] | None:
        """The class of each image; None where it may have several."""
        if self.task.has_attributes:
            return None
        labels_N = np.asarray(self.task.data.split(self.split).labels)[self.numbers]
        return list(self.task.data.class_names), torch.as_tensor(labels_N).long()


class SequenceSamples(Samples):
    """Labelled sequences, spread evenly over their lengths.

    Args:
        task: the sequence task.
        split: name of the split.
        most: approximate number of tokens to read; None: all.
    """

    def __init__(self, task: SequenceTask, split: str, most: int | None = None) -> None:
        self.task, self.split, self.unit = task, split, task.unit.short
        rows, samples = task.data.encoded(split), None
        if most is not None:
            mean = float(rows.lengths_R.mean()) * task.data.choices
            samples = min(len(rows), max(1, math.ceil(most / mean)))
        self.dataset = chosen = task.data.held_out(split, samples)
        self.amount, self.rows_of_sample = len(chosen), task.data.choices
        self.rows = self.amount * self.rows_of_sample
        self.row_of = np.array([chosen.row_of(number) for number in range(self.amount)])
        """Each sample's row in the split."""

    def forward(
        self, model: nn.Module, batch: SequenceBatch, entering: dict[int, Tensor]
    ) -> Tensor:
        """The scores of each row [R, K]."""
        ids_RT, named = model_inputs(batch, self.task.data.has_segments)
        logits_RK: Tensor = model(ids_RT, **named).logits
        return logits_RK

    def row_N(self, batch: SequenceBatch) -> Tensor:
        """The row of each token; layers get no padding."""
        row_N: Tensor = batch.mask_BCT.flatten(0, 1).nonzero()[:, 0]
        return row_N

    def classes(self) -> tuple[list[str], Tensor]:
        """The class of a sequence; whether a choice is the right one; or, for numbers, the third of
        all values that its own lies in."""
        kind, labels_N = self.task.schema.task, self.task.data.encoded(self.split).labels_N
        assert labels_N is not None
        labels_N = labels_N[self.row_of]
        if kind == "classification":
            names, group_R = list(self.task.data.class_names), labels_N
        elif kind == "multiple_choice":
            right_NC = labels_N[:, None] == np.arange(self.rows_of_sample)
            names, group_R = ["wrong choices", "right choices"], right_NC.reshape(-1)
        else:
            low, high = np.quantile(labels_N.astype(np.float64), (1 / 3, 2 / 3))
            names = [f"up to {low:.3g}", f"{low:.3g} to {high:.3g}", f"above {high:.3g}"]
            group_R = np.searchsorted((low, high), labels_N.astype(np.float64))
        return names, torch.from_numpy(group_R.astype(np.int64))
