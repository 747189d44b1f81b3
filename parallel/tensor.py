"""Tensor parallelism: megatron-core's layers in place of a model's own.

The matrix products before a branch's nonlinearity are cut by output (attention by head), those
after it by input; the embedding and the output head of text are cut by vocabulary. A branch then
exchanges one sum of activations forward and one backward. Names of parameters stay, so initial
values and checkpoints are those of the whole model.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this process, with padding).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from model.attention import SelfAttention
from model.bert import Bert
from model.bert_heads import MaskedLanguageHead
from model.dense import DenseFeedForward
from model.gpt2 import GPT2, UntiedHead
from model.kernels.linear_cross_entropy import VocabularyPart, losses, scores
from model.layers import Embedding, embed
from parallel import comm
from parallel.placement import Placement, split_columns, split_fused, split_padded


class CutTokens(Protocol):
    """How tokens are cut between the cut layers; see `parallel/sequence.py`."""

    shape: tuple[int, int]

    def gather(self, x_1nD: Tensor) -> Tensor:
        """All tokens."""

    def gathered_linear(self, x_1nD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        """A linear layer of all tokens."""

    def sum_and_scatter(self, part_BTD: Tensor) -> Tensor:
        """This process's tokens of the sum of all parts."""


def parallelize_tensors(
    model: nn.Module, world: comm.World, tokens: CutTokens | None = None
) -> None:
    """Cuts the layers of a model over the tensor-parallel processes, in place.

    Of models of images, patch embedding and head are small, and each process has them whole; so are
    a BERT's heads but for their products with the vocabulary.

    Args:
        model: on the meta device.
        world: this process, with its tensor-parallel rank.
        tokens: of a GPT-2: how tokens are cut between these layers; None: every process has all.
    """
    layers = _Layers(world, tokens)
    with torch.device("meta"):
        if isinstance(model, GPT2):
            embedding = layers.embedding(model.token_embedding)
            if model.last_token is None:  # a head of sequences is small, and each has it whole
                _swap(model, "head", layers.head(model.head, embedding))
            _swap(model, "token_embedding", embedding)
        elif isinstance(model, Bert):
            embedding = layers.embedding(model.token_embedding)
            if isinstance(model.head, MaskedLanguageHead):
                _swap(model.head, "decoder", layers.decoder(embedding))
            _swap(model, "token_embedding", embedding)
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, SelfAttention):
                    _swap(parent, name, TensorParallelAttention(layer, layers, world))
                elif isinstance(layer, DenseFeedForward):  # others are cut in files of their own
                    _swap(layer, "up", layers.column(layer.up))
                    _swap(layer, "down", layers.row(layer.down))


def pad_vocabulary(model: nn.Module) -> None:
    """Rounds the rows of the embedding and output head of text up, in place, where both are whole.

    As in a layout that cuts them the padding exists only here: no checkpoint and no count has it.

    Args:
        model: on the meta device.
    """
    if not isinstance(model, GPT2 | Bert):
        return
    shape = tuple(model.token_embedding.weight.shape)
    place = split_padded(shape, 0, 1)
    if place.shape == shape:
        return
    with torch.device("meta"):
        embedding = Embedding(place.shape[0], place.shape[1])
        embedding.weight.placement = place  # type: ignore[attr-defined]
        whole = VocabularyPart(0, shape[0], _same, _same)
        if isinstance(model, Bert):
            if isinstance(model.head, MaskedLanguageHead):
                decoder = _ParallelDecoder(_same, whole, place.shape[0])
                decoder.bias.placement = split_padded(shape[:1], 0, 1)  # type: ignore[attr-defined]
                _swap(model.head, "decoder", decoder)
        else:
            head = _ParallelHead(_same, whole)
            if isinstance(model.head, UntiedHead):
                head.weight = nn.Parameter(torch.empty(place.shape))
                head.weight.placement = place  # type: ignore[attr-defined]
            if model.last_token is None:
                _swap(model, "head", head)
    _swap(model, "token_embedding", embedding)


