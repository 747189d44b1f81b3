"""The pass over held-out text: which tokens every expert gets most of, and their contexts.

The windows stand evenly over the split. The first pass keeps the highest coefficients of all
experts, of all tokens and of words alone; a second one over the few windows that were chosen reads
what the other tokens there got.

Shapes: B windows, T tokens of a window, S experts of all levels side by side.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.text.dataset import TokenStream
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.windows import EvaluationWindows
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.experts.report.coefficients import Reader, reading
from polyad.train.experts.report.content import ExpertReport, Snippet
from polyad.train.experts.report.snippets import Documents, Place, pieces
from polyad.train.experts.report.top_tokens import TopTokens, choose_experts
from polyad.train.experts.report.words import WordTokens
from polyad.train.experts.routing_measures import Division, RoutingMeasures, TokenLabels


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which experts and how many tokens are shown."""

    top: int = 8
    """Tokens of an expert: so many of all, and so many words."""
    per_layer: int = 6
    """Experts that are picked in a layer, unless they are named."""
    experts: tuple[str, ...] = ()
    """By name, in every layer; see `RoutedLayer.expert_name`."""


class Text:
    """Windows of a split.

    Args:
        stream: the split.
        sequence_length: T.
        batch_size: windows in a forward pass.
        tokenizer: of the model.
        limit: about how many tokens are read.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        batch_size: int,
        tokenizer: Tokenizer,
        limit: int,
    ) -> None:
        self.stream, self.tokenizer = stream, tokenizer
        self.length, self.batch_size = sequence_length, batch_size
        self._windows = EvaluationWindows(
            stream, sequence_length, sequence_length, tokenizer.end_of_text_id
        )
        total = len(self._windows)
        self.count = min(total, max(1, math.ceil(limit / sequence_length)))
        """Windows that are read."""
        self._total = total

    def numbers(self) -> Iterator[int]:
        """The windows that are read, evenly over the split."""
        return (index * self._total // self.count for index in range(self.count))

    def batches(self, numbers: Iterator[int]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Numbers of windows, their inputs [B, T], and the positions of those; -1 is no token."""
        rows: list[int] = []
        for number in numbers:
            rows.append(number)
            if len(rows) == self.batch_size:
                yield self._batch(rows)
                rows = []
        if rows:
            yield self._batch(rows)

    def _batch(self, numbers: list[int]) -> tuple[list[int], Tensor, Tensor]:
        windows = [self._windows[number] for number in numbers]
        begin_B1 = torch.tensor(numbers).unsqueeze(1) * self.length - 1
        position_BT = begin_B1 + torch.arange(self.length)
        scored_BT = torch.stack([window.scored_T for window in windows])
        position_BT = position_BT.where(scored_BT, -1)
        return numbers, torch.stack([window.input_T for window in windows]), position_BT

    def window_of(self, position: int) -> int:
        """The window whose input has a position."""
        return (position + 1) // self.length

    def bounds(self, window: int) -> tuple[int, int]:
        """Positions of the first token of a window's input, and one past its last."""
        begin = window * self.length - 1
        return begin, min(begin + self.length, self.stream.num_tokens)


class TextRead(NamedTuple):
    """What the text says of experts."""

    tokens: int
    """Tokens that were read."""
    layers: dict[str, list[ExpertReport]]
    """Of each layer the experts that are shown."""
    division: Division
    """How all experts divide the work, by classes of tokens."""


