"""Which layers and experts a user asks for: `--layers` and `--experts`."""

from collections.abc import Sequence

from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer

MOST_LAYERS = 3
"""Whose experts are looked at, unless they are named: the first, the middle and the last."""
EVERY = "all"
"""In place of numbers of blocks."""


def choose_layers(routed: list[RoutedLayer], blocks: Sequence[str]) -> list[RoutedLayer]:
    """The layers of blocks.

    Args:
        routed: all layers with experts.
        blocks: numbers of blocks, or `all`; none: the first, the middle and the last that routes.

    Raises:
        ConfigError: a block has no experts, or is not there.
    """
    if not blocks:
        if len(routed) <= MOST_LAYERS:
            return routed
        return [routed[0], routed[len(routed) // 2], routed[-1]]
    by_block: dict[str, list[RoutedLayer]] = {}
    for layer in routed:
        if not layer.in_block:  # a whole network of experts, or a head
            continue
        by_block.setdefault(str(layer.block), []).append(layer)
    if list(blocks) == [EVERY] and routed:
        return routed
    for block in blocks:
        if block not in by_block:
            known = f"blocks with experts are {', '.join(by_block)}"
            there = known if by_block else "no block of this run has experts"
            raise ConfigError(f"--layers: {block} is not allowed: {there}")
    return [layer for block, each in by_block.items() if block in blocks for layer in each]


def check_experts(layers: Sequence[RoutedLayer], experts: Sequence[str]) -> None:
    """Checks that every layer has the experts.

    Args:
        layers: that are looked at.
        experts: by name, in each of them; see `RoutedLayer.expert_name`.

    Raises:
        ConfigError: one does not.
    """
    if experts and not layers:
        raise ConfigError(f"--experts: {experts[0]} is not allowed: the run has no experts")
    for layer in layers:
        names = [layer.expert_name(column) for column in range(layer.num_experts)]
        for expert in experts:
            if expert not in names:
                form = " (LEVEL.EXPERT)" if len(layer.levels) > 1 else ""
                raise ConfigError(
                    f"--experts: {expert} is not allowed: {layer.title} has {names[0]} to "
                    f"{names[-1]}{form}"
                )


def columns_of(layer: RoutedLayer, experts: Sequence[str]) -> list[int]:
    """The columns of experts, in order.

    Args:
        layer: that has them.
        experts: by name; none: all.
    """
    every = range(layer.num_experts)
    return [column for column in every if not experts or layer.expert_name(column) in experts]
