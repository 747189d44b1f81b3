"""Actions on experts, and hooks that apply them to a model.

    zero           their outputs are 0, and the others keep their weights
    renormalize    the same, but the others take over their weights: the sum is unchanged
    swap           another expert takes their place, with their weights
    mean           their outputs are replaced by their mean output
    prune          removed: their rows of the router are deleted, and the next best replace them
    scale          their weights are multiplied by a number
    clamp          their weights are set to a number, at tokens that use them
    force          the router ranks them first (SteerMoE, 2509.09660)
    avoid          the router ranks them last
    steer          X times their columns of the gate are added to what enters the block

Steering is as in Oldfield et al. 2024, appendix G.2. A gate that reads the residual stream gives an
expert with column g X times |g|^2 more score, and every other one X times (its column . g) more,
before normalization, apart from effects through the block's attention. A negative X steers away.

They use hooks on the block, the router and the dispatcher: inside the context any measure can be
taken of the changed model, and outside it nothing remains of the change. Each row of a batch may be
changed differently, which a search over experts needs.

Shapes: B rows of a forward pass, T tokens of a row, M tokens in total, S experts of a layer (all
levels side by side), K experts of a token, D width.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyad.model.mumoe.gating import Gate, GateOutput
from polyad.model.mxd import SparseGate
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.smoe.router import Router, Selected
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer, uncompiled

How = Literal[
    "zero", "renormalize", "swap", "mean", "prune", "scale", "clamp", "force", "avoid",
    "steer",
]  # fmt: skip
RANKING: tuple[How, ...] = ("force", "avoid")
"""Actions that change the order in which a router ranks experts."""
MARGIN = 0.01
"""Distance in log probability by which they come before the first, or after the last."""

KEYS: dict[How, str] = {"swap": "to", "scale": "value", "clamp": "value", "steer": "value"}
"""The key of an intervention that an action needs, and that means nothing to others."""
SELECTING: frozenset[How] = frozenset({"mean", "prune", *RANKING})
"""Actions that exist only for layers that select whole experts."""
RESCORING: frozenset[How] = frozenset({"prune", "steer", *RANKING})
"""Actions that change the experts' scores, and so the experts or weights of any token, even one
that does not use the changed experts."""
Intervene = Callable[[Tensor | None, Tensor | None], None]
"""Sets which experts are changed in the next forward passes, bool [B, S] or [1, S] for every row,
and at which tokens, bool [B, T] or None for all; None in place of experts: no change."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action on experts."""

    how: How = "zero"
    to: int | None = None
    """For `swap`, the expert that replaces them."""
    value: float | None = None
    """For `scale` and `steer` the factor, for `clamp` the weight."""
    mean_SD: Tensor | None = None
    """For `mean`, the mean output of each expert."""
    avoided: tuple[int, ...] = ()
    """For `force`, experts that are ranked last where others are ranked first."""


CONTRIBUTION = Action()


@contextmanager
def intervening(
    model: nn.Module, layer: RoutedLayer, action: Action = CONTRIBUTION
) -> Iterator[Intervene]:
    """Yields a function that sets which experts are changed in the next forward passes.

    Inside the context compiled blocks run uncompiled, since compiled code ignores later hooks.

    Args:
        model: in evaluation mode, whole on this process, without padding.
        layer: a layer of the model, in a block or its head.
        action: the action.

    Raises:
        ConfigError: the action is not possible in this layer.
    """
    check_action(layer, action, layer.name)
    chosen, how = _Chosen(action), action.how
    parent: Any = model.get_submodule(layer.name)
    with ExitStack() as hooks:

        def after(module: nn.Module, hook: Callable[..., Any]) -> None:
            hooks.enter_context(module.register_forward_hook(chosen.active(hook)))

        def before(module: nn.Module, hook: Callable[..., Any]) -> None:
            hooks.enter_context(module.register_forward_pre_hook(chosen.active(hook)))

        if how == "steer":
            # A model of transformers has blocks of its own.
            in_block = model.get_submodule(layer.name.rpartition(".")[0])
            block = getattr(parent, "their_block", in_block)
            before(block, functools.partial(chosen.steered, parent))
        for part in parent.children() if how != "steer" else ():
            if isinstance(part, Gate):
                after(part, chosen.shares)
            elif isinstance(part, SparseGate):
                after(part, chosen.selected)
            elif isinstance(part, Router):
                if how in RANKING:
                    _check_ranking(part, layer, action)
                    after(part.score, chosen.moved)
                elif how == "prune":
                    after(part.score, chosen.logits)
                    before(part.selection, chosen.ranked)
                else:
                    after(part.selection, chosen.selected)
        if how == "mean":
            after(parent.dispatcher, chosen.replaced)
        hooks.enter_context(uncompiled(model))
        yield chosen.choose


