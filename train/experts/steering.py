"""Steering: shifts the residual stream towards what one expert works on.

    x <- x + sum of strength * g        x: input of a block, at every token, including the prompt

g is the expert's column of that block's gate, not normalized, so that a strength of 1 adds the
column itself. A gate that reads the residual stream then gives the expert strength * |g|^2 more
score and every other expert strength * (its column . g) more, before normalization, apart from
effects through the block's attention. Negative strengths steer away.

With linear and random scores of a sparse mixture g is the row of the score's weight; with a cosine
score g is the expert's direction mapped back through the projection.

Source: Oldfield et al. 2024, appendix G.2, which adds the same vectors ("cluster centers") to every
token's activations before a muMoE layer.

Shapes: D width, N experts of a level, B windows, T tokens of a window.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.block import Block
from polyad.model.decoder import Decoder
from polyad.train.errors import ConfigError
from polyad.train.experts.interventions import finite, whole

_FORM = "layer=N,expert=N,strength=X, and level=N of a hierarchy"


@dataclass(frozen=True, kw_only=True)
class Steering:
    """An expert, and how far to steer towards it."""

    layer: int
    """Number of the block, from 0."""
    expert: int
    """Number of the expert in its level, from 0."""
    strength: float
    """Factor of the expert's column that is added."""
    level: int = 0
    """The level of a hierarchy of experts, from 0."""

    def __str__(self) -> str:
        """The text that `parse_steering` reads."""
        level = f"level={self.level}," if self.level else ""
        return f"layer={self.layer},{level}expert={self.expert},strength={self.strength:g}"


def parse_steering(text: str) -> Steering:
    """Reads `layer=5,expert=37,strength=8`, with `level=1` of a hierarchy.

    Raises:
        ConfigError: a key is missing, unknown or given twice, or a value is not a valid number.
    """
    keys, values = [field.name for field in fields(Steering)], dict[str, Any]()
    for part in text.split(","):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise ConfigError(f"--steer {text}: {part!r} is not key=value; needed: {_FORM}")
        if key not in keys:
            near = "".join(f"; the nearest is {name}" for name in get_close_matches(key, keys, 1))
            raise ConfigError(f"--steer {text}: unknown key {key!r}{near}; needed: {_FORM}")
        if key in values:
            raise ConfigError(f"--steer {text}: {key} is given twice")
        read = finite if key == "strength" else whole
        values[key] = read(value, f"--steer {text}", key)
    if lacking := [key for key in ("layer", "expert", "strength") if key not in values]:
        raise ConfigError(f"--steer {text}: {lacking[0]} is missing; needed: {_FORM}")
    return Steering(**values)


@contextmanager
def steered(model: nn.Module, steerings: Sequence[Steering]) -> Iterator[None]:
    """Steers a model's forward passes as long as the context is open.

    Args:
        model: a GPT-2 on one device.
        steerings: any number of steerings; those of the same block are summed.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """
    shifts: dict[int, Tensor] = {}
    for steering in steerings:
        g_D = gate_column(model, steering)
        shift_D = steering.strength * g_D
        shifts[steering.layer] = shifts.get(steering.layer, torch.zeros_like(g_D)) + shift_D
    blocks = _blocks(model)
    hooks = [
        blocks[layer].register_forward_pre_hook(_adding(shift_D))
        for layer, shift_D in shifts.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gate_column(model: nn.Module, steering: Steering) -> Tensor:
    """Returns the vector that a strength of 1 adds.

    Args:
        model: a GPT-2.
        steering: which expert.

    Returns:
        [D], at least fp32.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """
    gates = [block.feed_forward.gate_columns() for block in _blocks(model)]
    gated = [layer for layer, levels in enumerate(gates) if levels]
    if not gated:
        raise ConfigError(f"--steer {steering}: the model is dense: no layer has experts")
    if steering.layer >= len(gates):
        allowed = _range(len(gates))
        raise ConfigError(f"--steer {steering}: layer {steering.layer}: the model has {allowed}")
    levels = gates[steering.layer]
    if not levels:
        raise ConfigError(
            f"--steer {steering}: layer {steering.layer} is dense; with experts: "
            f"{', '.join(map(str, gated))}"
        )
    if steering.level >= len(levels):
        allowed = _range(len(levels))
        raise ConfigError(
            f"--steer {steering}: level {steering.level}: layer {steering.layer} has {allowed}"
        )
    g_ND = levels[steering.level]
    if steering.expert >= len(g_ND):
        where = f"level {steering.level} of " if len(levels) > 1 else ""
        raise ConfigError(
            f"--steer {steering}: expert {steering.expert}: {where}layer {steering.layer} has "
            f"{_range(len(g_ND))}"
        )
    g_D = g_ND[steering.expert].detach()
    return g_D.to(torch.promote_types(g_D.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class Load:
    """Effect of a steering on its expert's share of routing in its level."""

    steering: Steering
    column_length: float
    load: float
    load_unsteered: float

    def to_json(self) -> dict[str, Any]:
        """JSON values: the keys of the steering, too."""
        found = dict(vars(self))
        return asdict(found.pop("steering")) | found

    def __str__(self) -> str:
        """A line for the console."""
        one = self.steering
        level = f"level {one.level}, " if one.level else ""
        return (
            f"steered: layer {one.layer}, {level}expert {one.expert}: {one.strength:g} times its "
            f"gate's column, of length {self.column_length:.3g}; load on these tokens "
            f"{self.load:.3f}, without {self.load_unsteered:.3f}"
        )


@torch.inference_mode()
def loads_of(model: nn.Module, steerings: Sequence[Steering], ids: Sequence[int]) -> list[Load]:
    """Measures the effect of steering on routing: the same tokens with all steerings and with none.

    Args:
        model: a GPT-2 in evaluation mode.
        steerings: as in `steered`.
        ids: tokens, at most the model's `sequence_length`.
    """
    ids_BT = torch.tensor([list(ids)], device=next(model.parameters()).device)
    before = {stats.name: stats for stats in model(ids_BT).routing}
    with steered(model, steerings):
        after = {stats.name: stats for stats in model(ids_BT).routing}
    results = []
    for steering in steerings:
        name = f"blocks.{steering.layer}.feed_forward"
        # The levels of a hierarchy are concatenated.
        expert = sum(before[name].levels[: steering.level]) + steering.expert
        results.append(
            Load(
                steering=steering,
                column_length=gate_column(model, steering).norm().item(),
                load=after[name].load_E[expert].item(),
                load_unsteered=before[name].load_E[expert].item(),
            )
        )
    return results


def _adding(shift_D: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, *others = args
        return x_BTD + shift_D.to(x_BTD.dtype), *others

    return hook


def _blocks(model: nn.Module) -> list[Block]:
    assert isinstance(model, Decoder)
    return [block for block in model.blocks if isinstance(block, Block)]


def _range(count: int) -> str:
    return "0 alone" if count == 1 else f"0 to {count - 1}"
