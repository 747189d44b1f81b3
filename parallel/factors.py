"""Factorized experts and sparse tables over tensor-parallel ranks.

Every factor is split. A factorized layer is narrow in the middle: R values per token (in a ring
four times its rank) between its input and output factors, compared with F inner units. So the inner
units stay split, like those of a dense MLP, and the R values are communicated: gathered in the
first layer, where every inner unit needs all of them, and reduce-scattered in the second, where
every rank has a part of each sum. The block's output is all-reduced like a dense one's.
`LAYERS.md` describes the cost.

Shapes: M tokens, R rank, S scores of all levels of a table, K experts of a token, G ranks.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyad.model.layers import Region
from polyad.model.lora import FactorLowRank
from polyad.model.mumoe.factorizations import Factorized, FactorRegions
from polyad.model.mumoe.gating import GateRegions
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mxd import SparseTable
from polyad.model.smoe.router import Selected
from polyad.parallel import comm
from polyad.parallel.regions import Group, copy, sum_parts, tensor_group
from polyad.parallel.shard import Axis, Placement, cut


def parallelize_factors(layer: MuMoE, world: comm.World) -> None:
    """Splits the gate and all layers over the tensor-parallel ranks, in place.

    Args:
        layer: the layer on the meta device.
        world: this rank, with its tensor-parallel rank.
    """
    group = tensor_group()
    _cut_gate(layer, group)
    for factors in layer.layers():
        is_first = factors is not layer.down
        factors.regions = _regions(factors, group, is_first=is_first)
        if not is_first:
            factors.adds_bias &= group.rank == group.size - 1
        for name, shape in factors.factor_shapes(factors.sizes).items():
            if axes := _cut_axes(factors, name, shape, group, is_first=is_first):
                cut(factors, name, Placement.cut(shape, axes))


def _cut_axes(
    factors: Factorized, name: str, shape: tuple[int, ...], group: Group, *, is_first: bool
) -> dict[int, Axis]:
    """Returns the split axes of a factor; empty if it is replicated."""
    if not is_first and name == "input_factor":  # the last rank has the bias row below the units
        inner = factors.sizes.inputs
        return {0: Axis.part_and_rest(shape[0], inner, group.rank, group.size)}
    if is_first and name == "output_factor":
        axis = len(shape) - 1  # the axis of the inner units
    else:
        axes = factors.rank_axes(factors.sizes, group.size)
        if name not in axes:
            return {}
        axis = axes[name]
    return {axis: Axis.part(shape[axis], group.rank, group.size)}


def _regions(factors: Factorized, group: Group, *, is_first: bool) -> FactorRegions:
    """Returns the regions of a layer, which communicates either before or after mixing.

    The first layer gathers as late as possible: after mixing if it can mix a part of R. The second
    reduce-scatters as early as needed: before mixing if it mixes a part.
    """
    shapes = factors.factor_shapes(factors.sizes)
    axes = factors.rank_axes(factors.sizes, group.size)
    # A narrow mode split along its second axis consists of one split block per row of its first.
    exchange: Callable[[Tensor, int], Tensor]
    if is_first:
        blocks = shapes["input_factor"][1] if axes["input_factor"] == 2 else 1
        regions, exchange = FactorRegions(input=copy), group.gather
    else:
        blocks = shapes["output_factor"][0] if axes["output_factor"] == 1 else 1
        regions, exchange = FactorRegions(output=sum_parts), group.sum_and_scatter
    if not factors.mixes_parts:
        # Every rank computes the mixed expert factors identically, and multiplies a part by them.
        regions = regions._replace(experts=copy, core=lambda core: group.gather(core, 0))
    crossing = _by_blocks(exchange, blocks)
    if is_first == factors.mixes_parts:
        return regions._replace(mixed=crossing)
    return regions._replace(contracted=crossing)


def _by_blocks(crossing: Callable[[Tensor, int], Tensor], blocks: int) -> Region:
    """Applies an exchange to values of a token in blocks, where a rank has a part of each block.

    Args:
        crossing: the exchange, along an axis.
        blocks: number of blocks.
    """

    def crossed(narrow_MR: Tensor) -> Tensor:
        return crossing(narrow_MR.view(narrow_MR.shape[0], blocks, -1), 2).flatten(1)

    return crossed


def _cut_gate(layer: MuMoE, group: Group) -> None:
    """Makes every rank keep some columns of the gate, and compute all scores.

    Gradients of coefficients are complete where those of the mixed vectors are summed. If R is
    mixed in parts, each rank has a part of the coefficients' gradient: either that is all-reduced,
    or it is propagated through the gate, whose backward is linear, to its input, whichever is
    smaller.
    """
    gate = layer.gate
    experts, width = gate.weight.shape
    if layer.up.mixes_parts and experts > width:
        gate.regions = GateRegions(input=copy, weight=lambda part: group.gather(part, 1))
    else:
        gate.regions = GateRegions(weight=lambda part: group.gather_equal(part, 1))
        if layer.up.mixes_parts:
            gate.regions = gate.regions._replace(coefficients=copy)
    columns = Axis.part(width, group.rank, group.size)
    cut(gate, "weight", Placement.cut((experts, width), {1: columns}))


RANKS = 8
"""Ranks are stored as multiples of this, if they are not split: 16 bytes in bf16."""


def pad_ranks(model: nn.Module) -> None:
    """Pads the ranks of factorized layers, in place, if they are not split.

    The padding exists only here: checkpoints and counts exclude it. It starts as zeros and stays
    zero, since the gradient of each factor's padding is multiplied by another factor's padding.

    Args:
        model: the model on the meta device.
    """
    for layer in model.modules():
        if not isinstance(layer, Factorized) or layer.sizes.rank % RANKS == 0:
            continue
        before = layer.factor_shapes(layer.sizes)
        rank = -(-layer.sizes.rank // RANKS) * RANKS
        layer.sizes = replace(layer.sizes, rank=rank)
        for name, shape in layer.factor_shapes(layer.sizes).items():
            if shape != before[name]:
                cut(layer, name, Placement.whole(before[name], shape))
        for adapter in (layer.input_lora, layer.output_lora):
            if isinstance(adapter, FactorLowRank):
                _pad_adapter(layer, adapter, before[adapter.adapts])


def _pad_adapter(layer: Factorized, adapter: FactorLowRank, before: tuple[int, ...]) -> None:
    """Pads an adapter like the factor that it adapts."""
    after, modes, rank = layer.get_parameter(adapter.adapts).shape, adapter.modes, len(adapter.B)
    shapes = {
        "A": ((*after[:modes], rank), (*before[:modes], rank)),
        "B": ((rank, *after[modes:]), (rank, *before[modes:])),
    }
    for name, (shape, real) in shapes.items():
        if shape != real:
            cut(adapter, name, Placement.whole(real, shape))


def parallelize_table(layer: SparseTable, world: comm.World) -> None:
    """Splits the table, in place.

    Every rank has the whole gate and makes the same choice. Each then sums the rows of its own
    experts, and the sums are all-reduced. The dense feed-forward that the table scales is split
    like any other.

    Args:
        layer: the layer on the meta device.
        world: this rank, with its tensor-parallel rank.
    """
    parts, rank = world.tensor_parallel_size, world.tensor_parallel_rank
    own = Axis.part(layer.config.num_experts, rank, parts)
    layer.gate.agreed = tensor_group().of_first
    cut(layer, "table", Placement.cut(tuple(layer.table.shape), {0: own}))
    first = own.runs[0].there

    def of_this_process(selected: Selected) -> tuple[Tensor, Tensor]:
        # The rows are local to this rank, and so are the gradients of their weights.
        weights_MK = copy(selected.weights_NK)
        rows_MK = selected.expert_ids_NK - first
        is_own_MK = (rows_MK >= 0) & (rows_MK < own.size)
        return weights_MK * is_own_MK, torch.where(is_own_MK, rows_MK, 0)

    layer.own, layer.mixed = of_this_process, sum_parts
