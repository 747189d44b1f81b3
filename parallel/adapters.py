"""LoRA over ranks: one matrix of an adapter is split, the other is replicated.

The split one follows the weight that it adapts. The r values per token between the two matrices are
exchanged; where the layer's own reduction joins the parts, only the gradient of the replicated
matrix is, of which each rank then has a part. `LAYERS.md` has the table.
"""

from torch import nn

from polyad.model.layers import Region, same
from polyad.model.lora import AdapterRegions, FactorLowRank, LoRAExperts, LowRank
from polyad.model.mumoe.factorizations import Factorized
from polyad.parallel import comm
from polyad.parallel.regions import copy, sum_parts, tensor_group
from polyad.parallel.sequence import Tokens
from polyad.parallel.shard import Axis, Placement, cut, placement_of


def cut_adapters(model: nn.Module, world: comm.World) -> None:
    """Splits the adapters of a model over ranks, in place.

    Args:
        model: the model on the meta device, with the adapted layers split.
        world: this rank.
    """
    for module in list(model.modules()):
        if isinstance(module, LoRAExperts):
            _cut_beside_experts(module, world)
        if world.tensor_parallel_size == 1:
            continue
        if isinstance(getattr(module, "lora", None), LowRank):
            # Shared experts receive all tokens, whatever the layers around them do.
            _cut_beside_linear(module, getattr(module, "tokens", None))
        elif isinstance(module, Factorized):
            for adapter in (module.input_lora, module.output_lora):
                if isinstance(adapter, FactorLowRank):
                    _cut_beside_factor(module, adapter)


def _cut_beside_linear(layer: nn.Module, tokens: Tokens | None) -> None:
    placement, adapter = placement_of(layer.get_parameter("weight")), layer.get_submodule("lora")
    assert isinstance(adapter, LowRank)
    if placement.replicated:  # a replicated layer
        return
    # If tokens are split, the replicated matrix is only applied to this rank's tokens.
    summed = tensor_group().sum_gradient
    of_whole = same if tokens is None else summed
    if placement.axes[0].size < placement.axes[0].whole:  # split by output
        cut(adapter, "B", _beside_front(placement, 1, len(adapter.A)))
        narrow: Region = copy if tokens is None else tokens.gather
        adapter.regions = AdapterRegions(A=of_whole, narrow=narrow)
    else:
        cut(adapter, "A", _beside_back(placement, 1, len(adapter.A)))
        narrow = sum_parts if tokens is None else tokens.sum_and_scatter
        # Each rank computes only its columns of the merged weight.
        adapter.regions = AdapterRegions(B=of_whole, narrow=narrow, merged_B=summed)


def _cut_beside_experts(experts: LoRAExperts, world: comm.World) -> None:
    if world.tensor_parallel_size > 1:
        summed = tensor_group().sum_gradient
        experts.up_lora.regions = AdapterRegions(A=summed)
        experts.down_lora.regions = AdapterRegions(B=summed)
        if experts.gate_lora is not None:
            experts.gate_lora.regions = AdapterRegions(A=summed)
    inner_axes = {"up_lora": {"A": None, "B": 2}, "down_lora": {"A": 1, "B": None}}
    if experts.gate_lora is not None:
        inner_axes["gate_lora"] = inner_axes["up_lora"]
    for adapter, axes in inner_axes.items():
        owner = experts.get_submodule(adapter)
        for name, inner in axes.items():
            shape = tuple(owner.get_parameter(name).shape)
            cut(owner, name, Placement.of_experts(shape, world, inner))


def _cut_beside_factor(layer: Factorized, adapter: FactorLowRank) -> None:
    placement, summed = (
        placement_of(layer.get_parameter(adapter.adapts)),
        tensor_group().sum_gradient,
    )
    number = next(number for number, axis in enumerate(placement.axes) if axis.size != axis.whole)
    if number < adapter.modes:
        cut(adapter, "A", _beside_front(placement, adapter.modes, len(adapter.B)))
        adapter.regions = AdapterRegions(B=summed)
    else:
        cut(adapter, "B", _beside_back(placement, adapter.modes, len(adapter.B)))
        adapter.regions = AdapterRegions(A=summed)


def _beside_front(placement: Placement, modes: int, rank: int) -> Placement:
    """Returns the placement of a matrix with the first modes of a split parameter, and the rank."""
    return Placement((*placement.axes[:modes], Axis.uncut(rank)), replicated=False)


def _beside_back(placement: Placement, modes: int, rank: int) -> Placement:
    """Returns the placement of a matrix with the rank, and the later modes of a split parameter."""
    return Placement((Axis.uncut(rank), *placement.axes[modes:]), replicated=False)
