"""Tensor parallelism: megatron-core's layers in place of a model's own.

The matrix products before a branch's nonlinearity are cut by output (attention by head), those
after it by input; the embedding and the output head of text are cut by vocabulary. A branch then
exchanges one sum of activations forward and one backward. Names of parameters stay, so initial
values and checkpoints are those of the whole model.

Shapes: B batch, T tokens in a sequence, D width, V vocabulary (of this process, with padding).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.attention import SelfAttention
from polyad.model.bert import Bert
from polyad.model.feedforward import DenseFeedForward
from polyad.model.gpt2 import GPT2, UntiedHead
from polyad.model.heads import MaskedLanguageHead
from polyad.model.layers import embed
from polyad.parallel import comm
from polyad.parallel.megatron import tensor_parallel_library
from polyad.parallel.placement import cut, split_columns, split_fused, split_padded
from polyad.parallel.vocabulary import ParallelDecoder, ParallelHead, part_of


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
                model.add_module("head", layers.head(model.head, embedding))
            model.add_module("token_embedding", embedding)
        elif isinstance(model, Bert):
            embedding = layers.embedding(model.token_embedding)
            if isinstance(model.head, MaskedLanguageHead):
                model.head.add_module("decoder", layers.decoder(embedding))
            model.add_module("token_embedding", embedding)
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, SelfAttention):
                    parent.add_module(name, TensorParallelAttention(layer, layers, world))
                elif isinstance(layer, DenseFeedForward):  # others are cut in files of their own
                    layer.add_module("up", layers.column(layer.up))
                    layer.add_module("down", layers.row(layer.down))


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
        place, part = part_of(embedding)
        copy = self.parallel.copy_to_tensor_model_parallel_region
        made = ParallelHead(copy if self.tokens is None else self.tokens.gather, part)
        if isinstance(layer, UntiedHead):
            made.weight = nn.Parameter(torch.empty(place.shape))
            cut(made.weight, place)
        return made

    def decoder(self, embedding: nn.Module) -> nn.Module:
        """The last product of a masked language model's head, cut as the embedding is."""
        place, part = part_of(embedding)
        rows = place.global_shape[:1]
        made = ParallelDecoder(
            self.parallel.copy_to_tensor_model_parallel_region, part, place.shape[0]
        )
        cut(made.bias, split_padded(rows, self.rank, self.parts))
        return made


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
        self.add_module("qkv", layers.column(whole.qkv, fused=3))
        self.add_module("projection", layers.row(whole.projection))

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
