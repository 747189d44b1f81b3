"""Sequence parallelism: between split layers each tensor-parallel rank has some of the tokens.

Everything there (LayerNorms, dropout, the residual stream) works on each token separately, so the
tokens of a micro-batch, in order, are split into TP equal parts, with padding if TP does not divide
them. Instead of the all-reduces of tensor parallelism a branch gathers its input and
reduce-scatters its output, which is as many bytes. Factorized and sparse feed-forwards receive and
return whole activations. (megatron-core has the same, but only for CUDA devices.)

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
section 4.2.2.

Shapes: B batch, T tokens in a sequence, N = B T tokens, n tokens of a rank, D width. Between split
layers a rank has tensors of shape [1, n, D].
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from polyad.model.attention import Attention, LatentAttention
from polyad.model.block import Block
from polyad.model.decoder import Decoder
from polyad.model.feedforward import DenseFeedForward, FeedForward
from polyad.model.layers import embed
from polyad.model.mumoe.layer import MuMoE
from polyad.parallel import comm
from polyad.parallel.regions import Group, OwnDropout, tensor_group, wait


class Tokens:
    """The tokens of the current micro-batch, and how they are split.

    Args:
        world: this rank.
    """

    def __init__(self, world: comm.World) -> None:
        self._rank, self._parts = world.tensor_parallel_rank, world.tensor_parallel_size
        self._group = tensor_group()
        self.shape = (0, 0)
        """B and T, set by the embedding."""

    def padded(self, whole_ND: Tensor) -> Tensor:
        """Appends rows of zeros so that TP divides them."""
        rest = -whole_ND.shape[0] % self._parts
        return pad(whole_ND, (0, 0, 0, rest)) if rest else whole_ND

    def whole(self, padded_ND: Tensor) -> Tensor:
        """Returns [B, T, ...] from rows that may have padding at the end."""
        batch, length = self.shape
        return padded_ND[: batch * length].view(batch, length, -1)

    def own(self, values_N: Tensor) -> Tensor:
        """Returns this rank's part of one value per token."""
        size = -(-values_N.shape[0] // self._parts)
        padded_N = pad(values_N, (0, size * self._parts - values_N.shape[0]))
        return padded_N[self._rank * size : (self._rank + 1) * size]

    def gather(self, x_1nD: Tensor) -> Tensor:
        """Gathers all tokens [B, T, D]; for layers in which each rank has a part of the
        gradient."""
        return self.whole(self._group.gather(x_1nD.flatten(0, 1), 0))

    def gather_equal(self, x_1nD: Tensor) -> Tensor:
        """Gathers all tokens [B, T, D], for a layer that gives each rank the whole gradient."""
        return self.whole(self._group.gather_equal(x_1nD.flatten(0, 1), 0))

    def sum_and_scatter(self, part_BTD: Tensor) -> Tensor:
        """Reduce-scatters: returns this rank's tokens [1, n, D] of the sum of all parts."""
        rows_ND = self.padded(part_BTD.flatten(0, -2))
        return self._group.sum_and_scatter(rows_ND, 0).unsqueeze(0)

    def scatter(self, whole_BTD: Tensor) -> Tensor:
        """Returns this rank's tokens [1, n, D] of a tensor that each rank has whole."""
        return self._group.scatter(self.padded(whole_BTD.flatten(0, 1)), 0).unsqueeze(0)

    def positions(self, positions_T: Tensor, weight: Tensor, pad_id: int | None = None) -> Tensor:
        """Returns the position embedding of this rank's tokens [1, n, D].

        Args:
            positions_T: Positions of one sequence.
            weight: The embedding of all positions.
            pad_id: Always None.
        """
        positions_N = positions_T.repeat(self.shape[0])
        return embed(self.own(positions_N), weight).unsqueeze(0)

    def gathered_linear(self, x_1nD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        """Computes a linear layer, split by output, on all tokens: [B, T, F]. Saves local
        tokens."""
        y_NF = _GatheredLinear.apply(x_1nD.flatten(0, 1), weight_FD, self._group)
        return self.whole(y_NF if bias_F is None else y_NF + bias_F)


class _GatheredLinear(torch.autograd.Function):
    """Does not save the gathered input: backward gathers it again while the gradient of the input
    is computed; that gradient is reduced while the gradient of the weight is computed.
    """

    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, weight_FD: Tensor, group: Group) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_nD if of_weight else None, weight_FD if of_x else None)
        ctx.group = group
        return group.all_parts(x_nD) @ weight_FD.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_nD, weight_FD = ctx.saved_tensors
        coming_ND = leaving_nD = for_weight_FD = None
        if x_nD is not None:  # the weight is not frozen
            coming_ND = ctx.group.start_gather(x_nD)
            if not x_nD.is_cuda:  # gloo: two concurrent collectives have corrupted the heap
                coming_ND = wait(coming_ND)
        if weight_FD is not None:
            leaving_nD = ctx.group.start_sum(gradient_NF @ weight_FD)
        if coming_ND is not None:
            for_weight_FD = gradient_NF.t() @ wait(coming_ND)
        return None if leaving_nD is None else wait(leaving_nD), for_weight_FD, None


