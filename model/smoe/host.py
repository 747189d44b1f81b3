"""Experts on a CPU: plain products, one expert after the other, into buffers.

Knowing the counts costs nothing here, and a small expert's activations stay in the cache between
its products. For the backward pass the inner rows before the activation are kept, and no more: half
of what a dense MLP keeps.

Shapes: M rows, E experts, D width, F inner width; m rows of one expert.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_NUMBERS = 2**18
"""Of the activation: the numbers of a block, whose buffers a core's cache holds."""
SLOPE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


# The compiler would have to know the counts.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_on_host(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> Tensor:
    """Runs every row through its expert: up, GELU (approximated by tanh), down.

    Args:
        rows_MD: First all rows of expert 0, then all of expert 1, and so on.
        up_EDF: First layers.
        bias_EF: Of the first layers.
        down_EFD: Second layers.
        counts_E: Rows of each expert; 0 is allowed.

    Returns:
        [M, D], in the same order.
    """
    output_MD: Tensor = _ExpertsOnHost.apply(  # type: ignore[no-untyped-call]
        rows_MD, up_EDF, bias_EF, down_EFD, counts_E.tolist()
    )
    return output_MD


class _ExpertsOnHost(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        up_EDF: Tensor,
        bias_EF: Tensor | None,
        down_EFD: Tensor,
        counts: list[int],
    ) -> Tensor:
        inner_MF = rows_MD.new_empty(rows_MD.shape[0], up_EDF.shape[2])
        output_MD = torch.empty_like(rows_MD, memory_format=torch.contiguous_format)
        active_mF = rows_MD.new_empty(max(counts), up_EDF.shape[2])
        gelu = _Gelu(inner_MF)
        for expert, span in _spans(counts):
            inner, active = inner_MF[span], active_mF[: span.stop - span.start]
            _multiply(rows_MD[span], up_EDF[expert], inner)
            if bias_EF is not None:
                inner += bias_EF[expert]
            gelu.forward(inner, active)
            _multiply(active, down_EFD[expert], output_MD[span])
        ctx.counts = counts
        ctx.save_for_backward(rows_MD, inner_MF, up_EDF, bias_EF, down_EFD)
        return output_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, inner_MF, up_EDF, bias_EF, down_EFD = ctx.saved_tensors
        needs_rows, needs_up, needs_bias, needs_down, _ = ctx.needs_input_grad
        (output_MD,) = gradients
        for_rows_MD = torch.empty_like(rows_MD) if needs_rows else None
        for_up_EDF = torch.empty_like(up_EDF) if needs_up else None
        for_bias_EF = torch.empty_like(bias_EF) if needs_bias else None
        for_down_EFD = torch.empty_like(down_EFD) if needs_down else None
        for whole in (for_up_EDF, for_bias_EF, for_down_EFD):
            if whole is not None and 0 in ctx.counts:
                whole[[count == 0 for count in ctx.counts]] = 0
        most = max(ctx.counts)
        active_mF, changes_mF = inner_MF.new_empty(2, most, inner_MF.shape[1])
        gelu = _Gelu(inner_MF)
        for expert, span in _spans(ctx.counts):
            size = span.stop - span.start
            active, change, output = active_mF[:size], changes_mF[:size], output_MD[span]
            _multiply(output, down_EFD[expert].t(), change)
            gelu.backward(inner_MF[span], active, change)
            if for_down_EFD is not None:
                _multiply(active.t(), output, for_down_EFD[expert])
            if for_up_EDF is not None:
                _multiply(rows_MD[span].t(), change, for_up_EDF[expert])
            if for_bias_EF is not None:
                torch.sum(change, 0, out=for_bias_EF[expert])
            if for_rows_MD is not None:
                _multiply(change, up_EDF[expert].t(), for_rows_MD[span])
        return for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD, None


class _Gelu:
    """GELU h s(h) with s = sigmoid(2 sqrt(2/pi) (h + 0.044715 h^3)), which is its tanh form.

    A sigmoid takes a third of a tanh's time, and one serves both the value and the slope.

    Args:
        like: Of the rows' dtype and width.
    """

    def __init__(self, like: Tensor) -> None:
        self.rows = max(1, BLOCK_NUMBERS // like.shape[1])
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.buffers = torch.empty(4, self.rows, like.shape[1], dtype=self.dtype)

    def forward(self, inner_mF: Tensor, active_mF: Tensor) -> None:
        """Writes the activation of the inner rows."""
        for inner, active in self._blocks(inner_mF, active_mF):
            wide, share, _ = self._share(inner)
            torch.mul(wide, share, out=share if active.dtype != self.dtype else active)
            if active.dtype != self.dtype:
                active.copy_(share)

    def backward(self, inner_mF: Tensor, active_mF: Tensor, change_mF: Tensor) -> None:
        """Writes the activation, and turns its gradient into that of the inner rows."""
        for inner, active, change in self._blocks(inner_mF, active_mF, change_mF):
            wide, share, square = self._share(inner)
            value = torch.mul(wide, share, out=self.buffers[3, : len(inner)])
            active.copy_(value)
            # d/dh (h s) = s + h s (1 - s) 2 sqrt(2/pi) (1 + 3 * 0.044715 h^2)
            square.mul_(3 * SLOPE * CUBIC).add_(SLOPE)
            slope = value.addcmul_(value, share, value=-1).mul_(square).add_(share)
            change.copy_(slope.mul_(change))

    def _share(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h in the wider dtype, s and h^2, the last two in buffers."""
        wide, share, square = self.buffers[:3, : len(inner)]
        wide = inner if inner.dtype == self.dtype else wide.copy_(inner)
        torch.mul(wide, wide, out=square)
        torch.mul(square, SLOPE * CUBIC, out=share).add_(SLOPE).mul_(wide).sigmoid_()
        return wide, share, square

    def _blocks(self, *whole: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(tensor.split(self.rows) for tensor in whole), strict=True)


def _spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has some."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b; without bf16 instructions it is faster in fp32, by an order of magnitude."""
    if a.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        out.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=out)
