"""Held-out text as a model predicts it, and the model from any of its blocks on.

Of a GPT-2 every token of a window is predicted from those before it; of a BERT hidden tokens are,
from both sides.

Shapes: B windows, T tokens of a window, P tokens that are predicted, R rows, D width, J labellings.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from polyad.data.evaluation import evaluation_batches
from polyad.data.text.masking import MaskedWindow
from polyad.data.text.windows import window_batches
from polyad.model.gpt2 import GPT2
from polyad.train.experts.token_classes import Labelling, classes_of_vocabulary, labellings
from polyad.train.tasks.language import TextProbe
from polyad.train.tasks.masked_language import MaskedProbe
from polyad.train.tasks.text import TextTask


class Passages(NamedTuple):
    """A batch of windows."""

    number_B: Tensor
    """Of each window among all that are read, on the CPU."""
    ids_BT: Tensor
    """What is read."""
    places_BP: Tensor
    """Where tokens are predicted."""
    target_BP: Tensor
    """Those tokens."""
    scored_BP: Tensor
    """Which of them count."""

    def rows(self, row_R: Tensor) -> "Passages":
        """Some windows, as often as they are named.

        Args:
            row_R: on the device of the tokens.
        """
        others = (each[row_R] for each in self[1:])
        return Passages(self.number_B[row_R.cpu()], *others)


class PredictedText:
    """Whole windows without overlap, evenly over a split.

    Args:
        task: of the text.
        split: of it.
        tokens: about how many are read.
    """

    def __init__(self, task: TextTask[Any], split: str, tokens: int) -> None:
        probe = task.probe(min(tokens, task.units_of(split)), split)
        assert isinstance(probe, TextProbe | MaskedProbe)
        self._probe = probe
        self.windows, self.length = len(probe), probe.about()["sequence_length"]
        self.masked = isinstance(probe, MaskedProbe)
        self._tokenizer = task.data.parts[0].data.tokenizer()
        self._stream = task.split(split)[0]
        self.sorted_by = labellings(self._tokenizer, self._stream, self.length)

    def classes_of_vocabulary(self) -> dict[str, tuple[Sequence[str], Tensor]]:
        """See `token_classes.py`."""
        return classes_of_vocabulary(self._tokenizer, self._stream)

    def batches(
        self, batch_size: int, rank: int, ranks: int, device: torch.device
    ) -> Iterator[Passages]:
        """The windows of a process, without any that only fill up a batch; maybe none.

        Args:
            batch_size: windows in a batch.
            rank: of the process.
            ranks: that share the windows.
            device: where they go.
        """
        done = rank
        for read, own_B in self._read(batch_size, rank, ranks):
            number_B = done * len(own_B) + torch.arange(len(own_B))
            kept = [each[own_B].to(device) for each in read]
            yield Passages(number_B[own_B], *kept)
            done += ranks

    def _read(
        self, batch_size: int, rank: int, ranks: int
    ) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        if isinstance(self._probe, MaskedProbe):
            windows = _Hidden(self._probe)
            for batch, own_B in evaluation_batches(
                windows, self.windows, batch_size, rank=rank, ranks=ranks
            ):
                yield (batch.input_ids_T, *batch[2:]), own_B
            return
        for ids_BT, target_BT, scored_BT in window_batches(
            self._probe.windows, batch_size, rank, ranks
        ):
            places_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
            yield (ids_BT, places_BT, target_BT, scored_BT), scored_BT.any(1)


class _Hidden(Dataset[MaskedWindow]):
    """The windows of a probe with tokens hidden: whole ones, which have no padding."""

    def __init__(self, probe: MaskedProbe) -> None:
        self._probe = probe

    def __getitem__(self, window: int) -> MaskedWindow:
        return self._probe.hidden(window)


class ClassColumns:
    """The classes of tokens, all ways to sort them side by side.

    A position is sorted by the token that is predicted there, which the loss is of, and by the
    token that is read there, which the router sees: `predicted characters` and `read characters`.

    Args:
        text: that is read.
    """

    def __init__(self, text: PredictedText) -> None:
        by_name = {each.name: each for each in text.sorted_by}
        self._of: dict[str, tuple[str, Labelling]] = {}
        for side in ("predicted",) if text.masked else ("predicted", "read"):
            for name in ("characters", "frequency"):
                self._of[f"{side} {name}"] = side, by_name[name]
        self._of["position"] = "read", by_name["position"]
        self.classes: dict[str, list[str]] = {"all": ["all"]}
        """Of each way to sort; the first has all tokens in one."""
        self.classes |= {name: list(each.classes) for name, (_, each) in self._of.items()}

    @property
    def num_columns(self) -> int:
        """Of all ways together."""
        return sum(map(len, self.classes.values()))

    def slices(self) -> dict[str, slice]:
        """The columns of each way to sort."""
        found, first = {}, 0
        for name, classes in self.classes.items():
            found[name] = slice(first, first + len(classes))
            first += len(classes)
        return found

    def __call__(self, passages: Passages) -> Tensor:
        """The column of each predicted token in each way to sort, [J, B, P]; -1: it counts not.

        Args:
            passages: a batch.
        """
        scored_BP, places_BP = passages.scored_BP.cpu(), passages.places_BP.cpu()
        ids_BT, target_BP = passages.ids_BT.cpu(), passages.target_BP.cpu()
        slices, columns = self.slices(), [torch.zeros_like(places_BP)]
        for name, (side, labelling) in self._of.items():
            if side == "predicted":
                class_BP = labelling.of(target_BP)
            else:
                class_BP = labelling.of(ids_BT).gather(1, places_BP)
            columns.append(slices[name].start + class_BP)
        return torch.stack(columns).where(scored_BP, -1).to(passages.ids_BT.device)


def embedded(model: nn.Module, passages: Passages) -> Tensor:
    """What the first block gets [B, T, D]."""
    text_model: Any = model
    x_BTD: Tensor
    if isinstance(model, GPT2):
        positions_T = torch.arange(passages.ids_BT.shape[1], device=passages.ids_BT.device)
        x_BTD = model.embed(passages.ids_BT, positions_T)
    else:
        x_BTD = text_model.embed(passages.ids_BT)
    return x_BTD


def through(
    model: nn.Module, x_BTD: Tensor, first: int = 0, kept: dict[int, Tensor] | None = None
) -> Tensor:
    """What the last block gives [B, T, D].

    Args:
        model: a GPT-2 or a BERT.
        x_BTD: what block `first` gets.
        first: the block that is run first.
        kept: gets what each block gets whose number is in it.
    """
    text_model: Any = model
    for number, block in enumerate(text_model.blocks[first:], first):
        if kept is not None and number in kept:
            kept[number] = x_BTD
        x_BTD, *_ = block(x_BTD)
    return x_BTD


def losses(model: nn.Module, x_BTD: Tensor, passages: Passages) -> Tensor:
    """The loss of each predicted token in nats [B, P], from what the last block gives.

    Args:
        model: a GPT-2 or a BERT, without gradients.
        x_BTD: of the passages.
        passages: what is predicted.
    """
    text_model: Any = model
    found: Tensor
    if isinstance(model, GPT2):
        found = model.score(x_BTD, passages.target_BP)
    else:
        found = text_model.score(x_BTD, passages.places_BP, passages.target_BP)[..., 0]
    return found
