"""Factorized experts over tensor-parallel processes: every factor cut, narrow modes exchanged.

A factorized layer is narrow in the middle: R numbers a token (a ring: four times its rank) between
its input factor and its output factor, against F inner units. So the inner units stay cut, as those
of a dense MLP, and what travels is the R numbers: gathered in the first layer, where every inner
unit needs all of them, and summed into parts in the second, where every process has a share of
each sum. The block's output is summed as a dense one's. The README says what that costs.

Shapes: M tokens, S experts of all levels, N experts of a level, X and Y the narrow modes of a
layer before and after mixing, D width, F inner width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from model.mumoe.base import Factorized
from model.mumoe.exchange import GateExchange, LayerExchange
from model.mumoe.gating import Gate
from model.mumoe.layer import MuMoE
from parallel import comm
from parallel.placement import Placement, split_columns, split_rows_and_rest
from parallel.tensor import cut, tensor_parallel_library

Region = Callable[[Tensor], Tensor]


def _collective(name: str) -> Callable[..., Tensor]:
    """A functional collective of torch: 2.13 calls `_single` what was `_tensor` before."""
    newer: Callable[..., Tensor] | None = getattr(collectives, name.replace("*", "single"), None)
    return newer or getattr(collectives, name.replace("*", "tensor"))


_all_gather = _collective("all_gather_*")
_all_gather_autograd = _collective("all_gather_*_autograd")
_reduce_scatter_autograd = _collective("reduce_scatter_*_autograd")


def parallelize_factors(layer: MuMoE, world: comm.World) -> None:
    """Cuts the gate and the factors of both layers, in place.

    Args:
        layer: on the meta device.
        world: this process, with its tensor-parallel rank.
    """
    rank, parts = world.tensor_parallel_rank, world.tensor_parallel_size
    group = _Group()
    _cut_layer(layer.up, "output", rank, parts)
    layer.up.exchange = _ColumnExchange(layer.up, parts, group)
    _cut_layer(layer.down, "input", rank, parts)
    layer.down.exchange = _RowExchange(layer.down, parts, group)
    gate = layer.gate
    gate.exchange = _gate_exchange(gate, layer.up.mixes_in_parts, group)
    _replace(gate, "weight", split_columns(tuple(gate.weight.shape), 1, rank, parts))


def _gate_exchange(gate: Gate, mixes_in_parts: bool, group: "_Group") -> GateExchange:
    """Where gradients of the gate are summed: of what is fewer numbers a token.

    Where ranks are mixed in parts, each process has a part of the coefficients' gradient. It is
    summed as it is, or goes on through the gate, which is linear backward, to the gate's input.
    """
    if not mixes_in_parts:
        return _GateOfWholes(group)
    experts, width = gate.weight.shape
    return _GateByCoefficients(group) if experts <= width else _GateByInput(group)


def _cut_layer(layer: Factorized, inner: str, rank: int, parts: int) -> None:
    """Leaves of the factors of one layer this process's part.

    Args:
        layer: on the meta device.
        inner: the factor whose units are the inner ones of the block: `input` or `output`.
        rank: which part.
        parts: how many.
    """
    axes = layer.rank_axes(layer.sizes, parts)
    for name, parameter in list(layer.named_parameters()):
        shape = tuple(parameter.shape)
        if name == f"{inner}_factor":
            if inner == "input":
                placement = split_rows_and_rest(shape, layer.sizes.inputs, rank, parts)
                layer.adds_bias = layer.sizes.bias and rank == parts - 1
            else:
                placement = split_columns(shape, len(shape) - 1, rank, parts)
        elif name in axes:
            placement = split_columns(shape, axes[name], rank, parts)
        else:
            continue
        _replace(layer, name, placement)


def _replace(module: nn.Module, name: str, placement: Placement) -> None:
    with torch.device("meta"):
        part = nn.Parameter(torch.empty(placement.shape))
    cut(part, placement)
    setattr(module, name, part)


class _Group:
    """What tensor-parallel processes do together, forward and backward."""

    def __init__(self) -> None:
        library = tensor_parallel_library()
        self.copy: Region = library.copy_to_tensor_model_parallel_region
        """The same; gradients are summed."""
        self.sum: Region = library.reduce_from_tensor_model_parallel_region
        """The sum; gradients stay."""

    def gather(self, part: Tensor, axis: int) -> Tensor:
        """All parts side by side; of the gradients' sum each gets its part."""
        return _wait(_all_gather_autograd(part, axis, _group()))

    def scatter(self, whole: Tensor, axis: int) -> Tensor:
        """A part of the sum; gradients are gathered."""
        return _wait(_reduce_scatter_autograd(whole, "sum", axis, _group()))

    def gather_equal(self, part: Tensor, axis: int) -> Tensor:
        """All parts side by side; gradients are alike on all processes, each takes its part."""
        whole: Tensor = _GatherAlike.apply(part, axis)
        return whole


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int) -> Tensor:
        ctx.axis = axis
        return _wait(_all_gather(part, axis, _group()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group = _group()
        return gradient.chunk(group.size(), ctx.axis)[group.rank()].contiguous(), None


def _group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _wait(tensor: Tensor) -> Tensor:
    done: Tensor = collectives.wait_tensor(tensor)
    return done


class _FactorExchange(LayerExchange):
    """What both layers have in common."""

    def __init__(self, layer: Factorized, parts: int, group: _Group) -> None:
        self._group, self._mixes_in_parts = group, layer.mixes_in_parts
        # Cut along its second axis, a narrow mode is as many blocks as its first has, each cut.
        axes, shapes = layer.rank_axes(layer.sizes, parts), layer.factor_shapes(layer.sizes)
        self._input_blocks = shapes["input_factor"][1] if axes["input_factor"] == 2 else 1
        self._output_blocks = shapes["output_factor"][0] if axes["output_factor"] == 1 else 1

    def shared(self, x: Tensor) -> Tensor:
        return x if self._mixes_in_parts else self._group.copy(x)

    def whole(self, factor: Tensor) -> Tensor:
        return self._group.gather(factor, 0)


class _ColumnExchange(_FactorExchange):
    """The first layer: its output units are cut. Narrow modes are gathered for them."""

    def enter(self, z_MI: Tensor) -> Tensor:
        return self._group.copy(z_MI)

    def before_mixing(self, contracted: Tensor) -> Tensor:
        return contracted if self._mixes_in_parts else self._gather(contracted)

    def after_mixing(self, mixed: Tensor) -> Tensor:
        return self._gather(mixed) if self._mixes_in_parts else mixed

    def _gather(self, part: Tensor) -> Tensor:
        blocks = part.view(part.shape[0], self._input_blocks, -1)
        return self._group.gather(blocks, 2).flatten(1)


class _RowExchange(_FactorExchange):
    """The second layer: its input units are cut. Each process gets a part of the sums over them."""

    def before_mixing(self, contracted: Tensor) -> Tensor:
        return self._scatter(contracted) if self._mixes_in_parts else contracted

    def after_mixing(self, mixed: Tensor) -> Tensor:
        return mixed if self._mixes_in_parts else self._scatter(mixed)

    def leave(self, y_MO: Tensor) -> Tensor:
        return self._group.sum(y_MO)

    def _scatter(self, whole: Tensor) -> Tensor:
        blocks = whole.view(whole.shape[0], self._output_blocks, -1)
        return self._group.scatter(blocks, 2).flatten(1)


class _GateOfWholes(GateExchange):
    """Gradients of the coefficients are whole: `LayerExchange.shared` has summed them."""

    def __init__(self, group: _Group) -> None:
        self._group = group

    def whole(self, weight_SD: Tensor) -> Tensor:
        return self._group.gather_equal(weight_SD, 1)


class _GateByCoefficients(_GateOfWholes):
    """Gradients of the coefficients are sums, made at once."""

    def leave(self, coefficients_MN: Tensor) -> Tensor:
        return self._group.copy(coefficients_MN)


class _GateByInput(_GateOfWholes):
    """Gradients of the coefficients are sums, made at the ends: the gate's input and weight."""

    def enter(self, u_MD: Tensor) -> Tensor:
        return self._group.copy(u_MD)

    def whole(self, weight_SD: Tensor) -> Tensor:
        return self._group.gather(weight_SD, 1)