def read_text(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    text: Text,
    choice: Choice,
    *,
    name: str,
    progress: Callable[[float], None] = lambda share: None,
) -> TextRead:
    """Reads the text.

    Args:
        model: in evaluation mode.
        layers: those that are read.
        text: what is read.
        choice: what is kept.
        name: of the weights, for an error.
        progress: is told the share done after each batch.

    Raises:
        ConfigError: coefficients are not finite.
    """
    device = next(model.parameters()).device
    tops, word_tops = (
        {layer.name: TopTokens(layer.num_experts, choice.top, device) for layer in layers}
        for _ in range(2)
    )
    are_words = WordTokens(text.tokenizer)
    measures = RoutingMeasures(layers, text.count, device)
    labels = TokenLabels(text.tokenizer, text.stream, text.count, text.length)
    measures.by_token(labels.sorted_by)
    measures.by_output(text.batch_size)
    with reading(model, layers) as read, deciding(model, layers) as decisions:
        done = 0
        for numbers, input_BT, position_BT in text.batches(text.numbers()):
            word_position_BT = position_BT.where(are_words(input_BT), -1).to(device)
            for layer_name, a_BTS in read(input_BT.to(device)).items():
                tops[layer_name].add(a_BTS, position_BT.to(device))
                word_tops[layer_name].add(a_BTS, word_position_BT)
            number_B = torch.arange(done, done + len(numbers))
            measures.add_text(decisions, *labels(input_BT, position_BT >= 0, number_B))
            done += len(numbers)
            progress(done / text.count)
        columns = {layer.name: _columns(layer, tops[layer.name], choice, name) for layer in layers}
        wanted = {
            (name, column): merged(tops[name].highest(column), word_tops[name].highest(column))
            for name, chosen in columns.items()
            for column in chosen
        }
        snippets = _snippets(read, text, wanted, device)
    tokens, reports = 0, {}
    for layer in layers:
        totals = tops[layer.name].totals()
        tokens, times_S = totals.tokens, totals.times_mean(layer.levels)
        reports[layer.name] = [
            ExpertReport(
                name=layer.expert_name(column),
                load=float(times_S[column]),
                active=float(totals.active_S[column]),
                dominant=float(totals.dominant_S[column]),
                snippets=snippets.get((layer.name, column), []),
            )
            for column in columns[layer.name]
        ]
    return TextRead(tokens, reports, measures.result())


def _columns(layer: RoutedLayer, top: TopTokens, choice: Choice, name: str) -> list[int]:
    totals = top.totals()
    if not totals.load_S.isfinite().all():
        raise ConfigError(
            f"{name}: the coefficients of {layer.name} are not finite: its weights hold NaN or "
            f"inf, or are too large"
        )
    if not choice.experts:
        return choose_experts(totals, layer.levels, choice.per_layer)
    names = {layer.expert_name(column): column for column in range(layer.num_experts)}
    return [names[expert] for expert in choice.experts]


class Top(NamedTuple):
    """A token that an expert gets much of."""

    coefficient: float
    position: int
    among_all: bool
    among_words: bool


def merged(every: Sequence[tuple[float, int]], words: Sequence[tuple[float, int]]) -> list[Top]:
    """The highest tokens of an expert and its highest words as one list, the highest first.

    Args:
        every: coefficients and positions of all tokens, the highest first.
        words: the same of words alone.
    """
    in_every, in_words = ({position for _, position in one} for one in (every, words))
    others = [one for one in words if one[1] not in in_every]
    tops = [Top(a, at, at in in_every, at in in_words) for a, at in (*every, *others)]
    return sorted(tops, key=lambda top: -top.coefficient)


def _snippets(
    read: Reader,
    text: Text,
    wanted: Mapping[tuple[str, int], list[Top]],
    device: torch.device,
) -> dict[tuple[str, int], list[Snippet]]:
    """The contexts of the top tokens of chosen experts, in their order."""
    documents = Documents(text.stream)
    windows: dict[int, list[tuple[str, int, int, Top, Place]]] = {}
    for (name, column), tops in wanted.items():
        for rank, top in enumerate(tops):
            window = text.window_of(top.position)
            place = documents.place(top.position, *text.bounds(window))
            windows.setdefault(window, []).append((name, column, rank, top, place))
    found: dict[tuple[str, int], dict[int, Snippet]] = {}
    for numbers, input_BT, _ in text.batches(iter(sorted(windows))):
        coefficients = {name: a_BTS.cpu() for name, a_BTS in read(input_BT.to(device)).items()}
        for row, window in enumerate(numbers):
            begin, end = text.bounds(window)
            for name, column, rank, top, place in windows[window]:
                a_T = coefficients[name][row, :, column]
                positions = range(place.read_first, place.read_stop)
                shown = pieces(
                    place,
                    text.stream.read(place.read_first, place.read_stop).tolist(),
                    [float(a_T[p - begin]) if begin <= p < end else 0.0 for p in positions],
                    text.tokenizer.decode,
                    text.tokenizer.end_of_text_id,
                )
                found.setdefault((name, column), {})[rank] = Snippet(
                    coefficient=top.coefficient,
                    place=place,
                    pieces=shown,
                    among_all=top.among_all,
                    among_words=top.among_words,
                )
    return {key: [ranked[rank] for rank in sorted(ranked)] for key, ranked in found.items()}
