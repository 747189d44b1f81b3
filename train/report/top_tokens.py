"""Tokens with an expert's highest coefficients, found in one pass with bounded memory.

Shapes: B windows, T tokens of a window, G stretches of a window, S experts, K tokens kept.
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
"""Only the highest of this many consecutive tokens counts, so that contexts are distinct."""
LEAST_LOAD = 0.05
"""Share of the mean load below which experts are shown only if named."""
SHOWN = 6
"""Number of experts picked in a layer, unless they are named."""


Top = TypeVar("Top")


@dataclass(frozen=True, kw_only=True)
class ShownExpert(Generic[Top]):
    """One expert's coefficients over the tokens read."""

    name: str
    load: float
    """Its mean coefficient divided by its level's mean."""
    active: float
    """Share of the tokens with a coefficient above 0."""
    dominant: float
    """Share of the tokens with a coefficient of at least 0.5."""
    top: list[Top]
    """Its top tokens or images, the highest coefficient first."""
    without: ExpertWithout | None = None
    """The loss without it; None if not requested."""


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
        """The load of each expert, as a multiple of its level's mean [S], since a token's
        coefficients do not sum to 1 in all kinds of experts."""
        of_levels = torch.split(self.load_S, list(levels))
        tiny = torch.finfo(self.load_S.dtype).tiny
        return torch.cat([load / load.mean().clamp_min(tiny) for load in of_levels])

    def shown(self, layer: RoutedLayer, column: int, top: list[Top]) -> ShownExpert[Top]:
        """Returns one expert with its top tokens.

        Args:
            layer: the expert's layer.
            column: the expert's column.
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
    """The K highest coefficients of every expert of a layer, and their positions.

    Ties, such as many coefficients of 1.0 with entmax, are broken by a hash of the position, since
    otherwise the first in the data would be shown. It is too small to reorder different values in
    fp32.

    Args:
        num_experts: S.
        top: K.
        device: the coefficients' device.
        stretch: only the highest of this many consecutive tokens counts.
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
        """The accumulators; see `polyad.train.reading.Lasting`."""
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
            position_BT: each token's position in the data; negative: not counted.
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
    """A pseudorandom number from 0 to 1: Knuth's multiplicative hash."""
    return (position * 2654435761 % 2**32).double() / 2**32


def shown_experts(
    layer: RoutedLayer, totals: Totals, experts: Sequence[str], place: str = ""
) -> list[int]:
    """Returns the columns of the experts to show.

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
    """Picks experts to show, in the same way for every level.

    Half of them are those that most often have at least half of a token (load at a >= 0.5); the
    others are evenly spaced in the order of load, from the busiest to the last with at least a
    twentieth of the mean load, since less is mostly rounding.

    Args:
        totals: totals of a layer.
        levels: number of experts per level.
        count: number of experts to pick, over all levels.

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