def _same(values: Tensor) -> Tensor:
    return values


def _swap(parent: nn.Module, name: str, layer: nn.Module) -> None:
    """Replaces a layer; the parallel one is not of the type that the attribute declares."""
    parent._modules[name] = layer


def placement_of(parameter: nn.Parameter) -> Placement:
    """Where a parameter's shard lies in the global tensor; the whole, unless it was cut."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 empties `shape`
    placement: Placement = getattr(parameter, "placement", None) or Placement.whole(shape)
    assert placement.shape == shape
    return placement


def token_losses(logits_BTV: Tensor, target_ids_BT: Tensor) -> Tensor:
    """Negative log-likelihood of every target, in nats, from logits cut by vocabulary.

    Args:
        logits_BTV: this process's part.
        target_ids_BT: the token that follows each position.

    Returns:
        [B, T] in fp32, the same on every tensor-parallel process.
    """
    losses: Tensor = tensor_parallel_library().vocab_parallel_cross_entropy(
        logits_BTV.float(), target_ids_BT
    )
    return losses


@contextmanager
def own_random_numbers(world: comm.World) -> Iterator[None]:
    """Random numbers of this process's own, for dropout of activations that are cut.

    All tensor-parallel processes draw the same numbers otherwise, since what they drop there is
    replicated. The seed is drawn from those, so recomputation finds the same numbers again.
    """
    seed = int(torch.randint(2**31 - world.tensor_parallel_size, ()))
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + world.tensor_parallel_rank)
        yield


def tensor_parallel_library() -> Any:
    """`megatron.core.tensor_parallel`, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import tensor_parallel
    return tensor_parallel


def tensor_parallel_group() -> Any:
    """The processes that share this one's layers."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


class _Layers:
    """Makes the parallel twin of a layer, on the current default device, without values."""

    def __init__(self, world: comm.World, tokens: CutTokens | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import ModelParallelConfig
        self.tokens = tokens
        self.rank, self.parts = world.tensor_parallel_rank, world.tensor_parallel_size
        self.parallel = tensor_parallel_library()
        self.settings = {
            "config": ModelParallelConfig(
                tensor_model_parallel_size=self.parts,
                use_cpu_initialization=True,
                perform_initialization=False,
                params_dtype=torch.float32,
            ),
            "init_method": nn.init.zeros_,
        }

    def column(self, layer: nn.Linear, fused: int = 1) -> nn.Module:
        """Cut by output; what goes in is replicated, what comes out is cut."""
        made = _column_class(self.parallel.ColumnParallelLinear, self.tokens)(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            gather_output=False,
            **self.settings,
        )
        cut(made.weight, split_fused(tuple(layer.weight.shape), fused, self.rank, self.parts))
        if layer.bias is not None:
            cut(made.bias, split_fused(tuple(layer.bias.shape), fused, self.rank, self.parts))
        made.lora = getattr(layer, "lora", None)
        return made

    def row(self, layer: nn.Linear) -> nn.Module:
        """Cut by input; what goes in is cut, what comes out is summed. The bias is added once."""
        made = _row_class(self.parallel.RowParallelLinear, self.tokens)(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            input_is_parallel=True,
            skip_bias_add=False,
            **self.settings,
        )
        cut(made.weight, split_columns(tuple(layer.weight.shape), 1, self.rank, self.parts))
        made.lora = getattr(layer, "lora", None)
        return made

    def embedding(self, layer: nn.Embedding) -> nn.Module:
        """Cut by vocabulary, padded to equal parts."""
        place = split_padded(tuple(layer.weight.shape), self.rank, self.parts)
        padded = place.shape[0] * self.parts
        made = _embedding_class(self.parallel, self.tokens)(
            padded, layer.embedding_dim, **self.settings
        )
        cut(made.weight, place)
        return made

    def head(self, layer: nn.Module, embedding: nn.Module) -> nn.Module:
        """The output head, on the embedding's part or cut as the embedding is."""
        place, part = self._part(embedding)
        copy = self.parallel.copy_to_tensor_model_parallel_region
        made = _ParallelHead(copy if self.tokens is None else self.tokens.gather, part)
        if isinstance(layer, UntiedHead):
            made.weight = nn.Parameter(torch.empty(place.shape))
            cut(made.weight, place)
        return made

    def decoder(self, embedding: nn.Module) -> nn.Module:
        """The last product of a masked language model's head, cut as the embedding is."""
        place, part = self._part(embedding)
        rows = place.global_shape[:1]
        made = _ParallelDecoder(
            self.parallel.copy_to_tensor_model_parallel_region, part, place.shape[0]
        )
        cut(made.bias, split_padded(rows, self.rank, self.parts))
        return made

    def _part(self, embedding: nn.Module) -> tuple[Placement, VocabularyPart]:
        """Where the rows of a cut embedding are, and which of the vocabulary they are."""
        weight = embedding.weight
        assert isinstance(weight, nn.Parameter)
        place = placement_of(weight)
        real = sum(piece.num_rows for piece in place.pieces)
        first = place.pieces[0].origin[0] if real else 0
        return place, VocabularyPart(first, real, _highest, _total)


