"""Factorized experts over tensor-parallel processes: every factor cut, narrow modes exchanged.

A factorized layer is narrow in the middle: R numbers a token (a ring: four times its rank) between
its input factor and its output factor, against F inner units. So the inner units stay cut, as those
of a dense MLP, and what is sent are the R numbers: gathered in the first layer, where every inner
unit needs all of them, and summed into parts in the second, where every process has a share of
each sum. The block's output is summed as a dense one's. `FACTORS.md` says what that costs.

Shapes: M tokens, R rank.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from polyad.model.lora import FactorLowRank
from polyad.model.mumoe.base import Factorized, FactorRegions
from polyad.model.mumoe.gating import GateRegions
from polyad.model.mumoe.layer import MuMoE
from polyad.model.regions import Region
from polyad.parallel import comm
from polyad.parallel.regions import Group, copy, sum_parts, tensor_group
from polyad.parallel.shard import Axis, Placement, cut


def parallelize_factors(layer: MuMoE, world: comm.World) -> None:
    """Cuts the gate and all layers over the tensor-parallel processes, in place.

    Args:
        layer: on the meta device.
        world: this process, with its tensor-parallel rank.
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
    """The axes of a factor that are cut; empty: every process has the whole."""
    if not is_first and name == "input_factor":  # the last process has the bias row below the units
        inner = factors.sizes.inputs
        return {0: Axis.part_and_rest(shape[0], inner, group.rank, group.size)}
    if is_first and name == "output_factor":
        axis = len(shape) - 1  # of the inner units
    else:
        axes = factors.rank_axes(factors.sizes, group.size)
        if name not in axes:
            return {}
        axis = axes[name]
    return {axis: Axis.part(shape[axis], group.rank, group.size)}


def _regions(factors: Factorized, group: Group, *, is_first: bool) -> FactorRegions:
    """What is exchanged in a layer, whose narrow numbers cross either before or after mixing.

    The first layer gathers them, as late as it can: after mixing if it can mix a part of them. The
    second sums them into parts, as early as it needs to: before mixing if it mixes a part.
    """
    shapes = factors.factor_shapes(factors.sizes)
    axes = factors.rank_axes(factors.sizes, group.size)
    # A narrow mode cut along its second axis is one cut block for each row of its first.
    if is_first:
        blocks = shapes["input_factor"][1] if axes["input_factor"] == 2 else 1
        regions = FactorRegions(input=copy)
        crossing = _by_blocks(group.gather, blocks)
    else:
        blocks = shapes["output_factor"][0] if axes["output_factor"] == 1 else 1
        regions = FactorRegions(output=sum_parts)
        crossing = _by_blocks(group.sum_and_scatter, blocks)
    if factors.mixes_parts:
        if is_first:
            return regions._replace(mixed=crossing)
        return regions._replace(contracted=crossing)
    # Every process computes alike what the coefficients choose, and multiplies a part by it.
    regions = regions._replace(experts=copy, core=lambda core: group.gather(core, 0))
    if is_first:
        return regions._replace(contracted=crossing)
    return regions._replace(mixed=crossing)


def _by_blocks(crossing: Callable[[Tensor, int], Tensor], blocks: int) -> Region:
    """An exchange of numbers of a token that are in blocks, of each of which a process has a part.

    Args:
        crossing: the exchange, along an axis.
        blocks: how many.
    """

    def crossed(narrow_MR: Tensor) -> Tensor:
        return crossing(narrow_MR.view(narrow_MR.shape[0], blocks, -1), 2).flatten(1)

    return crossed


def _cut_gate(layer: MuMoE, group: Group) -> None:
    """Has every process keep some columns of the gate, and compute all scores.

    Gradients of coefficients are whole, where those of what they mix are summed. Where ranks are
    mixed in parts, each process has a part of the coefficients' gradient: that is summed as it is,
    or goes on through the gate, which is linear backward, to its input, if those are fewer numbers.
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
"""Ranks are stored as multiples of it, where no process shares them: 16 bytes in bf16."""


def pad_ranks(model: nn.Module) -> None:
    """Rounds the ranks of factorized layers up, in place, where they are not cut.

    The padding exists only here: no checkpoint and no count has it. It begins as zeros and stays
    zero, since in the gradient of each factor's padding there is another's.

    Args:
        model: on the meta device.
    """
    for layer in model.modules():
        if not isinstance(layer, Factorized) or layer.sizes.rank % RANKS == 0:
            continue
        before = layer.factor_shapes(layer.sizes)
        rank = -(-layer.sizes.rank // RANKS) * RANKS
        layer.sizes = replace(layer.sizes, rank=rank)
        for name, shape in layer.factor_shapes(layer.sizes).items():
            if shape != before[name]:
                cut(layer, name, Placement.padded(shape, before[name]))
        for adapter in (layer.input_lora, layer.output_lora):
            if isinstance(adapter, FactorLowRank):
                _pad_adapter(layer, adapter, before[adapter.adapts])


def _pad_adapter(layer: Factorized, adapter: FactorLowRank, before: tuple[int, ...]) -> None:
    """Pads what is beside a factor as the factor is."""
    after, modes, rank = layer.get_parameter(adapter.adapts).shape, adapter.modes, len(adapter.B)
    shapes = {
        "A": ((*after[:modes], rank), (*before[:modes], rank)),
        "B": ((rank, *after[modes:]), (rank, *before[modes:])),
    }
    for name, (shape, real) in shapes.items():
        if shape != real:
            cut(adapter, name, Placement.padded(shape, real))
