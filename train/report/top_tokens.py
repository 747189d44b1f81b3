"""The tokens that an expert gets most of, found in one pass with a memory that no data fills.

Shapes: B windows, T tokens of a window, G stretches of a window, S experts, K tokens that are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from polyad.model.mumoe.layer import DOMINANT
from polyad.train.errors import ConfigError
from polyad.train.experts.knockout import ExpertWithout
from polyad.train.experts.probing import RoutedLayer

STRETCH = 32
"""Tokens in a row of which only the highest counts, so that the contexts are different ones."""
LEAST_LOAD = 0.05
"""Times the mean load: experts with less are shown only if they are named."""
SHOWN = 6
"""Experts that are picked in a layer, unless they are named."""


Top = TypeVar("Top")


@dataclass(frozen=True, kw_only=True)
class ShownExpert(Generic[Top]):
    """One expert's coefficients over the tokens that were read."""

    name: str
    load: float
    """Its mean coefficient, divided by that of its level."""
    active: float
    """Share of the tokens with a coefficient above 0."""
    dominant: float
    """Share of the tokens with a coefficient of at least 0.5."""
    top: list[Top]
    """The tokens, or images, of which it gets most, the highest coefficient first."""
    without: ExpertWithout | None = None
    """The loss without it; None where that was not asked for."""


class Totals(NamedTuple):
    """Means of the experts' coefficients over all tokens of the pass."""

    tokens: int
    load_S: Tensor
    """Mean coefficient."""
    active_S: Tensor
    """Share of the tokens with a coefficient above 0."""
    dominant_S: Tensor
    """Share of the tokens with a coefficient of at least 0.5."""

    def times_mean(self, levels: tuple[int, ...]) -> Tensor:
        """The load of each expert, as a multiple of the mean of its level [S]: coefficients of a
        token sum to 1 only in some kinds of experts."""
        of_levels = torch.split(self.load_S, list(levels))
        tiny = torch.finfo(self.load_S.dtype).tiny
        return torch.cat([load / load.mean().clamp_min(tiny) for load in of_levels])

    def shown(self, layer: RoutedLayer, column: int, top: list[Top]) -> ShownExpert[Top]:
        """One expert, with the tokens of which it gets most.

        Args:
            layer: of the expert.
            column: the expert's.
            top: its tokens.
        """
        return ShownExpert(
            name=layer.expert_name(column),
            load=float(self.times_mean(layer.levels)[column]),
            active=float(self.active_S[column]),
            dominant=float(self.dominant_S[column]),
            top=top,
        )


class TopTokens:
    """The K highest coefficients of every expert of a layer, and where they were.

    Equal coefficients, as many a 1.0 of entmax, are told apart by a number that is drawn from the
    position: the first of the data would be shown otherwise. It is too small to change the order of
    different ones in fp32.

    Args:
        num_experts: S.
        top: K.
        device: where coefficients are.
        stretch: of so many tokens in a row only the highest counts.
    """

    def __init__(
        self,
        num_experts: int,
        top: int,
        device: torch.device | str = "cpu",
        stretch: int = STRETCH,
    ) -> None:
        self._top, self._stretch = top, stretch
        self._key_KS = torch.zeros(top, num_experts, dtype=torch.float64, device=device)
        self._position_KS = torch.full((top, num_experts), -1, device=device)
        self._sums_3S = torch.zeros(3, num_experts, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(1, dtype=torch.int64)

    def sums(self) -> dict[str, Tensor]:
        """What is added up; see `polyad.train.reading.Lasting`."""
        return {
            "keys": self._key_KS,
            "positions": self._position_KS,
            "sums": self._sums_3S,
            "tokens": self._tokens,
        }

    def add(self, a_BTS: Tensor, position_BT: Tensor) -> None:
        """Adds a batch.

        Args:
            a_BTS: coefficients, fp32.
            position_BT: of each token in the data; negative where it does not count.
        """
        valid_BT = position_BT >= 0
        a_BTS = a_BTS.where(valid_BT.unsqueeze(-1), 0.0)
        counts = [(a_BTS > 0).sum((0, 1)), (a_BTS >= DOMINANT).sum((0, 1))]
        self._sums_3S += torch.stack([a_BTS.sum((0, 1)), *counts]).double()
        self._tokens += valid_BT.sum().cpu()
        for first in range(0, a_BTS.shape[1], self._stretch):
            stretch = slice(first, first + self._stretch)
            highest_BS, where_BS = a_BTS[:, stretch].max(1)
            at_BS = position_BT[:, stretch].gather(1, where_BS)
            key_BS = highest_BS.double() * (1 + 1e-8 * _drawn(at_BS))
            keys = torch.cat([self._key_KS, key_BS])
            positions = torch.cat([self._position_KS, at_BS])
            key_KS, rows_KS = keys.topk(self._top, dim=0)
            self._key_KS.copy_(key_KS)
            self._position_KS.copy_(positions.gather(0, rows_KS))

    def highest(self, expert: int) -> list[tuple[float, int]]:
        """Coefficients above 0 and positions of one expert, the highest first."""
        keys, positions = self._key_KS[:, expert].float(), self._position_KS[:, expert]
        pairs = zip(keys.tolist(), positions.tolist(), strict=True)
        return [(key, position) for key, position in pairs if key > 0]

    def totals(self) -> Totals:
        """Means over all tokens so far."""
        tokens = int(self._tokens)
        means_3S = self._sums_3S.cpu() / max(1, tokens)
        return Totals(tokens, *means_3S)


def _drawn(position: Tensor) -> Tensor:
    """A number from 0 to 1 that looks random: Knuth's multiplicative hash."""
    return (position * 2654435761 % 2**32).double() / 2**32


def shown_experts(
    layer: RoutedLayer, totals: Totals, experts: Sequence[str], place: str = ""
) -> list[int]:
    """The columns of the experts that a page shows.

    Raises:
        ConfigError: coefficients are not finite.
    """
    if not totals.load_S.isfinite().all():
        raise ConfigError(
            f"{place}the coefficients of {layer.name} are not finite: its weights hold NaN or "
            f"inf, or are too large"
        )
    names = {layer.expert_name(column): column for column in range(layer.num_experts)}
    chosen = [names[expert] for expert in experts]
    return chosen or choose_experts(totals, layer.levels, SHOWN)


def choose_experts(totals: Totals, levels: tuple[int, ...], count: int) -> list[int]:
    """Picks experts to show, of every level the same way.

    Half of them are those that most often have at least half of a token (load at a >= 0.5); the
    others stand at equal distances in the order of load, from the busiest down to the last that has
    a twentieth of the mean load. Less is mostly rounding, and tells nothing of an expert.

    Args:
        totals: of a layer.
        levels: experts of each level.
        count: how many, over all levels.

    Returns:
        Their columns, in order.
    """
    chosen: list[int] = []
    first, each = 0, max(1, count // len(levels))
    times_S = totals.times_mean(levels)
    for size in levels:
        used = [s for s in range(first, first + size) if times_S[s] >= LEAST_LOAD]
        often = sorted(used, key=lambda s: (-float(totals.dominant_S[s]), s))
        picked = [s for s in often[: each // 2] if totals.dominant_S[s] > 0]
        rest = [s for s in used if s not in picked]
        rest.sort(key=lambda s: (-float(totals.load_S[s]), s))
        wanted = min(each - len(picked), len(rest))
        spread = [round(i * (len(rest) - 1) / max(1, wanted - 1)) for i in range(wanted)]
        chosen += picked + [rest[place] for place in spread]
        first += size
    return sorted(chosen)