def cut_sequence(model: Decoder, tokens: Tokens, world: comm.World) -> None:
    """Makes the parts between the split layers of a model work on some of the tokens, in place.

    Args:
        model: the model on the meta device, with tensor-parallel layers that use `tokens`.
        tokens: how tokens are split.
        world: this rank.
    """
    if model.position_embedding is not None:
        model.position_embedding.lookup = tokens.positions
    inside: set[int] = set()
    for module in list(model.modules()):
        if isinstance(module, FeedForward) and not isinstance(module, DenseFeedForward):
            _surround(module, tokens)
            inside |= {id(each) for each in module.modules()}
    if model.last_token is not None:
        model.last_token.register_forward_pre_hook(
            lambda _, given: (tokens.gather_equal(given[0]), *given[1:])
        )
    owners: list[tuple[nn.Module, str]] = [(model, "dropout")]
    for module in model.modules():
        if isinstance(module, Attention):
            owners.append((module, "residual_dropout"))
        elif isinstance(module, DenseFeedForward) and id(module) not in inside:
            owners.append((module, "dropout"))
    for owner, name in owners:
        dropout = owner.get_submodule(name)
        assert isinstance(dropout, nn.Dropout)
        owner._modules[name] = OwnDropout(dropout.p, world)


def _surround(layer: FeedForward, tokens: Tokens) -> None:
    """Gives a feed-forward whole activations, and scatters its output."""
    wants_residual = isinstance(layer, MuMoE) and layer.config.gate_input == "residual"

    def gathered(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        normalized, residual, beside = given
        residual = tokens.gather_equal(residual) if wants_residual else residual
        if beside.attention is not None:
            output_BTD = tokens.gather_equal(beside.attention.output_BTD)
            trace = beside.attention._replace(output_BTD=output_BTD)
            beside = beside._replace(attention=trace)
        return tokens.gather_equal(normalized), residual, beside

    def scattered(_: nn.Module, given: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return tokens.scatter(result[0]), result[1]

    layer.register_forward_pre_hook(gathered)
    layer.register_forward_hook(scattered)


def sum_gradients(model: nn.Module) -> None:
    """All-reduces gradients of parameters that each rank has used only for its own tokens.

    Args:
        model: a model with storage, split by `cut_sequence`.
    """
    assert isinstance(model, Decoder)
    group = tensor_group()
    owners: list[nn.Module] = []
    if model.position_embedding is not None:
        owners.append(model.position_embedding)
    if model.last_token is None:  # otherwise the norm reads gathered sequences
        owners.append(model.final_norm)
    parameters: list[nn.Parameter] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        owners += [block.attention_norm, block.feed_forward_norm]
        if isinstance(block.attention, LatentAttention):
            names = ("query_down", "query_norm", "key_value_down", "key_value_norm")
            owners += [each for name, each in block.attention.named_children() if name in names]
        rows = [block.attention.projection]
        if isinstance(block.feed_forward, DenseFeedForward):
            rows.append(block.feed_forward.down)
        parameters += [row.bias for row in rows if row.bias is not None]
    parameters += [parameter for owner in owners for parameter in owner.parameters()]
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(group.total_in_fp32)
