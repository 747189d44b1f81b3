"""Tokens with an expert's highest weights, found in one pass with bounded memory.

Shapes: B windows, T tokens of a window, G stretches of a window, S experts, K tokens kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer

STRETCH = 32
"""Only the highest of this many consecutive tokens counts, so that contexts are distinct."""
LEAST_LOAD = 0.05
"""Share of the mean load below which experts are shown only if named."""
SHOWN = 8
"""Number of experts picked in a layer, unless they are named."""


@dataclass(frozen=True, kw_only=True)
class ShownExpert:
    """One expert and what it weights most."""

    name: str
    """The name that `RoutedLayer.expert_name` gives it."""
    share: float
    """Its share of the assignments, or of the coefficients, of its level."""
    top: list[Any]
    """Its `Context`s or `TopImage`s, the highest weight first."""


class TopTokens:
    """The K highest weights of every expert of a layer, and their positions.

    Ties, such as many coefficients of 1.0 with entmax, are broken by a hash of the position, since
    otherwise the first in the data would be shown. It is too small to reorder different values in
    fp32.

    Args:
        layer: the layer.
        top: K.
        device: the weights' device.
        stretch: only the highest of this many consecutive tokens counts.
    """

    def __init__(
        self,
        layer: RoutedLayer,
        top: int,
        device: torch.device | str = "cpu",
        stretch: int = STRETCH,
    ) -> None:
        self.layer, self._top, self._stretch = layer, top, stretch
        experts = layer.num_experts
        self._key_KS = torch.zeros(top, experts, dtype=torch.float64, device=device)
        self._position_KS = torch.full((top, experts), -1, device=device)
        self._given_S = torch.zeros(experts, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(1, dtype=torch.int64)

    def add(self, a_BTS: Tensor, position_BT: Tensor) -> None:
        """Adds a batch.

        Args:
            a_BTS: weights, fp32.
            position_BT: each token's position in the data; negative: not counted.
        """
        valid_BT = position_BT >= 0
        a_BTS = a_BTS.where(valid_BT.unsqueeze(-1), 0.0)
        # A coefficient counts as it is, an assignment of a sparse expert as 1.
        given_BTS = a_BTS if self.layer.shares else (a_BTS != 0) + 0 * a_BTS  # NaN stays
        self._given_S += given_BTS.sum((0, 1)).double()
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
        """Weights above 0 and positions of one expert, the highest first."""
        keys, positions = self._key_KS[:, expert].float(), self._position_KS[:, expert]
        pairs = zip(keys.tolist(), positions.tolist(), strict=True)
        return [(key, position) for key, position in pairs if key > 0]

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return int(self._tokens)

    def shares(self) -> list[Tensor]:
        """Each expert's share of all that its level gives so far, by level."""
        of_levels = torch.split(self._given_S.cpu(), list(self.layer.levels))
        return [sums / sums.sum().clamp_min(1e-300) for sums in of_levels]

    def columns(self, experts: Sequence[str]) -> list[int]:
        """Returns the columns of the experts to show.

        Args:
            experts: their names; empty: `SHOWN` are picked; see `choose_experts`.

        Raises:
            ConfigError: weights are not finite.
        """
        if not self._given_S.isfinite().all():
            raise ConfigError(
                f"the coefficients of {self.layer.name} are not finite: the weights hold NaN or "
                "inf, or are too large"
            )
        names = {self.layer.expert_name(column): column for column in range(self.layer.num_experts)}
        return [names[expert] for expert in experts] or choose_experts(self.shares(), SHOWN)

    def shown(self, column: int, top: list[Any]) -> ShownExpert:
        """Returns one expert.

        Args:
            column: its column.
            top: what it weights most.
        """
        share = float(torch.cat(self.shares())[column])
        return ShownExpert(name=self.layer.expert_name(column), share=share, top=top)


def _drawn(position: Tensor) -> Tensor:
    """A pseudorandom number from 0 to 1: Knuth's multiplicative hash."""
    return (position * 2654435761 % 2**32).double() / 2**32


def choose_experts(shares: Sequence[Tensor], count: int) -> list[int]:
    """Picks experts to show: in every level evenly spaced in the order of their shares, from the
    busiest to the last with at least a twentieth of the mean, since less is mostly rounding.

    Args:
        shares: the shares of each level's experts.
        count: number of experts to pick, over all levels.

    Returns:
        Their columns, in order.
    """
    chosen: list[int] = []
    first, each = 0, max(1, count // len(shares))
    for share_N in shares:
        used = [s for s in range(len(share_N)) if share_N[s] * len(share_N) >= LEAST_LOAD]
        used.sort(key=lambda s: (-float(share_N[s]), s))
        wanted = min(each, len(used))
        places = [round(i * (len(used) - 1) / max(1, wanted - 1)) for i in range(wanted)]
        chosen += [first + used[place] for place in places]
        first += len(share_N)
    return sorted(chosen)