def cut(parameter: nn.Parameter, placement: Placement) -> None:
    """Marks a parameter as this process's part of a global tensor.

    Args:
        parameter: of the shard's shape.
        placement: the shard in the global tensor.
    """
    parameter.placement = placement  # type: ignore[attr-defined]
    # DeepSpeed reads this attribute: the norm of such a parameter is summed over the processes.
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


# megatron's layers return (output, bias); these return the output alone, as a layer of torch, with
# what LoRA adds to it. `parallel/adapters.py` cuts that.


def _column_class(kind: type, tokens: CutTokens | None) -> type:
    class ColumnParallelLinear(kind):
        def forward(self, x: Tensor) -> Tensor:
            if tokens is None:
                y = super().forward(x)[0]
            else:
                y = tokens.gathered_linear(x, self.weight, self.bias)
            return y if self.lora is None else y + self.lora(x)

    return ColumnParallelLinear


def _row_class(kind: type, tokens: CutTokens | None) -> type:
    class RowParallelLinear(kind):
        def forward(self, x: Tensor) -> Tensor:
            if tokens is None:
                y = super().forward(x)[0]
            else:
                y = tokens.sum_and_scatter(linear(x, self.weight))
                y = y if self.bias is None else y + self.bias
            return y if self.lora is None else y + self.lora(x)

        def merged_weight(self) -> Tensor:
            """This process's columns, with what LoRA adds to them."""
            return self.weight if self.lora is None else self.weight + self.lora.merged()

    return RowParallelLinear


def _embedding_class(library: Any, tokens: CutTokens | None) -> type:
    """megatron-core's embedding, its rows and their gradients as in `model/layers.py`."""

    class VocabParallelEmbedding(library.VocabParallelEmbedding):
        def forward(self, ids_BT: Tensor) -> Tensor:
            elsewhere_BT = (ids_BT < self.vocab_start_index) | (ids_BT >= self.vocab_end_index)
            own_BT = (ids_BT - self.vocab_start_index).masked_fill(elsewhere_BT, 0)
            x_BTD = embed(own_BT, self.weight).masked_fill(elsewhere_BT.unsqueeze(-1), 0)
            if tokens is None:
                return library.reduce_from_tensor_model_parallel_region(x_BTD)
            tokens.shape = ids_BT.shape[0], ids_BT.shape[1]
            return tokens.sum_and_scatter(x_BTD)

    return VocabParallelEmbedding


def _highest(values: Tensor) -> Tensor:
    group = tensor_parallel_group()
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def _total(values: Tensor) -> Tensor:
    dist.all_reduce(values, group=tensor_parallel_group())
    return values


