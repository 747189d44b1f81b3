"""Tensor parallelism: replaces a model's linear layers by megatron-core's, and splits factorized
experts and sparse tables.

The matrix products before a branch's nonlinearity are split by output (attention by head), those
after it by input; the embedding and output head of text are split by vocabulary. A branch then
needs one all-reduce of activations forward and one backward. Parameter names do not change, so
initial values and checkpoints are those of the whole model.

Every factor of a muMoE is split. A factorized layer is narrow in the middle: R values per token (in
a ring four times its rank) between its input and output factors, compared with F inner units. So
the inner units stay split, like those of a dense MLP, and the R values are communicated: gathered
in the first layer, where every inner unit needs all of them, and reduce-scattered in the second,
where every rank has a part of each sum. The block's output is all-reduced like a dense one's.
`LAYERS.md` describes the cost. A sparse table is split by its rows.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this rank, with padding), M
tokens, R rank, S scores of all levels of a table, K experts of a token, G ranks.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.attention import Attention, GroupedAttention, LatentAttention, SelfAttention
from polyad.model.bert import Bert
from polyad.model.decoder import Decoder
from polyad.model.feedforward import DenseFeedForward
from polyad.model.heads import MaskedLanguageHead, VocabularyHead
from polyad.model.kernels.linear_cross_entropy import VocabularyPart
from polyad.model.layers import Linear, Region, embed, same
from polyad.model.lora import Adapter, AdapterRegions, FactorLowRank, LowRank
from polyad.model.mumoe.factorizations import Factorized, FactorRegions
from polyad.model.mumoe.gating import GateRegions
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mxd import SparseTable
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.smoe.router import Selected
from polyad.parallel import comm, regions
from polyad.parallel.sequence import Tokens
from polyad.parallel.shard import Axis, Placement, cut, placement_of


def parallelize_tensors(model: nn.Module, world: comm.World, tokens: Tokens | None) -> None:
    """Splits the layers of a model over the tensor-parallel ranks, in place, except for its
    vocabulary.

    In image models, the patch embedding and the head are small and replicated; so are BERT's heads,
    except for their products with the vocabulary.

    Args:
        model: the model on the meta device.
        world: this rank, with its tensor-parallel rank.
        tokens: for a GPT-2, how tokens are split between these layers; None if every rank has all.
    """
    layers, whole = _Layers(world, tokens), _Layers(world, None)
    # Shared experts, and the layers that a table scales, receive all tokens, like their parent
    # layer.
    shared = {id(each.shared) for each in model.modules() if isinstance(each, SelectingMoE)}
    shared |= {id(each.dense) for each in model.modules() if isinstance(each, SparseTable)}
    with torch.device("meta"):
        for layer in list(model.modules()):
            if isinstance(layer, Attention):
                layer.add_module("projection", layers.row(layer.projection))
                layer.random_numbers = functools.partial(regions.own_random_numbers, world)
            if isinstance(layer, SelfAttention):
                layer.add_module("qkv", layers.column(layer.qkv, fused=3))
            elif isinstance(layer, GroupedAttention):
                _cut_grouped(layer, layers, world)
            elif isinstance(layer, LatentAttention):
                for name, linear in list(layer.named_children()):
                    if name in ("query", "query_up", "key_value_up"):
                        assert isinstance(linear, nn.Linear)
                        layer.add_module(name, layers.column(linear))
                layer.shared_key = layers.gathered
            elif isinstance(layer, DenseFeedForward):  # other kinds are split in their own modules
                of_this = whole if id(layer) in shared else layers
                for name in ("gate", "up"):
                    if (linear := getattr(layer, name)) is not None:
                        layer.add_module(name, of_this.column(linear))
                layer.add_module("down", of_this.row(layer.down))
            if isinstance(layer, Attention) and layer.sinks is not None:
                _cut_vector(layer, "sinks", world)


def _cut_grouped(layer: GroupedAttention, layers: "_Layers", world: comm.World) -> None:
    """Splits query heads, and key and value heads if there are enough of them."""
    parts, groups = world.tensor_parallel_size, layer.config.known_key_value_heads()
    layer.add_module("query", layers.column(layer.query))
    is_cut = groups % parts == 0
    cut_or_shared = layers.column if is_cut else layers.shared
    layer.add_module("key", cut_or_shared(layer.key))
    layer.add_module("value", cut_or_shared(layer.value))
    if not is_cut:
        own = world.tensor_parallel_rank * groups // parts
        layer.own_heads = lambda x_BGTH: x_BGTH.narrow(1, own, 1)
    if layer.query_norm is None or layer.key_norm is None:
        return
    group = regions.tensor_group()
    for norm, of_part in ((layer.query_norm, True), (layer.key_norm, is_cut)):
        if layer.config.query_key_norm == "all" and of_part:
            _cut_vector(norm, "weight", world)
            norm.mean = group.mean
        else:
            norm.shared = group.sum_gradient


def _cut_vector(owner: nn.Module, name: str, world: comm.World) -> None:
    """Keeps this rank's part of values that are ordered by head."""
    (size,) = owner.get_parameter(name).shape
    axis = Axis.part(size, world.tensor_parallel_rank, world.tensor_parallel_size)
    cut(owner, name, Placement.cut((size,), {0: axis}))


