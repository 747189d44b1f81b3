"""Tokens of held-out text with each expert's highest coefficients, and their contexts.

The pass keeps the highest coefficients of each expert, over all tokens and over words only; a
second pass over the few chosen windows reads the coefficients of the other tokens in them.

Shapes: B windows, T tokens of a window, S experts of all levels side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from polyad.parallel.streamed import Streamed
from polyad.train.experts.probing import RoutedLayer
from polyad.train.reading import Reading, read
from polyad.train.report.snippets import (
    Documents,
    Piece,
    Place,
    WordTokens,
    line_numbers,
    pieces,
)
from polyad.train.report.top_tokens import ShownExpert, TopTokens, shown_experts
from polyad.train.tasks.samples import TextSamples


class Top(NamedTuple):
    """A token with a high coefficient of an expert."""

    coefficient: float
    position: int
    among_all: bool
    """Whether it is among the highest of all tokens."""
    among_words: bool
    """Whether it is among the highest words or parts of words."""


class Snippet(NamedTuple):
    """A top token in its context."""

    top: Top
    place: Place
    pieces: list[Piece]
    line: int | None = None
    """Line in its document, from 1; None if tokens do not preserve line ends."""
    file: str | None = None
    """The source of its document; None if unknown."""

    def shown(self) -> list[Piece]:
        """The pieces without white space at both ends, unless the token itself is white space."""
        known = [i for i, each in enumerate(self.pieces) if each.is_peak or each.text.strip()]
        return self.pieces[known[0] : known[-1] + 1] if known else self.pieces

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "coefficient": self.top.coefficient,
            "document": self.place.document,
            "offset": self.place.offset,
            "position": self.place.position,
            "line": self.line,
            "file": self.file,
            "text": "".join(piece.text for piece in self.pieces),
            "token": "".join(piece.text for piece in self.pieces if piece.is_peak),
        }


@dataclass(frozen=True, kw_only=True)
class TextPass:
    """Top-activating tokens."""

    data: str
    split: str
    tokens: int
    """Number of tokens read."""
    of_tokens: int
    """Number of tokens in the whole split."""
    perplexity: float | None
    """The same perplexity as in `polyad evaluate`; None unless the whole split was read."""
    layers: Mapping[str, list[ShownExpert[Snippet]]]
    """Experts by layer name."""
    left_out: int | None = None
    """Number of tokens read without experts; None if not requested."""

    def layers_to_json(self) -> dict[str, Any]:
        """JSON values of the experts of each layer."""
        return {
            name: [
                {
                    "expert": expert.name,
                    "load": expert.load,
                    "active": expert.active,
                    "dominant": expert.dominant,
                    "without": expert.without,
                    "top": [one for one in expert.top if one.top.among_all],
                    "top_words": [one for one in expert.top if one.top.among_words],
                }
                for expert in experts
            ]
            for name, experts in self.layers.items()
        }


def merged(every: Sequence[tuple[float, int]], words: Sequence[tuple[float, int]]) -> list[Top]:
    """Merges an expert's highest tokens and highest words, the highest first."""
    in_every, in_words = ({position for _, position in one} for one in (every, words))
    others = [one for one in words if one[1] not in in_every]
    tops = [Top(a, at, at in in_every, at in in_words) for a, at in (*every, *others)]
    return sorted(tops, key=lambda top: -top.coefficient)


