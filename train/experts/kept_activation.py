"""The share of a dense feed-forward's activation that is in the groups of units a token uses.

    kept = sum_n sum_(e in TopK_n) |a_n|_e / sum_n sum_e |a_n|_e

with |a_n|_e the sum of |activation| over the units of group e for token n. Random groups keep K /
E. The best groups of each token, those with the largest |a_n|_e, are an upper bound for any gate.
Source: Qiu et al. 2023, "Emergent mixture-of-experts".

Shapes: N tokens of a forward pass, E groups, K groups of a token, F units of a group.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from polyad.model.emoe.experts import UnitGroups
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.selection import Selected


class Kept(NamedTuple):
    """Shares of the activation of all units, over the tokens read."""

    share: float
    """The share kept by the groups that tokens use."""
    best: float
    """The share kept by equally many groups with the largest activation for each token."""
    chance: float
    """The share kept by equally many random groups: K / E."""


class KeptSums:
    """Sums over tokens."""

    def __init__(self) -> None:
        self._all, self._used, self._best, self._chance = 0.0, 0.0, 0.0, 0.0

    def add(self, experts: UnitGroups, tokens_ND: Tensor, expert_ids_NK: Tensor) -> None:
        """Counts tokens.

        Args:
            experts: the groups.
            tokens_ND: their inputs.
            expert_ids_NK: the groups that each token uses.
        """
        groups = len(experts.keys)
        inner_NEF = experts.units(tokens_ND.to(experts.keys.dtype))
        sums_NE = inner_NEF.double().abs().sum(-1)
        top_k = expert_ids_NK.shape[1]
        self._all += float(sums_NE.sum())
        self._used += float(sums_NE.gather(1, expert_ids_NK).sum())
        self._best += float(sums_NE.topk(top_k, dim=1).values.sum())
        self._chance = top_k / groups

    def result(self) -> Kept | None:
        """The shares; None if nothing was read, or all activations are 0."""
        if not self._all:
            return None
        return Kept(self._used / self._all, self._best / self._all, self._chance)


@contextmanager
def kept_activation(model: nn.Module) -> Iterator[Mapping[str, KeptSums]]:
    """Measures forward passes of a model on one device, without padding tokens.

    Args:
        model: any model.

    Yields:
        The sums of each feed-forward whose units are in groups, by the module's name.
    """
    found: dict[str, KeptSums] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            experts = getattr(module, "experts", None)
            dispatcher = getattr(module, "dispatcher", None)
            if isinstance(experts, UnitGroups) and isinstance(dispatcher, Dispatcher):
                sums = found[name] = KeptSums()
                handle = dispatcher.register_forward_pre_hook(_counting(sums))
                hooks.callback(handle.remove)
        yield found


def _counting(sums: KeptSums) -> Any:
    def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        tokens_ND, selected, experts = arguments[:3]
        assert isinstance(selected, Selected)
        sums.add(experts, tokens_ND.detach(), selected.expert_ids_NK)

    return count