class _Chosen:
    """The experts that are changed, and hooks that change them."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self._chosen_BS: Tensor | None = None
        self._at_BT: Tensor | None = None
        self._lost_MS: Tensor | None = None

    def active(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that does nothing while no expert is changed."""
        return lambda *arguments: None if self._chosen_BS is None else hook(*arguments)

    def choose(self, chosen_BS: Tensor | None, at_BT: Tensor | None = None) -> None:
        """Sets which experts are changed, and where; see `Intervene`."""
        self._chosen_BS, self._at_BT = chosen_BS, at_BT

    def _of_tokens(self, tokens: int) -> Tensor:
        """Which experts are changed at each token [M, S]; tokens of a row are consecutive."""
        assert self._chosen_BS is not None
        if self._at_BT is None:
            return self._chosen_BS.repeat_interleave(tokens // len(self._chosen_BS), 0)
        chosen_BTS = self._chosen_BS.unsqueeze(1) & self._at_BT.unsqueeze(-1)
        chosen_BTS = chosen_BTS.expand(tokens // self._at_BT.shape[1], -1, -1)
        return chosen_BTS.flatten(0, 1)

    def steered(self, feed_forward: Any, module: nn.Module, arguments: Any) -> Any:
        """Adds columns of a feed-forward's gate to the input of its block."""
        x_BTD, *others = arguments
        assert self._action.value is not None
        columns_SD = torch.cat(feed_forward.gate_columns()).detach()
        columns_SD = columns_SD.to(torch.promote_types(columns_SD.dtype, torch.float32))
        chosen_MS = self._of_tokens(x_BTD.shape[0] * x_BTD.shape[1]).to(columns_SD.dtype)
        shift_BTD = (self._action.value * (chosen_MS @ columns_SD)).view(x_BTD.shape)
        return x_BTD + shift_BTD.to(x_BTD.dtype), *others

    def selected(self, module: nn.Module, arguments: Any, output: Selected) -> Selected:
        """Changes the weights of selected experts, or the selection."""
        weights_MK, ids_MK = output.weights_NK, output.expert_ids_NK
        hit_MK = self._of_tokens(len(ids_MK)).gather(1, ids_MK)
        if self._action.how == "swap":
            assert self._action.to is not None
            ids_MK, weights_MK = _swapped(ids_MK, weights_MK, hit_MK, self._action.to)
            return Selected.of(weights_MK, ids_MK, len(output.counts_E))
        if self._action.how == "mean":
            lost_MK = weights_MK * hit_MK
            lost_MS = lost_MK.new_zeros(len(ids_MK), len(output.counts_E))
            self._lost_MS = lost_MS.scatter_add(1, ids_MK, lost_MK)
        return output._replace(weights_NK=weighed(weights_MK, hit_MK, self._action))

    def replaced(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Adds mean outputs with the weights of the experts that they replace."""
        assert self._lost_MS is not None
        assert self._action.mean_SD is not None
        y_MD, plan = output
        mean_SD = self._action.mean_SD.to(y_MD)
        return y_MD + self._lost_MS.to(y_MD.dtype) @ mean_SD, plan

    def logits(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Deletes rows of the router, so that they have no score and graphs do not mix it."""
        return output.masked_fill(self._of_tokens(len(output)), -math.inf)

    def moved(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Ranks experts first or last."""
        first_MS = self._of_tokens(len(output))
        if self._action.how == "avoid":
            return moved_logits(output, torch.zeros_like(first_MS), first_MS)
        last_MS = torch.zeros_like(first_MS)
        last_MS[:, list(self._action.avoided)] = True
        return moved_logits(output, first_MS, last_MS & first_MS.any(-1, keepdim=True))

    def ranked(self, module: nn.Module, arguments: Any) -> Any:
        """Ranks deleted experts behind all others, even where scores are 0 or the lowest are
        taken."""
        scores_ME, *others = arguments
        chosen_ME = self._of_tokens(len(scores_ME))
        last = math.inf if getattr(module, "lowest", False) else -math.inf
        logits = [None if one is None else one.masked_fill(chosen_ME, last) for one in others]
        return scores_ME.masked_fill(chosen_ME, -math.inf), *logits

    def shares(self, module: nn.Module, arguments: Any, output: GateOutput) -> GateOutput:
        """Changes coefficients, level by level."""
        chosen_MS = self._of_tokens(len(output.coefficients[0]))
        sizes, first, levels = [a_MN.shape[-1] for a_MN in output.coefficients], 0, []
        hits = chosen_MS.split_with_sizes(sizes, dim=-1)
        for a_MN, hit_MN in zip(output.coefficients, hits, strict=True):
            to = (self._action.to or 0) - first
            if self._action.how == "swap" and 0 <= to < a_MN.shape[-1]:
                moved_M = (a_MN * hit_MN).sum(-1)
                a_MN = a_MN.masked_fill(hit_MN, 0)
                a_MN = a_MN.index_add(1, torch.tensor([to], device=a_MN.device), moved_M[:, None])
            elif self._action.how != "swap":
                a_MN = weighed(a_MN, hit_MN, self._action)
            levels.append(a_MN)
            first += a_MN.shape[-1]
        return output._replace(coefficients=levels)


def moved_logits(logits_MS: Tensor, first_MS: Tensor, last_MS: Tensor) -> Tensor:
    """Logits in which some experts come first, and others last (2509.09660).

    Args:
        logits_MS: logits of a router whose scores are their softmax.
        first_MS: experts that come first, with equal probability.
        last_MS: experts that come last.
    """
    log_p_MS = logits_MS.log_softmax(-1)
    high_M1, low_M1 = log_p_MS.amax(-1, keepdim=True), log_p_MS.amin(-1, keepdim=True)
    moved_MS = torch.where(first_MS, high_M1 + MARGIN, log_p_MS)
    return torch.where(last_MS, low_M1 - MARGIN, moved_MS)


def _check_ranking(router: Router, layer: RoutedLayer, action: Action) -> None:
    if router.by_sigmoid or getattr(router.selection, "lowest", False):
        raise ConfigError(
            f"how: {action.how} is not allowed: {layer.title} does not select the highest softmax "
            "probabilities"
        )


def _swapped(ids_MK: Tensor, weights_MK: Tensor, hit_MK: Tensor, to: int) -> tuple[Tensor, Tensor]:
    """Replaces experts by another one; where a token uses that already, their weights are added to
    its own, since no expert may occur twice in a row."""
    there_MK = ids_MK == to
    first_MK = hit_MK & (hit_MK.cumsum(1) == 1)
    place_MK = torch.where(there_MK.any(1, keepdim=True), there_MK, first_MK)
    moved_M1 = (weights_MK * hit_MK).sum(1, keepdim=True)
    weights_MK = weights_MK.masked_fill(hit_MK, 0) + place_MK * moved_M1
    return ids_MK.masked_fill(place_MK, to), weights_MK


def weighed(weights_MK: Tensor, hit_MK: Tensor, action: Action) -> Tensor:
    """Returns the weights after a change that keeps the selection.

    Args:
        weights_MK: weights of each token's experts, or shares of all.
        hit_MK: which of them are changed.
        action: any action that does not change the router, except `swap`.
    """
    if action.how == "clamp":
        assert action.value is not None
        # A share of 0 means that the token does not use the expert.
        return weights_MK.masked_fill(hit_MK & (weights_MK != 0), action.value)
    if action.how == "scale":
        assert action.value is not None
        return torch.where(hit_MK, weights_MK * action.value, weights_MK)
    left_MK = weights_MK.masked_fill(hit_MK, 0)
    if action.how != "renormalize":
        return left_MK
    before_M1, after_M1 = weights_MK.sum(-1, keepdim=True), left_MK.sum(-1, keepdim=True)
    return left_MK * torch.where(after_M1 != 0, before_M1 / after_M1, 0)


def check_action(layer: RoutedLayer, action: Action, place: str) -> None:
    """Checks that an action is possible in a layer.

    Args:
        layer: any layer.
        action: the action on its experts.
        place: prefix of the error.

    Raises:
        ConfigError: it is not.
    """
    to_block = layer.name.endswith(".feed_forward")
    if (layer.shares and action.how in SELECTING) or (action.how == "steer" and not to_block):
        raise ConfigError(
            f"{place}: how: {action.how} is not allowed with {layer.title}, "
            f"{'in which every token uses all experts' if layer.shares else layer.name}"
        )


def experts_of_a_token(model: nn.Module, layer: RoutedLayer) -> int:
    """The number of experts per token, K, of a layer that selects them."""
    parent = model.get_submodule(layer.name)
    assert isinstance(parent, SelectingMoE)
    return parent.router.selection.top_k
