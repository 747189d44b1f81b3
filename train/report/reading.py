"""The pass over held-out text: which tokens every expert gets most of, and their contexts.

The windows stand evenly over the split. The first pass keeps the highest coefficients of all
experts; a second one over the few windows that were chosen reads what the other tokens there got.

Shapes: B windows, T tokens of a window, S experts of all levels side by side.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.dataset import TokenStream
from data.tokenizer import Tokenizer
from data.windows import EvaluationWindows
from train.errors import ConfigError
from train.probing import RoutedLayer
from train.report.coefficients import Reader, reading
from train.report.content import ExpertReport, Snippet
from train.report.snippets import Documents, Place, pieces
from train.report.top_tokens import TopTokens, choose_experts


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is shown of the experts."""

    top: int = 8
    """Tokens of an expert."""
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


def read_text(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    text: Text,
    choice: Choice,
    *,
    name: str,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[int, dict[str, list[ExpertReport]]]:
    """Reads the text.

    Args:
        model: in evaluation mode.
        layers: those that are read.
        text: what is read.
        choice: what is kept.
        name: of the weights, for an error.
        progress: is told the share done after each batch.

    Returns:
        How many tokens were read, and of each layer the experts that are shown.

    Raises:
        ConfigError: coefficients are not finite.
    """
    device = next(model.parameters()).device
    tops = {layer.name: TopTokens(layer.num_experts, choice.top, device) for layer in layers}
    with reading(model, layers) as read:
        done = 0
        for numbers, input_BT, position_BT in text.batches(text.numbers()):
            for layer_name, a_BTS in read(input_BT.to(device)).items():
                tops[layer_name].add(a_BTS, position_BT.to(device))
            done += len(numbers)
            progress(done / text.count)
        columns = {layer.name: _columns(layer, tops[layer.name], choice, name) for layer in layers}
        snippets = _snippets(read, text, tops, columns, device)
    tokens, reports = 0, {}
    for layer in layers:
        totals, scale = tops[layer.name].totals(), _level_sizes(layer)
        tokens = totals.tokens
        reports[layer.name] = [
            ExpertReport(
                name=layer.expert_name(column),
                load=float(totals.load_S[column]) * scale[column],
                active=float(totals.active_S[column]),
                dominant=float(totals.dominant_S[column]),
                snippets=snippets.get((layer.name, column), []),
            )
            for column in columns[layer.name]
        ]
    return tokens, reports


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


def _level_sizes(layer: RoutedLayer) -> list[int]:
    return [size for size in layer.levels for _ in range(size)]


def _snippets(
    read: Reader,
    text: Text,
    tops: Mapping[str, TopTokens],
    columns: Mapping[str, list[int]],
    device: torch.device,
) -> dict[tuple[str, int], list[Snippet]]:
    """The contexts of the top tokens of chosen experts, in their order."""
    documents = Documents(text.stream)
    wanted: dict[int, list[tuple[str, int, int, float, Place]]] = {}
    for name, chosen in columns.items():
        for column in chosen:
            for rank, (a, position) in enumerate(tops[name].highest(column)):
                window = text.window_of(position)
                place = documents.place(position, *text.bounds(window))
                wanted.setdefault(window, []).append((name, column, rank, a, place))
    found: dict[tuple[str, int], dict[int, Snippet]] = {}
    for numbers, input_BT, _ in text.batches(iter(sorted(wanted))):
        coefficients = {name: a_BTS.cpu() for name, a_BTS in read(input_BT.to(device)).items()}
        for row, window in enumerate(numbers):
            begin, end = text.bounds(window)
            for name, column, rank, a, place in wanted[window]:
                a_T = coefficients[name][row, :, column]
                positions = range(place.read_first, place.read_stop)
                shown = pieces(
                    place,
                    text.stream.read(place.read_first, place.read_stop).tolist(),
                    [float(a_T[p - begin]) if begin <= p < end else 0.0 for p in positions],
                    text.tokenizer.decode,
                    text.tokenizer.end_of_text_id,
                )
                snippet = Snippet(coefficient=a, place=place, pieces=shown)
                found.setdefault((name, column), {})[rank] = snippet
    return {key: [ranked[rank] for rank in sorted(ranked)] for key, ranked in found.items()}
