"""Rows of tokens, sorted by expert: they are selected, run through the experts of a layer (up, GELU
(tanh), down; optionally with a gate layer), and summed for each token.

The reference computes one expert after the other. Faster are one operation over all of them on a
CPU with GELU (`cpu_experts.py`), and torch's grouped products everywhere else. On GPUs below
compute capability 9.0, and in fp32, these wait for the counts.

Autograd's gradient of an index adds rows atomically, on a GPU in any order, and in bf16 with a
rounding for each. Here the inverse of the permutation is known, so that both directions only read.
Assignment a = n K + k is the k-th expert of token n.

Shapes: N tokens, K experts of a token, M = N K rows of as many assignments (A), E experts, D width,
F inner width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, grouped_mm

from polyad.model.kernels import switch
from polyad.model.kernels.cpu_experts import experts_on_cpu, has_gelu

Drop: TypeAlias = Callable[[Tensor], Tensor]
"""An elementwise function of inner units, such as dropout."""


class ExpertWeights(NamedTuple):
    """The stacked weights of the experts of a layer."""

    up: Tensor
    """[E, D, F]; or [E, D, 2 F], which has the gate's columns before its own."""
    up_bias: Tensor | None
    """[E, F], or [E, 2 F]."""
    down: Tensor
    """[E, F, D]."""
    gate: Tensor | None = None
    """[E, D, F]; None if the activation has no gate, or `up` has its columns."""
    gate_bias: Tensor | None = None
    """[E, F]."""
    low_rank: tuple[Tensor, ...] = ()
    """LoRA's adapters of the experts: A and B of up, down, and a gate; see `model/lora.py`."""


def grouped(
    rows_MD: Tensor,
    weights: ExpertWeights,
    counts_E: Tensor,
    activation: Callable[..., Tensor] | None = None,
    drop: Drop | None = None,
) -> Tensor:
    """Runs every row through its expert, by the fastest implementation.

    Args:
        rows_MD: All rows of expert 0, then all of expert 1, and so on.
        weights: The weights of all experts.
        counts_E: Number of rows of each expert; may be 0. There may be further rows.
        activation: The activation of the first layer's output, or with a gate layer a function of
            the gate's and the first layer's output; None for GELU approximated by tanh.
        drop: Applied to the inner units after the activation; None for nothing.

    Returns:
        [M, D], in the same order. Rows after the last expert's hold arbitrary values, and so do
        their gradients.
    """
    is_plain = activation is None and drop is None and not weights.low_rank
    is_fast = switch.on_cpu(rows_MD) and has_gelu(rows_MD.dtype)
    if is_plain and is_fast and not switch.REFERENCE and not torch.compiler.is_compiling():
        return experts_on_cpu(rows_MD, *weights[:3], counts_E)
    inner_MF = inner_units(rows_MD, weights, counts_E, activation)
    inner_MF = drop(inner_MF) if drop else inner_MF
    return grouped_linear(inner_MF, weights.down, counts_E, None, weights.low_rank[2:4])


