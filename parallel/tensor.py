"""Tensor parallelism: megatron-core's linear layers in place of a model's own.

The matrix products before a branch's nonlinearity are cut by output (attention by head), those
after it by input; the embedding and the output head of text are cut by vocabulary. A branch then
exchanges one sum of activations forward and one backward. Names of parameters stay, so initial
values and checkpoints are those of the whole model.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.attention import SelfAttention
from polyad.model.feedforward import DenseFeedForward
from polyad.parallel import comm
from polyad.parallel.megatron import tensor_parallel_library
from polyad.parallel.regions import own_random_numbers
from polyad.parallel.sequence import Tokens
from polyad.parallel.shard import Axis, Placement, cut
from polyad.parallel.vocabulary import cut_vocabulary


def parallelize_tensors(model: nn.Module, world: comm.World, tokens: Tokens | None = None) -> None:
    """Cuts the layers of a model over the tensor-parallel processes, in place.

    Of models of images, patch embedding and head are small, and each process has them whole; so are
    a BERT's heads but for their products with the vocabulary.

    Args:
        model: on the meta device.
        world: this process, with its tensor-parallel rank.
        tokens: of a GPT-2: how tokens are cut between these layers; None: every process has all.
    """
    cut_vocabulary(model, world, tokens)
    layers = _Layers(world, tokens)
    with torch.device("meta"):
        for layer in list(model.modules()):
            if isinstance(layer, SelfAttention):
                layer.add_module("qkv", layers.column(layer.qkv, fused=3))
                layer.add_module("projection", layers.row(layer.projection))
                layer.random_numbers = functools.partial(own_random_numbers, world)
            elif isinstance(layer, DenseFeedForward):  # others are cut in files of their own
                layer.add_module("up", layers.column(layer.up))
                layer.add_module("down", layers.row(layer.down))


class _Layers:
    """Makes the parallel twin of a linear layer, without values."""

    def __init__(self, world: comm.World, tokens: Tokens | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import ModelParallelConfig
        self.tokens = tokens
        self.rank, self.parts = world.tensor_parallel_rank, world.tensor_parallel_size
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
        """Cuts by output; what goes in is replicated, what comes out is cut."""
        made = _linear_classes()[0](
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            gather_output=False,
            **self.settings,
        )
        rows = Axis.part_of_each(layer.out_features, fused, self.rank, self.parts)
        return self._cut(made, layer, weight=(0, rows), bias=(0, rows))

    def row(self, layer: nn.Linear) -> nn.Module:
        """Cuts by input; what goes in is cut, what comes out is summed. The bias is added once."""
        made = _linear_classes()[1](
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            input_is_parallel=True,
            skip_bias_add=False,
            **self.settings,
        )
        columns = Axis.part(layer.in_features, self.rank, self.parts)
        return self._cut(made, layer, weight=(1, columns))

    def _cut(self, made: Any, layer: nn.Linear, **cuts: tuple[int, Axis]) -> nn.Module:
        for name, (number, axis) in cuts.items():
            if (whole := getattr(layer, name)) is not None:
                cut(made, name, Placement.cut(tuple(whole.shape), {number: axis}))
        made.lora, made.tokens = getattr(layer, "lora", None), self.tokens
        return made


@functools.cache
def _linear_classes() -> tuple[type, type]:
    """megatron-core's linear layers, cut by output and by input, used as those of torch.

    They return (output, bias); these return the output alone, with what LoRA adds to it
    (`parallel/adapters.py` cuts that). Where tokens are cut, `parallel/sequence.py` has the
    products: megatron-core's allocate on CUDA devices alone.
    """
    library: Any = tensor_parallel_library()

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

        def merged_weight(self) -> Tensor:
            """This process's columns, with what LoRA adds to them."""
            return self.weight if self.lora is None else self.weight + self.lora.merged()

    return ColumnParallelLinear, RowParallelLinear
