"""Interventions: changes to some experts of a layer, as the user specifies them.

They are parsed, checked against a model, and applied together at every token; the possible actions
are in `actions.py`.

Shapes: S experts of a layer, of all levels side by side, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor, nn

from polyad.model.config import Config
from polyad.parallel.weights import device_of
from polyad.train.config.faults import describe
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import (
    CONTRIBUTION,
    RANKING,
    Action,
    How,
    check_action,
    experts_of_a_token,
    intervening,
)
from polyad.train.experts.probing import RoutedLayer, routed_layers


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A change to some experts of one layer at every token, as specified by the user."""

    layer: int
    """The number of the block."""
    experts: tuple[int, ...]
    """Expert numbers, counted over all levels."""
    action: Action = CONTRIBUTION

    def __str__(self) -> str:
        parts = [f"layer={self.layer}", f"expert={'+'.join(map(str, self.experts))}"]
        parts.append(f"how={self.action.how}")
        if self.action.to is not None:
            parts.append(f"to={self.action.to}")
        if self.action.value is not None:
            parts.append(f"value={self.action.value:g}")
        return ",".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        options = {"how": self.action.how, "to": self.action.to, "value": self.action.value}
        options = {key: value for key, value in options.items() if value is not None}
        return {"layer": self.layer, "experts": list(self.experts)} | options


class _Keys(Config):
    """The keys of `--intervene`."""

    layer: NonNegativeInt
    expert: list[NonNegativeInt]
    how: How = "contribution"
    to: NonNegativeInt | None = None
    value: FiniteFloat | None = None


FORM = "layer=L,expert=E+F,how=HOW[,to=E][,value=X]"
"""The syntax of an intervention."""
HOWS_OF = {"to": ("swap",), "value": ("scale", "clamp", "steer")}
"""Actions that need a key, which means nothing to others."""


def parse_intervention(text: str) -> Intervention:
    """Reads `layer=3,expert=2+5,how=route-around`.

    Raises:
        ConfigError: the syntax is wrong.
    """
    where, pairs = f"--intervene {text}", [part.partition("=") for part in text.split(",")]
    tree: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    if len(tree) < len(pairs) or not all(equals for _, equals, _ in pairs):
        raise ConfigError(f"{where}: is not allowed; the form is {FORM}, each key once")
    if "expert" in tree:
        tree["expert"] = tree["expert"].split("+")
    try:
        keys = _Keys.model_validate(tree, strict=False)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error, _Keys)}; the form is {FORM}") from None
    for key, hows in HOWS_OF.items():
        if (key in tree) != (keys.how in hows):
            needed = "is missing" if keys.how in hows else f"means nothing with how={keys.how}"
            raise ConfigError(f"{where}: {key} {needed}")
    action = Action(how=keys.how, to=keys.to, value=keys.value)
    return Intervention(layer=keys.layer, experts=tuple(keys.expert), action=action)


def check_interventions(model: nn.Module, interventions: Sequence[Intervention]) -> None:
    """Checks that a model has the layers and experts, and that enough of them are left.

    Raises:
        ConfigError: it does not, or an action is not possible there.
    """
    by_block = layers_by_block(model)
    changed: dict[tuple[int, How], set[int]] = {}
    for each in interventions:
        where = f"--intervene {each}"
        if each.layer not in by_block:
            names = ", ".join(map(str, by_block)) or "none"
            raise ConfigError(
                f"{where}: layer: {each.layer} is not allowed: blocks with experts are {names}"
            )
        layer = by_block[each.layer]
        check_action(layer, each.action, where)
        if (expert := max(each.experts)) >= layer.num_experts:
            raise ConfigError(
                f"{where}: expert: {expert} is not allowed: {layer.title} has experts 0 to "
                f"{layer.num_experts - 1}"
            )
        if each.action.to is not None:
            _check_swap(layer, each)
        changed.setdefault((each.layer, each.action.how), set()).update(each.experts)
    for (block, how), experts in changed.items():
        layer, wrong = by_block[block], ""
        left, count = layer.num_experts - len(experts), len(experts)
        if how == "prune" and left < (used := experts_of_a_token(model, layer)):
            wrong = f"{layer.title} would have {left} experts left, but a token uses {used}"
        elif how == "force" and count > (used := experts_of_a_token(model, layer)):
            wrong = f"{count} experts of {layer.title} are forced, but a token uses only {used}"
        elif how == "force" and (both := experts & changed.get((block, "avoid"), set())):
            wrong = f"expert {min(both)} of {layer.title} cannot be both forced and avoided"
        if wrong:
            raise ConfigError(f"--intervene: {wrong}")


def paired(interventions: Sequence[Intervention]) -> list[Intervention]:
    """Merges interventions so that all forced and avoided experts of a layer are ranked at once.

    First and last refer to the router's own order, which a first change would alter for a second.
    """
    merged, done = [], set()
    for each in interventions:
        if each.action.how not in RANKING:
            merged.append(each)
        elif each.layer not in done:
            done.add(each.layer)
            first, last = (
                tuple(
                    expert
                    for one in interventions
                    if one.layer == each.layer and one.action.how == how
                    for expert in one.experts
                )
                for how in RANKING
            )
            action = Action(how="force", avoided=last) if first else Action(how="avoid")
            merged.append(Intervention(layer=each.layer, experts=first or last, action=action))
    return merged


def _check_swap(layer: RoutedLayer, intervention: Intervention) -> None:
    experts = *intervention.experts, intervention.action.to or 0
    levels = {layer.place(each)[0] for each in experts}
    if intervention.action.to in intervention.experts or len(levels) > 1:
        raise ConfigError(
            f"--intervene {intervention}: to: {intervention.action.to} is not allowed: another "
            f"expert of the same level is needed"
        )


def layers_by_block(model: nn.Module) -> dict[int, RoutedLayer]:
    """The layer with experts of each block that has one."""
    return {layer.block: layer for layer in routed_layers(model) if layer.in_block}


@contextmanager
def intervened(
    model: nn.Module,
    interventions: Sequence[Intervention],
    means: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Iterator[None]:
    """A context in which all interventions act at once, at every token.

    Args:
        model: in evaluation mode, whole on this process.
        interventions: in order of application.
        means: returns the mean outputs [S, D] of the experts of each layer, by layer name, for
            `mean`; called at most once, before anything is changed.

    Raises:
        ConfigError: the model does not have these layers or experts.
    """
    check_interventions(model, interventions)
    by_block = layers_by_block(model)
    to_mean = [each for each in interventions if each.action.how == "mean"]
    if to_mean and means is None:
        raise ConfigError(
            f"--intervene {to_mean[0]}: mean outputs are not known without held-out data"
        )
    mean_of = means() if to_mean and means is not None else {}
    with ExitStack() as stack:
        for each in paired(interventions):
            layer, action = by_block[each.layer], each.action
            if action.how == "mean":
                action = Action(how="mean", mean_SD=mean_of[layer.name])
            intervene = stack.enter_context(intervening(model, layer, action))
            device = device_of(model)
            chosen_1S = torch.zeros(1, layer.num_experts, dtype=torch.bool, device=device)
            chosen_1S[0, list(each.experts)] = True
            intervene(chosen_1S, None)
        yield
