"""Experts on a CPU: plain products, one expert after the other, into buffers.

Knowing the counts costs nothing here, and a small expert's activations stay in the cache between
its products. For the backward pass the inner rows before the activation are kept, and no more: half
of what a dense MLP keeps.

In bf16 a product of another number of rows is another program: making it takes as long as hundreds
of rows, and odd numbers are slow. So each expert's inner rows are padded to one of few numbers. The
rows themselves stay where they are: a product reads on into the next expert's, and what it writes
there that expert's own product overwrites.

Shapes: M rows, P inner rows with the padding, E experts, D width, F inner width; m rows at once.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.processor import has_bf16_products
from model.smoe.activation import gelu_for

GROUP_NUMBERS = 2**19
"""The most inner numbers of small experts that go through the activation together."""
UNIT = 32
"""Numbers of rows in bf16 are multiples of it, unless they are small."""


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
    spans = _spans(counts_E, rows_MD.dtype)
    output_MD = _with_room(rows_MD, spans)
    inner_PF = rows_MD.new_empty(_most_padded(rows_MD, up_EDF), up_EDF.shape[2])
    groups = _groups(spans, GROUP_NUMBERS // inner_PF.shape[1])
    active_mF = inner_PF.new_empty(_most_rows(groups), inner_PF.shape[1])
    gelu = gelu_for(inner_PF)
    for group in groups:
        for span in group:
            bias_F = None if bias_EF is None else bias_EF[span.expert]
            _multiply(_rows(rows_MD, span), up_EDF[span.expert], inner_PF[span.inside], bias_F)
        gelu.forward(inner_PF[_whole(group)], active_mF)
        for span in group:
            active = active_mF[span.inside_of(group)]
            _multiply(active, down_EFD[span.expert], output_MD[span.reached])
    return output_MD[: len(rows_MD)], inner_PF


@_forward.register_fake
def _like_forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    inner_PF = rows_MD.new_empty(_most_padded(rows_MD, up_EDF), up_EDF.shape[2])
    return rows_MD.new_empty(rows_MD.shape), inner_PF


@torch.library.custom_op("polyad::experts_on_host_backward", mutates_args=())
def _backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_PF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = _spans(counts_E, rows_MD.dtype)
    for_rows_MD = _with_room(rows_MD, spans)
    for_up_EDF, for_down_EFD = torch.empty_like(up_EDF), torch.empty_like(down_EFD)
    for_bias_EF = up_EDF.new_empty(up_EDF.shape[::2])
    if len(spans) < len(up_EDF):
        for whole in (for_up_EDF, for_down_EFD, for_bias_EF):
            whole[counts_E == 0] = 0
    groups = _groups(spans, GROUP_NUMBERS // inner_PF.shape[1])
    active_mF, change_mF = inner_PF.new_empty(2, _most_rows(groups), inner_PF.shape[1])
    gelu = gelu_for(inner_PF)
    for group in groups:
        for span in group:
            change = change_mF[span.inside_of(group)]
            _multiply(_rows(gradient_MD, span), down_EFD[span.expert].t(), change)
        gelu.backward(inner_PF[_whole(group)], active_mF, change_mF)
        for span in group:
            expert, here = span.expert, span.inside_of(group)
            active, change = active_mF[here], change_mF[here]
            active[span.size :] = 0  # the next expert's rows meet these in the sums over rows
            change[span.size :] = 0
            _multiply(active.t(), _rows(gradient_MD, span), for_down_EFD[expert])
            _multiply(_rows(rows_MD, span).t(), change, for_up_EDF[expert])
            torch.sum(change, 0, out=for_bias_EF[expert])
            _multiply(change, up_EDF[expert].t(), for_rows_MD[span.reached])
    return for_rows_MD[: len(rows_MD)], for_up_EDF, for_bias_EF, for_down_EFD


@_backward.register_fake
def _like_backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_PF: Tensor,
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


class _Span(NamedTuple):
    """The rows of one expert, of which there are some."""

    expert: int
    start: int
    """The first of its rows."""
    size: int
    """How many."""
    first: int
    """The first of its inner rows."""
    padded: int
    """How many inner rows it has."""

    @property
    def reached(self) -> slice:
        """Its rows, and as many of the next as it has padding."""
        return slice(self.start, self.start + self.padded)

    @property
    def inside(self) -> slice:
        """Its inner rows."""
        return slice(self.first, self.first + self.padded)

    def inside_of(self, group: list["_Span"]) -> slice:
        """Its inner rows among those of a group."""
        first = self.first - group[0].first
        return slice(first, first + self.padded)


def _spans(counts_E: Tensor, dtype: torch.dtype) -> list[_Span]:
    """Where every expert's rows are, but of those that have none."""
    pads = _pads(dtype)
    spans: list[_Span] = []
    start = first = 0
    for expert, count in enumerate(counts_E.tolist()):
        padded = _padded(count) if pads else count
        if count:
            spans.append(_Span(expert, start, count, first, padded))
        start, first = start + count, first + padded
    return spans


def _padded(count: int) -> int:
    """The next multiple of 32, or of the power of two that is an eighth to a 16th of few rows."""
    unit: int = min(UNIT, 2 ** max(0, count.bit_length() - 4))
    return math.ceil(count / unit) * unit


def _most_padded(rows_MD: Tensor, up_EDF: Tensor) -> int:
    """Inner rows of all experts with the padding, however the rows are spread over them."""
    rows = rows_MD.shape[0]
    return rows + min((UNIT - 1) * up_EDF.shape[0], rows // 8) if _pads(rows_MD.dtype) else rows


def _pads(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_bf16_products()


def _with_room(like_MD: Tensor, spans: list[_Span]) -> Tensor:
    """Memory for as many rows, and for those that a padded product writes after the last."""
    return like_MD.new_empty(
        max([len(like_MD), *(s.reached.stop for s in spans)]), like_MD.shape[1]
    )


def _rows(whole_MD: Tensor, span: _Span) -> Tensor:
    """The rows that an expert's padded product reads; zeros after the last."""
    rows_mD = whole_MD[span.reached]
    missing = span.padded - len(rows_mD)
    return pad(rows_mD, (0, 0, 0, missing)) if missing else rows_mD


def _groups(spans: list[_Span], rows: int) -> list[list[_Span]]:
    """Experts whose rows go through the activation together: as many as have so few inner rows."""
    groups: list[list[_Span]] = []
    for span in spans:
        if groups and span.inside.stop - groups[-1][0].first <= rows:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _whole(group: list[_Span]) -> slice:
    """All inner rows of a group."""
    return slice(group[0].first, group[-1].inside.stop)


def _most_rows(groups: list[list[_Span]]) -> int:
    return max((group[-1].inside.stop - group[0].first for group in groups), default=0)


def _multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b + bias; without bf16 instructions fp32 is faster, by an order of magnitude."""
    if a.dtype == torch.bfloat16 and not has_bf16_products():
        product = a.float() @ b.float()
        out.copy_(product if bias is None else product + bias)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
