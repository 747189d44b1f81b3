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
from polyad.train.config.faults import describe
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import (
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
    how: How = "contribution"
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
        tree["experts"] = tree.pop("expert").split("+")
    try:
        parsed = Intervention.model_validate(tree, strict=False)
    except ValidationError as error:
        wrong = describe(error, Intervention).replace("experts", "expert")  # as it is typed
        raise ConfigError(f"{where}: {wrong}; the form is {FORM}") from None
    for key, hows in HOWS_OF.items():
        if (key in tree) != (parsed.how in hows):
            needed = "is missing" if parsed.how in hows else f"means nothing with how={parsed.how}"
            raise ConfigError(f"{where}: {key} {needed}")
    return parsed


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
        if each.to is not None:
            _check_swap(layer, each)
        changed.setdefault((each.layer, each.how), set()).update(each.experts)
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


def paired(interventions: Sequence[Intervention]) -> list[tuple[Intervention, Action]]:
    """Merges interventions so that all forced and avoided experts of a layer are ranked at once.

    First and last refer to the router's own order, which a first change would alter for a second.
    """
    merged, done = [], set()
    for each in interventions:
        if each.how not in RANKING:
            merged.append((each, each.action))
        elif each.layer not in done:
            done.add(each.layer)
            first, last = (
                tuple(
                    expert
                    for one in interventions
                    if one.layer == each.layer and one.how == how
                    for expert in one.experts
                )
                for how in RANKING
            )
            action = Action(how="force", avoided=last) if first else Action(how="avoid")
            merged.append((each.model_copy(update={"experts": first or last}), action))
    return merged


def _check_swap(layer: RoutedLayer, intervention: Intervention) -> None:
    experts = *intervention.experts, intervention.to or 0
    levels = {layer.place(each)[0] for each in experts}
    if intervention.to in intervention.experts or len(levels) > 1:
        raise ConfigError(
            f"--intervene {intervention}: to: {intervention.to} is not allowed: another "
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
    to_mean = [each for each in interventions if each.how == "mean"]
    if to_mean and means is None:
        raise ConfigError(
            f"--intervene {to_mean[0]}: mean outputs are not known without held-out data"
        )
    mean_of = means() if to_mean and means is not None else {}
    with ExitStack() as stack:
        for each, action in paired(interventions):
            layer = by_block[each.layer]
            if action.how == "mean":
                action = Action(how="mean", mean_SD=mean_of[layer.name])
            intervene = stack.enter_context(intervening(model, layer, action))
            device = device_of(model)
            chosen_1S = torch.zeros(1, layer.num_experts, dtype=torch.bool, device=device)
            chosen_1S[0, list(each.experts)] = True
            intervene(chosen_1S, None)
        yield
