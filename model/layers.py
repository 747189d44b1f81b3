"""Layers of blocks; regions, the places where ranks that share a layer exchange tensors; padding.

A layer that can be split names its regions. Each is a differentiable function of a tensor, by
default the identity: model code is single-process. `parallelize` installs collectives there.

Embedding and LayerNorm sum their gradients over tokens in fp32, also in bf16.

PyTorch sums the gradients of embedding rows in the weights' precision (on a GPU too, for up to
3,072 tokens), and on a CPU those of LayerNorm's scale and shift. In bf16 a sum of equal numbers
stops growing at 256 times one of them.

Sequences are padded on the right. Token-wise computations may include padding, whose results are
never read; routing uses only the real rows, so that padding reaches no expert and no statistic.

Shapes: B samples, T tokens of a sample with its padding, M = B T rows, N real ones of them, V rows
of an embedding, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, linear

from polyad.model.initialization import ONES, ZEROS, Initializer, constant
from polyad.model.kernels.switch import on_cpu

Region: TypeAlias = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Returns its input: in one process there is nothing to exchange."""
    return x


class Embedding(nn.Embedding):
    """PyTorch's Embedding with initial values of its own, and gradients summed in fp32.

    Args:
        rows: V.
        width: D.
        start: The initializer of the matrix.
        pad_id: A row that starts at zero and gets no gradient; None if there is none.
    """

    def __init__(
        self, rows: int, width: int, start: Initializer, pad_id: int | None = None
    ) -> None:
        # Random values would be overwritten, and on the meta device drawing them imports a
        # compiler.
        super().__init__(rows, width, _weight=torch.zeros(rows, width))
        self.start, self.pad_id = start, pad_id
        self.lookup: Callable[[Tensor, Tensor, int | None], Tensor] = embed
        """Maps row numbers, the matrix and `pad_id` to rows; replaced if ranks share the rows or
        the tokens."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the matrix."""
        return {"weight": self.start.without_row(self.pad_id)}

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers, [..., D]."""
        return self.lookup(ids, self.weight, self.pad_id)


def embed(ids: Tensor, weight_VD: Tensor, pad_id: int | None = None) -> Tensor:
    """Looks up rows of a matrix; the gradient of each is summed in fp32 at least, and rounded once.

    Args:
        ids: Row numbers, [...].
        weight_VD: The matrix.
        pad_id: A row that gets no gradient; None if there is none.

    Returns:
        [..., D].
    """
    rows: Tensor = _Embed.apply(ids, weight_VD, pad_id)  # type: ignore[no-untyped-call]
    return rows


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, pad_id: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.pad_id = weight_VD.shape[0], -1 if pad_id is None else pad_id
        return embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        summed = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        for_weight_VD = torch.ops.aten.embedding_dense_backward(
            summed, ids, ctx.num_rows, ctx.pad_id, False
        )
        return None, for_weight_VD.to(gradient.dtype), None


class Linear(nn.Linear):
    """PyTorch's Linear with initial values of its own, and an adapter if there is one.

    Args:
        inputs: Number of input values.
        outputs: Number of output values.
        start: The initializer of the weight.
        bias: Whether it has a bias.
        start_bias: The initializer of the bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        start: Initializer,
        *,
        bias: bool = True,
        start_bias: Initializer = ZEROS,
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.start, self.start_bias = start, start_bias
        self.lora: Any = None
        """LoRA's adapter of the weight; see `model/lora.py`."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of the weight and the bias."""
        return {"weight": self.start, "bias": self.start_bias}

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer and its adapter."""
        y = linear(x, self.weight, self.bias)
        return y if self.lora is None else y + self.lora(x)

    def merged_weight(self) -> Tensor:
        """Returns the weight plus the adapter's update of it, [O, I]."""
        return self.weight if self.lora is None else self.weight + self.lora.merged()


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm, with gradients summed in fp32 on a CPU as well."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: unit scale and zero shift."""
        return {"weight": ONES, "bias": ZEROS}

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        if x.dtype != torch.bfloat16 or not on_cpu(x):
            return super().forward(x)
        scale, shift = (None if p is None else p.float() for p in (self.weight, self.bias))
        return layer_norm(x.float(), self.normalized_shape, scale, shift, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) times a learned scale; computed in fp32 at least.

    Source: Zhang & Sennrich 2019, "Root mean square layer normalization".

    Args:
        size: Size of the last dimension.
        epsilon: Epsilon added to the mean square.
        rounded_last: Whether to round to bf16 after applying the scale, as in gpt-oss, rather than
            before, as in Llama. The difference is below one unit in the last place.
    """

    def __init__(self, size: int, epsilon: float, *, rounded_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon, self.rounded_last = epsilon, rounded_last
        self.mean: Region = same
        """The mean over ranks that each have a part of the last dimension."""
        self.shared: Region = same
        """Applied to the scale, for which each rank has the gradient of its own heads."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the scale: ones."""
        return {"weight": ONES}

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = self.mean(wide.square().mean(-1, keepdim=True))
        normalized = wide * torch.rsqrt(mean_square + self.epsilon)
        weight = self.shared(self.weight)
        if self.rounded_last:
            return (weight * normalized).to(x.dtype)
        return weight * normalized.to(x.dtype)


