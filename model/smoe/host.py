"""Experts on a CPU: plain products, one expert after the other, into buffers.

Knowing the counts costs nothing here, and a small expert's activations stay in the cache between
its products. For the backward pass the inner rows before the activation are kept, and no more: half
of what a dense MLP keeps.

Shapes: M rows, E experts, D width, F inner width; m rows of one expert.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_NUMBERS = 2**19
"""Of the activation: the most numbers of a block. Its buffers stay in the cache, and the threads do
not have to wait for each other too often."""
SLOPE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


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
    output_MD: Tensor = _forward(rows_MD, up_EDF, bias_EF, down_EFD, counts_E)[0]
    return output_MD


# Operations of our own, because a compiler cannot follow loops over counts that it does not know.
@torch.library.custom_op("polyad::experts_on_host", mutates_args=())
def _forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    counts = counts_E.tolist()
    output_MD, inner_MF = _like_forward(rows_MD, up_EDF, bias_EF, down_EFD, counts_E)
    gelu = _Gelu(inner_MF)
    groups = _groups(counts, gelu.rows)
    active_mF = inner_MF.new_empty(_most_rows(groups), inner_MF.shape[1])
    for group in groups:
        first, last = group[0].start, group[-1].stop
        for expert, start, stop in group:
            inner = inner_MF[start:stop]
            _multiply(rows_MD[start:stop], up_EDF[expert], inner)
            if bias_EF is not None:
                inner += bias_EF[expert]
        gelu.forward(inner_MF[first:last], active_mF[: last - first])
        for expert, start, stop in group:
            active = active_mF[start - first : stop - first]
            _multiply(active, down_EFD[expert], output_MD[start:stop])
    return output_MD, inner_MF


@_forward.register_fake
def _like_forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    return rows_MD.new_empty(rows_MD.shape), rows_MD.new_empty(rows_MD.shape[0], up_EDF.shape[2])


@torch.library.custom_op("polyad::experts_on_host_backward", mutates_args=())
def _backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_MF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = counts_E.tolist()
    gradients = _like_backward(gradient_MD, rows_MD, inner_MF, up_EDF, down_EFD, counts_E)
    for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD = gradients
    if 0 in counts:
        for whole in gradients[1:]:
            whole[counts_E == 0] = 0
    gelu = _Gelu(inner_MF)
    groups = _groups(counts, gelu.rows)
    active_mF, change_mF = inner_MF.new_empty(2, _most_rows(groups), inner_MF.shape[1])
    for group in groups:
        first, last = group[0].start, group[-1].stop
        for expert, start, stop in group:
            change = change_mF[start - first : stop - first]
            _multiply(gradient_MD[start:stop], down_EFD[expert].t(), change)
        size = last - first
        gelu.backward(inner_MF[first:last], active_mF[:size], change_mF[:size])
        for expert, start, stop in group:
            here = slice(start - first, stop - first)
            _multiply(active_mF[here].t(), gradient_MD[start:stop], for_down_EFD[expert])
            _multiply(rows_MD[start:stop].t(), change_mF[here], for_up_EDF[expert])
            torch.sum(change_mF[here], 0, out=for_bias_EF[expert])
            _multiply(change_mF[here], up_EDF[expert].t(), for_rows_MD[start:stop])
    return for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD


@_backward.register_fake
def _like_backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_MF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, _, inner = up_EDF.shape
    return (
        rows_MD.new_empty(rows_MD.shape),
        up_EDF.new_empty(up_EDF.shape),
        up_EDF.new_empty(num_experts, inner),
        down_EFD.new_empty(down_EFD.shape),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows_MD, up_EDF, bias_EF, down_EFD, counts_E = inputs
    ctx.set_materialize_grads(False)  # of the inner rows, which nobody outside has
    ctx.has_bias = bias_EF is not None
    ctx.save_for_backward(rows_MD, output[1], up_EDF, down_EFD, counts_E)


def _differentiate(ctx: Any, gradient_MD: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if gradient_MD is None:
        return (None,) * 5
    for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD = _backward(gradient_MD, *ctx.saved_tensors)
    return for_rows_MD, for_up_EDF, for_bias_EF if ctx.has_bias else None, for_down_EFD, None


_forward.register_autograd(_differentiate, setup_context=_keep)


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
        self.slope = torch.tensor(SLOPE, dtype=self.dtype)

    def forward(self, inner_mF: Tensor, active_mF: Tensor) -> None:
        """Writes the activation of the inner rows."""
        for inner, active in self._blocks(inner_mF, active_mF):
            wide, share, _ = self._share(inner)
            torch.mul(wide, share, out=active)

    def backward(self, inner_mF: Tensor, active_mF: Tensor, change_mF: Tensor) -> None:
        """Writes the activation, and turns its gradient into that of the inner rows."""
        for inner, active, change in self._blocks(inner_mF, active_mF, change_mF):
            wide, share, square = self._share(inner)
            value = torch.mul(wide, share, out=self.buffers[3, : len(inner)])
            active.copy_(value)
            # d/dh (h s) = s + h s (1 - s) 2 sqrt(2/pi) (1 + 3 * 0.044715 h^2)
            torch.add(self.slope, square, alpha=3 * SLOPE * CUBIC, out=square)
            value.addcmul_(value, share, value=-1)
            torch.addcmul(share, value, square, out=value)
            torch.mul(value, change, out=change)

    def _share(self, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h in the wider dtype, s and h^2, the last two in buffers."""
        wide, share, square = self.buffers[:3, : len(inner)]
        wide = inner if inner.dtype == self.dtype else wide.copy_(inner)
        torch.mul(wide, wide, out=square)
        torch.add(self.slope, square, alpha=SLOPE * CUBIC, out=share).mul_(wide).sigmoid_()
        return wide, share, square

    def _blocks(self, *whole: Tensor) -> Iterator[tuple[Tensor, ...]]:
        parts = math.ceil(len(whole[0]) / self.rows)  # of nearly the same size
        return zip(*(tensor.chunk(parts) for tensor in whole), strict=True)


class _Span(NamedTuple):
    """The rows of one expert, of which there are some."""

    expert: int
    start: int
    stop: int


def _groups(counts: list[int], rows: int) -> list[list[_Span]]:
    """Experts whose rows go through the activation together: as many as have so few rows."""
    groups: list[list[_Span]] = []
    start = 0
    for expert, count in enumerate(counts):
        span = _Span(expert, start, start + count)
        if groups and span.stop - groups[-1][0].start <= rows:
            groups[-1] += [span] if count else []
        elif count:
            groups.append([span])
        start = span.stop
    return groups


def _most_rows(groups: list[list[_Span]]) -> int:
    return max((group[-1].stop - group[0].start for group in groups), default=0)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b; without bf16 instructions it is faster in fp32, by an order of magnitude."""
    if a.dtype == torch.bfloat16 and not has_bf16_products():
        out.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=out)


@functools.cache
def has_bf16_products() -> bool:
    """Whether this processor has instructions that PyTorch's products in bf16 use."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())