class _ParallelHead(nn.Module):
    """The output head: logits of this process's part of the vocabulary, or a loss over all parts.

    Args:
        copy: identity, whose gradient is summed over the tensor-parallel processes.
        part: this process's.
    """

    weight: nn.Parameter | None

    def __init__(self, copy: Callable[[Tensor], Tensor], part: VocabularyPart) -> None:
        super().__init__()
        self._copy, self._part = copy, part
        self.register_parameter("weight", None)  # of its own, unless the embedding is the head

    def forward(
        self, x_BTD: Tensor, embedding_VD: Tensor | None, target_ids_BT: Tensor | None = None
    ) -> Tensor:
        weight_VD = self.weight if embedding_VD is None else embedding_VD
        assert weight_VD is not None
        if target_ids_BT is not None:
            return losses(self._copy(x_BTD), weight_VD, target_ids_BT, self._part)
        return self._real(linear(self._copy(x_BTD), weight_VD))

    def _real(self, logits_BTV: Tensor) -> Tensor:
        """Logits without those of padding, or with the lowest number in their place."""
        if self._copy is _same:
            return logits_BTV[..., : self._part.real]
        rows = logits_BTV.shape[-1]
        if self._part.real == rows:
            return logits_BTV
        padding_V = torch.arange(rows, device=logits_BTV.device) >= self._part.real
        return logits_BTV.masked_fill(padding_V, torch.finfo(logits_BTV.dtype).min)


class _ParallelDecoder(_ParallelHead):
    """The last product of a masked language model's head, with its part of the bias.

    Args:
        copy: as `_ParallelHead` has it.
        part: this process's.
        rows: of that part, with padding.
    """

    bias: nn.Parameter

    def __init__(self, copy: Callable[[Tensor], Tensor], part: VocabularyPart, rows: int) -> None:
        super().__init__(copy, part)
        self.bias = nn.Parameter(torch.empty(rows))

    def forward(
        self, x_BTD: Tensor, embedding_VD: Tensor | None, target_ids_BT: Tensor | None = None
    ) -> Tensor:
        assert embedding_VD is not None
        if target_ids_BT is not None:
            return scores(self._copy(x_BTD), embedding_VD, target_ids_BT, self._part, self.bias)
        return self._real(linear(self._copy(x_BTD), embedding_VD, self.bias))


class TensorParallelAttention(SelfAttention):
    """Attention of this process's heads.

    Args:
        whole: all heads, on the meta device.
        layers: what makes its projections.
        world: this process.
    """

    def __init__(self, whole: SelfAttention, layers: _Layers, world: comm.World) -> None:
        super().__init__(
            hidden_size=whole.qkv.in_features,
            num_heads=whole.qkv.in_features // whole.head_size,
            bias=whole.qkv.bias is not None,
            dropout=whole.dropout,
            initializer_std=whole.initializer_std,
            residual_std=whole.residual_std,
            causal=whole.causal,
        )
        self._world = world
        _swap(self, "qkv", layers.column(whole.qkv, fused=3))
        _swap(self, "projection", layers.row(whole.projection))

    def attend(
        self,
        q_BATH: Tensor,
        k_BATH: Tensor,
        v_BATH: Tensor,
        drop: float,
        mask_BT: Tensor | None = None,
    ) -> Tensor:
        """See `SelfAttention.attend`; other heads drop other weights."""
        if not drop:
            return super().attend(q_BATH, k_BATH, v_BATH, drop, mask_BT)
        with own_random_numbers(self._world):
            return super().attend(q_BATH, k_BATH, v_BATH, drop, mask_BT)


class Mpu:
    """The interface that DeepSpeed asks about tensor parallelism, answered by megatron-core."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def get_model_parallel_group(self) -> Any:
        """Processes that share every layer."""
        return self._state.get_tensor_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        """This process's rank among those."""
        return self._state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """The number of processes that share every layer."""
        return self._state.get_tensor_model_parallel_world_size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        """Processes that hold the same part of the model and see different samples."""
        return self._state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        """This process's rank among those that see different samples."""
        return self._state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        """The number of processes that see different samples."""
        return self._state.get_data_parallel_world_size()