class _Contexts:
    """Reads the contexts of the top tokens of chosen experts.

    Args:
        text: the text of the tokens.
        wanted: top tokens by layer and expert.
    """

    blocks: Sequence[int] = ()

    def __init__(self, text: TextSamples, wanted: Mapping[tuple[str, int], list[Top]]) -> None:
        self._text, self._documents = text, Documents(text.stream)
        self.windows: dict[int, list[tuple[str, int, int, Top, Place]]] = {}
        """Top tokens by number of their window in the split."""
        self._found: dict[tuple[str, int], dict[int, Snippet]] = {}
        for (name, column), tops in wanted.items():
            for rank, top in enumerate(tops):
                window = (top.position + 1) // text.length
                place = self._documents.place(top.position, *self._bounds(window))
                self.windows.setdefault(window, []).append((name, column, rank, top, place))
        places = [place for tokens in self.windows.values() for *_, place in tokens]
        self._lines = line_numbers(places, text.stream, text.tokenizer)
        self._files = text.files_of_documents({place.document for place in places})

    def _bounds(self, window: int) -> tuple[int, int]:
        """Positions of the first token of a window's input, and one past its last."""
        begin = window * self._text.length - 1
        return begin, min(begin + self._text.length, self._text.stream.num_tokens)

    def add(self, reading: Reading) -> None:
        """Cuts out the contexts in a batch."""
        stream, tokenizer = self._text.stream, self._text.tokenizer
        coefficients = {
            name: decision.coefficients().view(*reading.batch.ids_BT.shape, -1).cpu()
            for name, decision in reading.of_all_tokens.items()
        }
        windows = sorted(self.windows)
        for row, number in enumerate(reading.number_R.tolist()):
            begin, end = self._bounds(windows[number])
            for name, column, rank, top, place in self.windows[windows[number]]:
                if name not in coefficients:
                    continue
                a_T = coefficients[name][row, :, column]
                positions = range(place.read_first, place.read_stop)
                shown = pieces(
                    place,
                    stream.read(place.read_first, place.read_stop).tolist(),
                    [float(a_T[p - begin]) if begin <= p < end else 0.0 for p in positions],
                    tokenizer.decode,
                    tokenizer.end_of_text_id,
                )
                line, file = (
                    self._lines.get(place.position),
                    self._files.get(place.document),
                )
                found = self._found.setdefault((name, column), {})
                found[rank] = Snippet(top, place, shown, line, file)

    def of_expert(self, layer: str, column: int) -> list[Snippet]:
        """The contexts of an expert, the highest coefficient first."""
        ranked = self._found.get((layer, column), {})
        return [ranked[rank] for rank in sorted(ranked)]


class TopText:
    """Collects the top tokens of each expert.

    Args:
        layers: the layers whose experts are shown.
        text: the text to read.
        top: number of tokens per expert, over all tokens, and the same number of words.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self, layers: Sequence[RoutedLayer], text: TextSamples, top: int, device: str
    ) -> None:
        self._layers, self._text = layers, text
        self._every, self._words = (
            {layer.name: TopTokens(layer.num_experts, top, device) for layer in layers}
            for _ in range(2)
        )
        self._are_words = WordTokens(text.tokenizer)

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        ids_BT, position_BT = reading.batch.ids_BT, self._text.position_BT(reading.batch)
        is_word_BT = self._are_words(ids_BT.cpu()).to(ids_BT.device)
        for name, decision in reading.of_all_tokens.items():
            a_BTS = decision.coefficients().view(*ids_BT.shape, -1)
            self._every[name].add(a_BTS, position_BT)
            self._words[name].add(a_BTS, position_BT.where(is_word_BT, -1))

    def sums(self) -> dict[str, Tensor]:
        """See `polyad.train.reading.Lasting`."""
        return {
            f"{which}.{layer}.{name}": value
            for which, kept in (("tokens", self._every), ("words", self._words))
            for layer, each in kept.items()
            for name, value in each.sums().items()
        }

    def result(
        self, model: nn.Module, experts: Sequence[str], batch_size: int, name: str
    ) -> dict[str, list[ShownExpert[Snippet]]]:
        """Returns the experts to show in each layer.

        Args:
            model: reads the windows of their top tokens again.
            experts: names of experts in every layer; empty: some are picked.
            batch_size: windows per forward pass.
            name: name of the weights in errors.

        Raises:
            ConfigError: coefficients are not finite.
        """
        totals = {layer.name: self._every[layer.name].totals() for layer in self._layers}
        columns = {
            layer.name: shown_experts(layer, totals[layer.name], experts, f"{name}: ")
            for layer in self._layers
        }
        wanted = {
            (name, column): self._tops(name, column)
            for name, chosen in columns.items()
            for column in chosen
        }
        contexts = self._contexts(wanted, model, batch_size)
        return {
            layer.name: [
                totals[layer.name].shown(layer, column, contexts.of_expert(layer.name, column))
                for column in columns[layer.name]
            ]
            for layer in self._layers
        }

    def _tops(self, layer: str, column: int) -> list[Top]:
        every, words = self._every[layer], self._words[layer]
        return merged(every.highest(column), words.highest(column))

    def _contexts(
        self, wanted: Mapping[tuple[str, int], list[Top]], model: nn.Module, batch_size: int
    ) -> _Contexts:
        contexts = _Contexts(self._text, wanted)
        if contexts.windows:
            some = self._text.some(sorted(contexts.windows))
            # A streamed model reads all blocks again, which is slow.
            told = "read contexts" if isinstance(model, Streamed) else ""
            read(model, self._layers, some, [contexts], batch_size=batch_size, told=told)
        return contexts

    @property
    def tokens(self) -> int:
        """Number of tokens read."""
        return next(iter(self._every.values())).totals().tokens