class SharedLinear(nn.Linear):
    """A linear layer that every rank has whole, while each uses only some heads of its output.

    Its gradients are all-reduced.

    Args:
        layer: the whole layer, on the meta device.
        gathered: gathers all tokens; backward sums the gradients.
    """

    def __init__(self, layer: nn.Linear, gathered: Region) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.gathered, self.summed = gathered, regions.tensor_group().sum_gradient
        self.lora = getattr(layer, "lora", None)
        if self.lora is not None:
            self.lora.regions = AdapterRegions(A=self.summed, B=self.summed)

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear.forward`."""
        x = self.gathered(x)
        bias = None if self.bias is None else self.summed(self.bias)
        y = linear(x, self.summed(self.weight), bias)
        return y if self.lora is None else y + self.lora(x)


class _Layers:
    """Creates the parallel version of a linear layer, without values."""

    def __init__(self, world: comm.World, tokens: Tokens | None) -> None:
        self.tokens = tokens
        self.gathered: Region = regions.copy if tokens is None else tokens.gather
        """Gathers all tokens for a layer whose output a rank only uses for its own heads."""
        self.rank, self.parts = world.tensor_parallel_rank, world.tensor_parallel_size
        self.config = comm.megatron().ModelParallelConfig(
            tensor_model_parallel_size=self.parts,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.float32,
        )

    def shared(self, layer: nn.Linear) -> nn.Module:
        """Replicates a layer on every rank."""
        return SharedLinear(layer, self.gathered)

    def column(self, layer: nn.Linear, fused: int = 1) -> nn.Module:
        """Splits a layer by output; the input is replicated, the output is split."""
        rows = Axis.part(layer.out_features, self.rank, self.parts, fused)
        keys = {"gather_output": False}
        return self._cut(_linear_classes()[0], keys, layer, weight=(0, rows), bias=(0, rows))

    def row(self, layer: nn.Linear) -> nn.Module:
        """Splits a layer by input; the output is summed over ranks, and the bias added once."""
        columns = Axis.part(layer.in_features, self.rank, self.parts)
        keys = {"input_is_parallel": True, "skip_bias_add": False}
        return self._cut(_linear_classes()[1], keys, layer, weight=(1, columns))

    def _cut(
        self, kind: Any, keys: dict[str, bool], layer: nn.Linear, **cuts: tuple[int, Axis]
    ) -> nn.Module:
        made = kind(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            config=self.config,
            init_method=nn.init.zeros_,
            **keys,
        )
        for name, (number, axis) in cuts.items():
            if (whole := getattr(layer, name)) is not None:
                cut(made, name, Placement.cut(tuple(whole.shape), {number: axis}))
        made.lora, made.tokens = getattr(layer, "lora", None), self.tokens
        return made


@functools.cache
def _linear_classes() -> tuple[type, type]:
    """Returns megatron-core's linear layers, split by output and by input, with torch's interface.

    megatron-core's return (output, bias); these return only the output, including LoRA's update
    (see `cut_adapters`). If tokens are split, the products of
    `parallel/sequence.py` are used: megatron-core's allocate on CUDA devices only.
    """
    library: Any = comm.megatron().tensor_parallel

    class ColumnParallelLinear(library.ColumnParallelLinear):
        def forward(self, x: Tensor) -> Tensor:
            if self.tokens is None:
                y = super().forward(x)[0]
            else:
                y = self.tokens.gathered_linear(x, self.weight, self.bias)
            return y if self.lora is None else y + self.lora(x)

    class RowParallelLinear(library.RowParallelLinear):
        def forward(self, x: Tensor) -> Tensor:
            if self.tokens is None:
                y = super().forward(x)[0]
            else:
                y = self.tokens.sum_and_scatter(linear(x, self.weight))
                y = y if self.bias is None else y + self.bias
            return y if self.lora is None else y + self.lora(x)

        merged_weight = Linear.merged_weight  # this rank's columns

    return ColumnParallelLinear, RowParallelLinear


def cut_adapters(model: nn.Module, world: comm.World) -> None:
    """Splits the adapters of LoRA over ranks, in place.

    One matrix of an adapter is split, as the weight that it adapts; the other is replicated. The r
    values per token between the two matrices are exchanged; where the layer's own reduction joins
    the parts, only the gradient of the replicated matrix is, of which each rank then has a part.
    `LAYERS.md` has the list.

    Args:
        model: the model on the meta device, with the adapted layers split.
        world: this rank.
    """
    for module in list(model.modules()):
        if isinstance(module, Experts) and module.up_lora is not None:
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
    summed = regions.tensor_group().sum_gradient
    of_whole = same if tokens is None else summed
    if _cut_beside(adapter, placement, 1, "B", "A"):  # split by output
        narrow: Region = regions.copy if tokens is None else tokens.gather
        adapter.regions = AdapterRegions(A=of_whole, narrow=narrow)
    else:
        narrow = regions.sum_parts if tokens is None else tokens.sum_and_scatter
        # Each rank computes only its columns of the merged weight.
        adapter.regions = AdapterRegions(B=of_whole, narrow=narrow, merged_B=summed)


def _cut_beside_experts(experts: Experts, world: comm.World) -> None:
    for name, whole, part, axis in (
        ("up_lora", "A", "B", 2),
        ("gate_lora", "A", "B", 2),
        ("down_lora", "B", "A", 1),
    ):
        adapter = getattr(experts, name)
        if adapter is None:
            continue
        if world.tensor_parallel_size > 1:
            adapter.regions = AdapterRegions(**{whole: regions.tensor_group().sum_gradient})
        for matrix, inner in ((whole, None), (part, axis)):
            shape = tuple(adapter.get_parameter(matrix).shape)
            cut(adapter, matrix, Placement.of_experts(shape, world, inner))


def _cut_beside_factor(layer: Factorized, adapter: FactorLowRank) -> None:
    placement = placement_of(layer.get_parameter(adapter.adapts))
    summed = regions.tensor_group().sum_gradient
    is_front = _cut_beside(adapter, placement, adapter.modes, "A", "B")
    adapter.regions = AdapterRegions(**{"B" if is_front else "A": summed})


def _cut_beside(adapter: Adapter, placement: Placement, modes: int, front: str, back: str) -> bool:
    """Splits the matrix of an adapter that has the split mode of a parameter.

    Args:
        adapter: The adapter.
        placement: That of the parameter.
        modes: How many of its first modes the matrix `front` has; `back` has the rank, and the
            other modes.

    Returns:
        Whether it is `front`.
    """
    rank = Axis.uncut(len(adapter.get_parameter(back)))
    is_front = any(axis.size != axis.whole for axis in placement.axes[:modes])
    axes = (*placement.axes[:modes], rank) if is_front else (rank, *placement.axes[modes:])
    cut(adapter, front if is_front else back, Placement(axes, replicated=False))
    return is_front


# Embedding and output head with a vocabulary that is split over ranks, or padded on one.


def cut_vocabulary(model: nn.Module, world: comm.World, tokens: Tokens | None) -> None:
    """Splits a text model's embedding and output head over the tensor-parallel ranks, in place.

    Rows are padded, also on one rank; padding exists only here: checkpoints and counts exclude it.

    Args:
        model: the model on the meta device.
        world: this rank.
        tokens: how tokens are split between layers; None if every rank has all.
    """
    if not isinstance(model, Decoder | Bert):
        return
    words, is_cut = model.token_embedding.weight.shape[0], world.tensor_parallel_size > 1
    axis = Axis.part_of_vocabulary(words, world.tensor_parallel_rank, world.tensor_parallel_size)
    if not is_cut and axis.size == words:
        return
    head = _head(model)
    owners: list[tuple[nn.Module, str]] = [(model.token_embedding, "weight")]
    if head is not None:
        owners += [(head, name) for name, _ in head.named_parameters()]
    for owner, name in owners:
        shape = tuple(owner.get_parameter(name).shape)
        cut(owner, name, Placement.cut(shape, {0: axis}, replicated=not is_cut))
    first, real = (axis.runs[0].there, axis.runs[0].length) if axis.runs else (0, 0)
    if is_cut:
        model.token_embedding.lookup = _PartOfRows(first, real, tokens)
    if head is not None:
        head.part = VocabularyPart(first, real)
        if is_cut:
            group = regions.tensor_group()
            head.part = VocabularyPart(first, real, group.highest, group.total)
            head.input = regions.copy if tokens is None else tokens.gather


def _head(model: Decoder | Bert) -> VocabularyHead | None:
    """Returns the head that scores the vocabulary; class heads are small, and replicated."""
    head = model.head.decoder if isinstance(model.head, MaskedLanguageHead) else model.head
    return head if isinstance(head, VocabularyHead) else None


class _PartOfRows:
    """Looks up rows of an embedding of which this rank has some.

    Args:
        first: its first token id.
        real: number of its rows that are not padding.
        tokens: how tokens are split between layers; None if every rank has all.
    """

    def __init__(self, first: int, real: int, tokens: Tokens | None) -> None:
        self._first, self._last, self._tokens = first, first + real, tokens

    def __call__(self, ids_BT: Tensor, weight_VD: Tensor, pad_id: int | None = None) -> Tensor:
        elsewhere_BT = (ids_BT < self._first) | (ids_BT >= self._last)
        own_BT = (ids_BT - self._first).masked_fill(elsewhere_BT, 0)
        if pad_id is not None:
            pad_id = pad_id - self._first if self._first <= pad_id < self._last else None
        x_BTD = embed(own_BT, weight_VD, pad_id).masked_fill(elsewhere_BT.unsqueeze(-1), 0)
        if self._tokens is None:
            return regions.sum_parts(x_BTD)
        self._tokens.shape = ids_BT.shape[0], ids_BT.shape[1]
        return self._tokens.sum_and_scatter(x_BTD)


def token_losses(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """Computes the negative log-likelihood of every target, in nats, from vocabulary-split logits.

    Args:
        logits_BTV: this rank's part.
        target_ids_BT: the next token at each position.

    Returns:
        [B, T] in fp32, the same on every tensor-parallel rank.
    """
    library = comm.megatron().tensor_parallel
    return library.vocab_parallel_cross_entropy(logits_BTV.float(), target_ids_BT)


def parallelize_factors(layer: MuMoE, world: comm.World) -> None:
    """Splits the gate and all layers over the tensor-parallel ranks, in place.

    Args:
        layer: the layer on the meta device.
        world: this rank, with its tensor-parallel rank.
    """
    group = regions.tensor_group()
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
    factors: Factorized, name: str, shape: tuple[int, ...], group: regions.Group, *, is_first: bool
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


def _regions(factors: Factorized, group: regions.Group, *, is_first: bool) -> FactorRegions:
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
        named, exchange = FactorRegions(input=regions.copy), group.gather
    else:
        blocks = shapes["output_factor"][0] if axes["output_factor"] == 1 else 1
        named, exchange = FactorRegions(output=regions.sum_parts), group.sum_and_scatter
    if not factors.mixes_parts:
        # Every rank computes the mixed expert factors identically, and multiplies a part by them.
        named = named._replace(experts=regions.copy, core=lambda core: group.gather(core, 0))
    crossing = _by_blocks(exchange, blocks)
    if is_first == factors.mixes_parts:
        return named._replace(mixed=crossing)
    return named._replace(contracted=crossing)


def _by_blocks(crossing: Callable[[Tensor, int], Tensor], blocks: int) -> Region:
    """Applies an exchange to values of a token in blocks, where a rank has a part of each block.

    Args:
        crossing: the exchange, along an axis.
        blocks: number of blocks.
    """

    def crossed(narrow_MR: Tensor) -> Tensor:
        return crossing(narrow_MR.view(narrow_MR.shape[0], blocks, -1), 2).flatten(1)

    return crossed


def _cut_gate(layer: MuMoE, group: regions.Group) -> None:
    """Makes every rank keep some columns of the gate, and compute all scores.

    Gradients of coefficients are complete where those of the mixed vectors are summed. If R is
    mixed in parts, each rank has a part of the coefficients' gradient: either that is all-reduced,
    or it is propagated through the gate, whose backward is linear, to its input, whichever is
    smaller.
    """
    gate = layer.gate
    experts, width = gate.weight.shape
    if layer.up.mixes_parts and experts > width:
        gate.regions = GateRegions(input=regions.copy, weight=lambda part: group.gather(part, 1))
    else:
        gate.regions = GateRegions(weight=lambda part: group.gather_equal(part, 1))
        if layer.up.mixes_parts:
            gate.regions = gate.regions._replace(coefficients=regions.copy)
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
    layer.gate.agreed = regions.tensor_group().of_first
    cut(layer, "table", Placement.cut(tuple(layer.table.shape), {0: own}))
    first = own.runs[0].there

    def of_this_process(selected: Selected) -> tuple[Tensor, Tensor]:
        # The rows are local to this rank, and so are the gradients of their weights.
        weights_MK = regions.copy(selected.weights_NK)
        rows_MK = selected.expert_ids_NK - first
        is_own_MK = (rows_MK >= 0) & (rows_MK < own.size)
        return weights_MK * is_own_MK, torch.where(is_own_MK, rows_MK, 0)

    layer.own, layer.mixed = of_this_process, regions.sum_parts