def inner_units(
    rows_MD: Tensor,
    weights: ExpertWeights,
    counts_E: Tensor,
    activation: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Computes the inner units of each row's expert after the activation, [M, F]; see `grouped`."""
    low_rank = weights.low_rank
    inner_MF = grouped_linear(rows_MD, weights.up, counts_E, weights.up_bias, low_rank[:2])
    if weights.gate is not None:
        gate_MF = grouped_linear(rows_MD, weights.gate, counts_E, weights.gate_bias, low_rank[4:])
    elif inner_MF.shape[1] > weights.down.shape[1]:
        gate_MF, inner_MF = inner_MF.chunk(2, 1)
    else:
        return activation(inner_MF) if activation else gelu(inner_MF, approximate="tanh")
    assert activation is not None
    return activation(gate_MF, inner_MF)


def grouped_linear(
    rows_MD: Tensor,
    weight_EDF: Tensor,
    counts_E: Tensor,
    bias_EF: Tensor | None = None,
    low_rank: tuple[Tensor, ...] = (),
) -> Tensor:
    """Multiplies every row by its expert's matrix.

    Args:
        rows_MD: As in `grouped`.
        weight_EDF: The matrix of each expert.
        counts_E: As in `grouped`.
        bias_EF: Bias of each expert; None for none.
        low_rank: The two matrices of an adapter, whose product is added to each matrix.

    Returns:
        [M, F], in the same order; rows after the last expert's hold arbitrary values.
    """
    if low_rank:
        whole_MF = grouped_linear(rows_MD, weight_EDF, counts_E, bias_EF)
        narrow_Mr = grouped_linear(rows_MD, low_rank[0], counts_E)
        return whole_MF + grouped_linear(narrow_Mr, low_rank[1], counts_E)
    if switch.REFERENCE and switch.can_read():
        counts = counts_E.tolist()
        *of_each, rest_MD = torch.split(rows_MD, [*counts, len(rows_MD) - sum(counts)])
        outputs = [x @ weight for x, weight in zip(of_each, weight_EDF.unbind(0), strict=True)]
        if bias_EF is not None:
            outputs = [y + bias for y, bias in zip(outputs, bias_EF.unbind(0), strict=True)]
        return torch.cat([*outputs, rest_MD.new_zeros(len(rest_MD), weight_EDF.shape[2])])
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    output_MF: Tensor = _grouped_mm(rows_MD, weight_EDF, offsets_E)
    if bias_EF is None:
        return output_MF
    bias_MF: Tensor = _OfEachRow.apply(bias_EF, offsets_E, len(rows_MD))  # type: ignore[no-untyped-call]
    return output_MF + bias_MF


def _takes_grouped(x: Tensor) -> bool:
    """Returns whether torch's grouped product supports this tensor: not float64, and rows or
    columns of a multiple of 16 bytes."""
    one, *steps = sorted(x.stride())
    whole = all(step * x.element_size() % 16 == 0 for step in steps)
    return one == 1 and whole and x.dtype != torch.float64


def _aligned(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy aligned to 16 bytes as torch's grouped product requires.
    Weights may be anywhere in a flat tensor, after others of odd sizes."""
    return x.clone() if x.data_ptr() % 16 else x


def _by_loop(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """Reference implementation of the grouped product; reads the offsets from the device."""
    product = torch.zeros_like(_like_grouped_mm(a, b, offsets_E))
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if b.dim() == 3:
            product[start:end] = a[start:end] @ b[expert]
        else:
            product[expert] = a[:, start:end] @ b[start:end]
        start = end
    return product


class _OfEachRow(torch.autograd.Function):
    """The bias of each row's expert, [M, F], with its own backward pass: autograd would sum the
    rows of an expert one by one, in bf16 and on a GPU in any order. A product with ones sums them
    in fp32.
    """

    @staticmethod
    def forward(ctx: Any, bias_EF: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(offsets_E)
        rows_M = torch.arange(num_rows, device=bias_EF.device, dtype=offsets_E.dtype)
        expert_M = torch.searchsorted(offsets_E, rows_M, right=True)
        return bias_EF.index_select(0, expert_M.clamp_max(len(bias_EF) - 1))

    @staticmethod
    def backward(ctx: Any, gradient_MF: Tensor) -> tuple[Tensor, None, None]:
        (offsets_E,) = ctx.saved_tensors
        # The grouped product needs rows of a multiple of 16 bytes, hence 8 equal columns of ones.
        ones_8M = gradient_MF.new_ones(gradient_MF.shape[0], 8).t()
        sums_E8F = _grouped_mm(ones_8M, gradient_MF.contiguous(), offsets_E)
        return sums_E8F[:, 0], None, None


# grouped_mm supports fp32, but torch.compile and the meta device assume bf16 only (PyTorch 2.13).
# As a custom operation it defines its own output, a rank without rows calls no kernel, and a
# compiler does not see a loop over numbers of rows. With the exact strides that a custom operation
# asks for by default, Inductor would write its inputs again for every use.
@torch.library.custom_op("polyad::grouped_mm", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    """[M, D] with [E, D, F] is [M, F]; [D, M] with [M, F] is [E, D, F]."""
    if b.dim() == 3:
        a = a.contiguous()
    else:
        a, b = a.t().contiguous().t(), b.contiguous()
    if not a.numel():
        return torch.zeros_like(_like_grouped_mm(a, b, offsets_E))
    if not (_takes_grouped(a) and _takes_grouped(b)):
        return _by_loop(a, b, offsets_E)
    product = grouped_mm(_aligned(a), _aligned(b), offs=offsets_E).contiguous()
    # On these GPUs torch leaves sums over no rows uninitialized (pytorch/pytorch#172439).
    if b.dim() == 2 and a.is_cuda and torch.cuda.get_device_capability(a.device)[0] >= 10:
        empty_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
        product.masked_fill_(empty_E[:, None, None], 0)
    return product


def _like_grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(offsets_E.shape[0], a.shape[0], b.shape[1])


_grouped_mm.register_fake(_like_grouped_mm)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    a, b, offsets_E = inputs
    of_a, of_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if of_b else None, b if of_a else None, offsets_E)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offsets_E = ctx.saved_tensors
    gradient, for_a, for_b = gradient.contiguous(), None, None
    if b is not None and b.dim() == 3:
        for_a = _grouped_mm(gradient, b.mT, offsets_E)
    elif b is not None:
        for_a = _grouped_mm(b, gradient.mT, offsets_E).t()
    if a is not None:  # the matrices are not frozen
        for_b = _grouped_mm(a.t(), gradient, offsets_E)
    return for_a, for_b, None


_grouped_mm.register_autograd(_differentiate, setup_context=_keep)


# Rows of tokens.


def take_by_definition(tokens_ND: Tensor, assignment_M: Tensor, top_k: int) -> Tensor:
    """`take` in plain PyTorch."""
    return tokens_ND.index_select(0, assignment_M if top_k == 1 else assignment_M // top_k)


def combine_by_definition(rows_MD: Tensor, weights_NK: Tensor, row_A: Tensor) -> Tensor:
    """`combine` in plain PyTorch."""
    return (weights_NK.unsqueeze(-1) * _by_token(rows_MD, row_A, weights_NK.shape[1])).sum(1)


def _by_token(rows_MD: Tensor, row_A: Tensor, top_k: int) -> Tensor:
    """Returns the rows of each token, [N, K, D]."""
    return rows_MD.index_select(0, row_A).view(-1, top_k, rows_MD.shape[1])


def take(tokens_ND: Tensor, assignment_M: Tensor, row_A: Tensor, top_k: int) -> Tensor:
    """Selects the token of each row.

    Args:
        tokens_ND: Tokens.
        assignment_M: The assignment of each row.
        row_A: The row of each assignment: the inverse permutation.
        top_k: K; with 1 rows are only reordered.

    Returns:
        [M, D].
    """
    if switch.REFERENCE:
        return take_by_definition(tokens_ND, assignment_M, top_k)
    rows_MD: Tensor = _Take.apply(tokens_ND, assignment_M, row_A, top_k)  # type: ignore[no-untyped-call]
    return rows_MD


def combine(rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor) -> Tensor:
    """Computes the weighted sum of the rows of each token.

    Args:
        rows_MD: Rows.
        weights_NK: The weights of each token's rows, in the same dtype.
        assignment_M: See `take`.
        row_A: See `take`.

    Returns:
        [N, D].
    """
    if switch.REFERENCE:
        return combine_by_definition(rows_MD, weights_NK, row_A)
    y_ND: Tensor = _Combine.apply(rows_MD, weights_NK, assignment_M, row_A)  # type: ignore[no-untyped-call]
    return y_ND


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_ND: Tensor, assignment_M: Tensor, row_A: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(row_A)
        ctx.top_k = top_k
        return take_by_definition(tokens_ND, assignment_M, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (row_A,) = ctx.saved_tensors
        rows_NKD = _by_token(gradients[0], row_A, ctx.top_k)
        # With one row for a token nothing is summed.
        return rows_NKD.squeeze(1) if ctx.top_k == 1 else rows_NKD.sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, weights_NK: Tensor, assignment_M: Tensor, row_A: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_NK, assignment_M, row_A)
        if torch.compiler.is_compiling():  # one kernel, whose products and sums are in fp32
            return combine_by_definition(rows_MD, weights_NK, row_A)
        rows_NKD = _by_token(rows_MD, row_A, weights_NK.shape[1])
        y_ND = torch.bmm(weights_NK.unsqueeze(1), rows_NKD).squeeze(1)
        return y_ND.to(rows_MD.dtype)  # under autocast it is in another precision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_MD, weights_NK, assignment_M, row_A = ctx.saved_tensors
        (gradient_ND,), (of_rows, of_weights, *_) = gradients, ctx.needs_input_grad
        for_rows_MD = for_weights_NK = None
        token_M = assignment_M // weights_NK.shape[1]
        weight_M = weights_NK.reshape(-1).index_select(0, assignment_M)
        # The gradient of each row's token is used for both.
        gradient_MD = gradient_ND.index_select(0, token_M)
        if of_rows:
            for_rows_MD = gradient_MD * weight_M.unsqueeze(1)
        if of_weights:
            if torch.compiler.is_compiling():  # see `forward`
                products_M = (rows_MD * gradient_MD).sum(1)
            else:
                products_M = torch.bmm(rows_MD.unsqueeze(1), gradient_MD.unsqueeze(2)).view(-1)
            for_weights_NK = products_M.index_select(0, row_A).view_as(weights_NK)
        return for_rows_MD, for_weights_NK, None, None
