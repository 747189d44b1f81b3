"""LoRA over processes: of the two matrices of an adapter one is cut, the other is whole.

The cut one follows the weight that it stands beside. What is exchanged are the narrow numbers
between the two, r for each token; where the layer's own sum joins the parts, nothing but the
gradient of the whole matrix, of which each process then has a part. The README has the table.
"""

import torch
from torch import nn

from polyad.model.lora import Adapter, AdapterRegions, FactorLowRank, LoRAExperts, LowRank
from polyad.model.mumoe.base import Factorized
from polyad.model.regions import same
from polyad.parallel import comm
from polyad.parallel.expert import cut_experts
from polyad.parallel.placement import Piece, Placement, cut, placement_of
from polyad.parallel.regions import copy, sum_parts, tensor_group
from polyad.parallel.tensor import CutTokens


def cut_adapters(model: nn.Module, world: comm.World, tokens: CutTokens | None) -> None:
    """Cuts the adapters of a model over processes, in place.

    Args:
        model: on the meta device; the layers that adapters belong to are cut.
        world: this process.
        tokens: how tokens are cut between the layers of a GPT-2; None: every process has all.
    """
    for module in list(model.modules()):
        if isinstance(module, LoRAExperts):
            _cut_beside_experts(module, world)
        if world.tensor_parallel_size == 1:
            continue
        if isinstance(getattr(module, "lora", None), LowRank):
            _cut_beside_linear(module, tokens)
        elif isinstance(module, Factorized):
            for adapter in (module.input_lora, module.output_lora):
                if isinstance(adapter, FactorLowRank):
                    _cut_beside_factor(module, adapter)


def _cut_beside_linear(layer: nn.Module, tokens: CutTokens | None) -> None:
    placement, adapter = placement_of(layer.get_parameter("weight")), layer.get_submodule("lora")
    assert isinstance(adapter, LowRank)
    if placement.replicated:  # a layer that no process shares
        return
    # Where tokens are cut, the whole matrix meets those of this process alone.
    summed = tensor_group().sum_gradient
    of_whole = same if tokens is None else summed
    if placement.shape[0] < placement.global_shape[0]:  # cut by output
        _replace(adapter, "B", _front(placement, 1, len(adapter.A)))
        narrow = copy if tokens is None else tokens.gather
        adapter.regions = AdapterRegions(A=of_whole, narrow=narrow)
    else:
        _replace(adapter, "A", _back(placement, 1, len(adapter.A)))
        narrow = sum_parts if tokens is None else tokens.sum_and_scatter
        # Each process computes alone with its columns of the merged weight.
        adapter.regions = AdapterRegions(B=of_whole, narrow=narrow, merged_B=summed)


def _cut_beside_experts(experts: LoRAExperts, world: comm.World) -> None:
    if world.tensor_parallel_size > 1:
        summed = tensor_group().sum_gradient
        experts.up_lora.regions = AdapterRegions(A=summed)
        experts.down_lora.regions = AdapterRegions(B=summed)
    cut_experts(experts.up_lora, "A", world, inner=None)
    cut_experts(experts.up_lora, "B", world, inner=2)
    cut_experts(experts.down_lora, "A", world, inner=1)
    cut_experts(experts.down_lora, "B", world, inner=None)


def _cut_beside_factor(layer: Factorized, adapter: FactorLowRank) -> None:
    placement = placement_of(layer.get_parameter(adapter.adapts))
    sizes = zip(placement.shape, placement.global_shape, strict=True)
    axis = next(axis for axis, (here, everywhere) in enumerate(sizes) if here != everywhere)
    rank, modes, summed = len(adapter.B), adapter.modes, tensor_group().sum_gradient
    if axis < modes:
        _replace(adapter, "A", _front(placement, modes, rank))
        adapter.regions = AdapterRegions(B=summed)
    else:
        _replace(adapter, "B", _back(placement, modes, rank))
        adapter.regions = AdapterRegions(A=summed)


def _front(placement: Placement, modes: int, rank: int) -> Placement:
    """The placement of a matrix with the first modes of a cut parameter, and the rank."""
    pieces = tuple(
        Piece(piece.first_row, piece.num_rows, (*piece.origin[:modes], 0))
        for piece in placement.pieces
    )
    shape, whole = placement.shape[:modes], placement.global_shape[:modes]
    return Placement((*shape, rank), (*whole, rank), pieces, False)


def _back(placement: Placement, modes: int, rank: int) -> Placement:
    """The placement of a matrix with the rank, and the modes behind the first ones."""
    piece = Piece(0, rank, (0, *placement.pieces[0].origin[modes:]))
    shape, whole = placement.shape[modes:], placement.global_shape[modes:]
    return Placement((rank, *shape), (rank, *whole), (piece,), False)


def _replace(adapter: Adapter, name: str, placement: Placement) -> None:
    with torch.device("meta"):
        part = nn.Parameter(torch.empty(placement.shape))
    cut(part, placement)
    setattr(adapter, name, part)
