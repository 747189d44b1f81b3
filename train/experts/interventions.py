"""Interventions: changes to some experts of a layer, as the user specifies them.

They are parsed, checked against a model, and applied together at every token; the possible actions
are in `actions.py`.

Shapes: S experts of a layer, of all levels side by side, D width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from pydantic import FiniteFloat, NonNegativeInt, ValidationError
from torch import Tensor, nn

from polyad.model.config import Config
from polyad.parallel.weights import device_of
from polyad.train.config.text import describe
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import (
    KEYS,
    RANKING,
    Action,
    How,
    check_action,
    experts_of_a_token,
    intervening,
)
from polyad.train.experts.probing import RoutedLayer, routed_layers


class Intervention(Config):
    """A change to some experts of one layer at every token, as specified by the user."""

    layer: NonNegativeInt
    """The number of the block."""
    experts: tuple[NonNegativeInt, ...]
    """Expert numbers, counted over all levels."""
    how: How = "zero"
    to: NonNegativeInt | None = None
    value: FiniteFloat | None = None

    @property
    def action(self) -> Action:
        """The action on them."""
        return Action(how=self.how, to=self.to, value=self.value)

    def __str__(self) -> str:
        value = None if self.value is None else f"{self.value:g}"
        named = {"layer": self.layer, "expert": "+".join(map(str, self.experts)), "how": self.how}
        named |= {"to": self.to, "value": value}
        return ",".join(f"{key}={each}" for key, each in named.items() if each is not None)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return self.model_dump(mode="json", exclude_none=True)


FORM = "layer=L,expert=E+F,how=HOW[,to=E][,value=X]"
"""The syntax of an intervention."""


def parse_intervention(text: str) -> Intervention:
    """Reads `layer=3,expert=2+5,how=renormalize`.

    Raises:
        ConfigError: the syntax is wrong.
    """
    where, pairs = f"--intervene {text}", [part.partition("=") for part in text.split(",")]
    tree: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    if len(tree) < len(pairs) or not all(equals for _, equals, _ in pairs):
        raise ConfigError(f"{where}: is not allowed; the form is {FORM}, each key once")
    if "expert" in tree:
        tree["experts"] = tree.pop("expert").split("+")
    try:
        parsed = Intervention.model_validate(tree, strict=False)
    except ValidationError as error:
        wrong = describe(error, Intervention).replace("experts", "expert")  # as it is typed
        raise ConfigError(f"{where}: {wrong}; the form is {FORM}") from None
    for key in ("to", "value"):
        if (key in tree) != (key == KEYS.get(parsed.how)):
            wrong = f"means nothing with how={parsed.how}" if key in tree else "is missing"
            raise ConfigError(f"{where}: {key} {wrong}")
    return parsed


def _check(
    model: nn.Module,
    by_block: Mapping[int, RoutedLayer],
    interventions: Sequence[Intervention],
) -> None:
    """Checks that a model has the layers and experts, and that enough of them are left."""
    pruned = dict[int, set[int]]()
    for each in interventions:
        where = f"--intervene {each}"
        if each.layer not in by_block:
            names = ", ".join(map(str, by_block)) or "none"
            raise ConfigError(
                f"{where}: layer: {each.layer} is not allowed: blocks with experts are {names}"
            )
        layer = by_block[each.layer]
        check_action(layer, each.action, where)
        for key, experts in (("expert", each.experts), ("to", (each.to or 0,))):
            if max(experts) >= layer.num_experts:
                raise ConfigError(
                    f"{where}: {key}: {max(experts)} is not allowed: {layer.title} has experts 0 "
                    f"to {layer.num_experts - 1}"
                )
        if each.to is not None and (
            each.to in each.experts
            or len({layer.place(expert)[0] for expert in (*each.experts, each.to)}) > 1
        ):
            raise ConfigError(
                f"{where}: to: {each.to} is not allowed: another expert of the same level is needed"
            )
        if each.how == "prune":
            pruned.setdefault(each.layer, set()).update(each.experts)
            left = layer.num_experts - len(pruned[each.layer])
            if left < (used := experts_of_a_token(model, layer)):
                raise ConfigError(
                    f"{where}: {layer.title} would have {left} experts left, but a token uses "
                    f"{used}"
                )


def _actions(
    interventions: Sequence[Intervention],
) -> Iterator[tuple[int, Sequence[int], Action]]:
    """Yields blocks, experts and actions; all forced and avoided experts of a layer are one action.

    First and last refer to the router's own order, which a first change would alter for a second.
    """
    ranked: dict[int, dict[How, list[int]]] = {}
    for each in interventions:
        if each.how in RANKING:
            experts = ranked.setdefault(each.layer, {how: [] for how in RANKING})
            experts[each.how] += each.experts
        else:
            yield each.layer, each.experts, each.action
    for block, experts in ranked.items():
        first, last = experts["force"], experts["avoid"]
        action = Action(how="force", avoided=tuple(last)) if first else Action(how="avoid")
        yield block, first or last, action


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
    by_block = layers_by_block(model)
    _check(model, by_block, interventions)
    to_mean = [each for each in interventions if each.how == "mean"]
    if to_mean and means is None:
        raise ConfigError(
            f"--intervene {to_mean[0]}: mean outputs are not known without held-out data"
        )
    mean_of = means() if to_mean and means is not None else {}
    with ExitStack() as stack:
        for block, experts, action in _actions(interventions):
            layer = by_block[block]
            if action.how == "mean":
                action = Action(how="mean", mean_SD=mean_of[layer.name])
            intervene = stack.enter_context(intervening(model, layer, action))
            device = device_of(model)
            chosen_1S = torch.zeros(1, layer.num_experts, dtype=torch.bool, device=device)
            chosen_1S[0, list(experts)] = True
            intervene(chosen_1S, None)
        yield