class DropPath(nn.Module):
    """Stochastic depth: a branch is skipped for some images (Huang et al. 2016).

    The rate is in a non-persistent buffer: for a plain number, which differs in each block, a
    compiler would make one program per block.

    Args:
        rate: The probability of skipping; remaining outputs are divided by 1 - rate. None if no
            block of the model has stochastic depth; then nothing is drawn.
        multiplier: Factor of the outputs, in training and evaluation.
    """

    keep: Tensor | None

    def __init__(self, rate: float | None, multiplier: float = 1.0) -> None:
        super().__init__()
        keep = None if rate is None else torch.tensor(1 - rate)
        self.register_buffer("keep", keep, persistent=False)
        self._initial = constant(1.0 if rate is None else 1 - rate)
        self.multiplier = multiplier

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the fraction of images that keep the branch."""
        return {"keep": self._initial}

    def forward(self, y_BTD: Tensor) -> Tensor:
        """Returns what is added to the residual stream: the branch's output, or zeros."""
        if self.keep is not None and self.training:
            drawn_B11 = torch.rand(len(y_BTD), 1, 1, device=y_BTD.device)  # always less than 1
            kept_B11 = (drawn_B11 < self.keep) / self.keep
            y_BTD = y_BTD * kept_B11.to(y_BTD.dtype)
        return y_BTD if self.multiplier == 1 else y_BTD * self.multiplier


class RealTokens(NamedTuple):
    """The real tokens of a batch."""

    mask_BT: Tensor
    """True for real tokens."""
    rows_N: Tensor
    """Their row numbers among the B T rows, ascending."""

    @classmethod
    def of(cls, mask_BT: Tensor | None) -> "RealTokens | None":
        """Finds the real tokens, once per forward pass, since a GPU has to synchronize for their
        number.

        Args:
            mask_BT: True for real tokens; None if all are real.

        Returns:
            The real tokens; None if `mask_BT` is None.
        """
        if mask_BT is None:
            return None
        return cls(mask_BT, mask_BT.flatten().nonzero().squeeze(1))


def pack(x_MD: Tensor, real: RealTokens | None) -> Tensor:
    """Selects the rows of real tokens, [N, D].

    Args:
        x_MD: Rows of all tokens.
        real: The real tokens; None if all are real.
    """
    return x_MD if real is None else x_MD.index_select(0, real.rows_N)


def unpack(y_ND: Tensor, real: RealTokens | None) -> Tensor:
    """Restores the rows of all tokens, [M, D], with zeros for padding.

    Args:
        y_ND: Rows of real tokens.
        real: The real tokens; None if all are real.
    """
    if real is None:
        return y_ND
    whole_MD = y_ND.new_zeros(real.mask_BT.numel(), *y_ND.shape[1:])
    return whole_MD.index_copy(0, real.rows_N, y_ND)


class LastToken(nn.Module):
    """Selects the vector of the last real token of each sequence.

    A module, so that sequence parallelism can give it all tokens.
    """

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Selects them, [B, D].

        Args:
            x_BTD: The vectors of all tokens.
            mask_BT: True for real tokens, which precede the padding; None if all are real.
        """
        if mask_BT is None:
            return x_BTD[:, -1]
        last_B = mask_BT.sum(1) - 1
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]
