"""Experts on a CPU: plain products into buffers, one expert after the other, or in bf16 one expert
per thread.

On a CPU the counts can be read at no cost, and a small expert's activations stay in the cache
between its products. For the backward pass only the inner rows before bias and activation are
saved, half of what a dense MLP saves.

In bf16, a product with another number of rows needs another program, whose compilation takes as
long as hundreds of rows; odd numbers are slow. So each expert's inner rows are padded to one of a
few numbers. The rows themselves are not moved: a product reads on into the rows of the next expert,
and the results for these are ignored.

A product of few rows is hardly faster with two threads than with one, and some operations always
use one thread. Run in parallel, several of them use all cores.

Shapes: M rows, P inner rows with padding, E experts, D width, F inner width; m rows at a time.
"""

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyad.model.kernels.cpu.gelu import gelu_backward, gelu_forward

Item = TypeVar("Item")


def parallel_for(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs work in as many threads as PyTorch uses, each of which computes single-threaded.

    Gradients are not recorded.

    Args:
        work: Consumes an iterator over items; every thread calls it once. Items must not write to
            the same memory.
        items: A free thread takes the next item, so put the longest first.

    Raises:
        Exception: The first exception of `work`, after all threads have ended.
    """
    shared = iter(list(items))  # a list's iterator gives each item to one thread

    @torch.inference_mode()
    def run() -> None:
        work(shared)

    threads = torch.get_num_threads()
    futures = [_pool(threads).submit(run) for _ in range(threads)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads that is kept: starting one takes as long as a small product."""
    before = torch.get_num_threads()
    started = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # the first call in a thread resets the number
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "polyad-experts", begin)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)  # new threads start with the last number set
    return pool


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


SHARED_NUMBERS = 2**21
"""Minimum number of inner values for distributing experts over threads; with fewer the forward pass
would be slower."""
UNIT = 32
"""In bf16 numbers of rows are padded to multiples of this, unless they are small."""


@functools.cache
def has_bf16_products() -> bool:
    """Returns whether this processor has the instructions for PyTorch's products in bf16."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def experts_on_cpu(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> Tensor:
    """Runs every row through its expert: up, GELU (approximated by tanh), down.

    Args:
        rows_MD: All rows of expert 0, then all of expert 1, and so on.
        up_EDF: First layers.
        bias_EF: Biases of the first layers; None if they have none.
        down_EFD: Second layers.
        counts_E: Number of rows of each expert; may be 0. There may be further rows.

    Returns:
        [M, D], in the same order. Rows after the last expert's hold arbitrary values, and so do
        their gradients.
    """
    output_MD: Tensor = _forward(rows_MD, up_EDF, bias_EF, down_EFD, counts_E)[0]
    return output_MD


# Custom operations, because a compiler cannot follow loops over unknown counts.
@torch.library.custom_op("polyad::experts_on_cpu", mutates_args=())
def _forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    spans = _spans(counts_E, rows_MD.dtype)
    output_MD = torch.empty_like(rows_MD)
    inner_PF = rows_MD.new_empty(_most_padded(rows_MD, up_EDF), up_EDF.shape[2])

    def compute(mine: Iterator[_Span], most: int) -> None:
        active_mF, buffer_mD = (
            inner_PF.new_empty(most, up_EDF.shape[2]),
            rows_MD.new_empty(most, rows_MD.shape[1]),
        )
        for span in mine:
            expert = span.expert
            inner, active = inner_PF[span.inside], active_mF[: span.padded]
            _multiply(_rows(rows_MD, span), up_EDF[expert], inner)
            bias_F = None if bias_EF is None else bias_EF[expert]
            gelu_forward(inner, bias_F, active)
            _multiply_rows(active, down_EFD[expert], output_MD[span.rows], buffer_mD)

    _run(compute, spans, inner_PF)
    return output_MD, inner_PF


@_forward.register_fake
def _like_forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    inner_PF = rows_MD.new_empty(_most_padded(rows_MD, up_EDF), up_EDF.shape[2])
    return torch.empty_like(rows_MD), inner_PF


@torch.library.custom_op("polyad::experts_on_cpu_backward", mutates_args=())
def _backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_PF: Tensor,
    up_EDF: Tensor,
    bias_EF: Tensor | None,
    down_EFD: Tensor,
    counts_E: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns gradients of rows, first layers, their biases, second layers; empty if unwanted."""
    of_rows, of_up, of_bias, of_down = wanted
    spans = _spans(counts_E, rows_MD.dtype)
    gradients = _like_backward(
        gradient_MD, rows_MD, inner_PF, up_EDF, bias_EF, down_EFD, counts_E, wanted
    )
    for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD = gradients
    if len(spans) < len(up_EDF):
        for whole in gradients[1:]:
            if whole.numel():
                whole[counts_E == 0] = 0

    def compute(mine: Iterator[_Span], most: int) -> None:
        active_mF, change_mF = inner_PF.new_empty(2, most, up_EDF.shape[2])
        buffer_mD = rows_MD.new_empty(most, rows_MD.shape[1])
        for span in mine:
            expert, size = span.expert, span.size
            active, change = active_mF[: span.padded], change_mF[: span.padded]
            inner, bias_F = inner_PF[span.inside], None if bias_EF is None else bias_EF[expert]
            gradient = _rows(gradient_MD, span)
            if of_rows or of_up or of_bias:
                _multiply(gradient, down_EFD[expert].t(), change)
                for_bias_F = for_bias_EF[expert] if of_bias else None
                gelu_backward(inner[:size], bias_F, active[:size], change[:size], for_bias_F)
            else:
                gelu_forward(inner[:size], bias_F, active[:size])
            active[size:] = 0  # the sums over rows also read the next expert's rows here
            change[size:] = 0
            if of_down:
                _multiply(active.t(), gradient, for_down_EFD[expert])
            if of_up:
                _multiply(_rows(rows_MD, span).t(), change, for_up_EDF[expert])
            if of_rows:
                _multiply_rows(change, up_EDF[expert].t(), for_rows_MD[span.rows], buffer_mD)

    _run(compute, spans, inner_PF)
    return gradients


def _like_backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_PF: Tensor,
    up_EDF: Tensor,
    bias_EF: Tensor | None,
    down_EFD: Tensor,
    counts_E: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_rows, of_up, of_bias, of_down = wanted
    num_experts, _, inner = up_EDF.shape
    return (
        torch.empty_like(rows_MD) if of_rows else rows_MD.new_empty(0),
        torch.empty_like(up_EDF) if of_up else up_EDF.new_empty(0),
        up_EDF.new_empty((num_experts, inner) if of_bias else 0),
        torch.empty_like(down_EFD) if of_down else down_EFD.new_empty(0),
    )


_backward.register_fake(_like_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows_MD, up_EDF, bias_EF, down_EFD, counts_E = inputs
    ctx.set_materialize_grads(False)  # the inner rows are not used outside
    ctx.save_for_backward(rows_MD, output[1], up_EDF, bias_EF, down_EFD, counts_E)


def _differentiate(ctx: Any, gradient_MD: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if gradient_MD is None:
        return (None,) * 5
    wanted = list(ctx.needs_input_grad[:4])  # frozen weights need no gradient
    gradients = _backward(gradient_MD, *ctx.saved_tensors, wanted)
    return *(x if want else None for x, want in zip(gradients, wanted, strict=True)), None


_forward.register_autograd(_differentiate, setup_context=_keep)


class _Span(NamedTuple):
    """The rows of an expert that has at least one."""

    expert: int
    start: int
    """Index of its first row."""
    size: int
    """Number of its rows."""
    first: int
    """Index of its first inner row."""
    padded: int
    """Number of its inner rows, with the padding."""

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.start, self.start + self.size)

    @property
    def inside(self) -> slice:
        """Its inner rows."""
        return slice(self.first, self.first + self.padded)


def _spans(counts_E: Tensor, dtype: torch.dtype) -> list[_Span]:
    """Returns the spans of all experts that have rows."""
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
    """Rounds up to a multiple of 32, or for few rows of a power of two, 1/16 to 1/8 of them."""
    unit: int = min(UNIT, 2 ** max(0, count.bit_length() - 4))
    return math.ceil(count / unit) * unit


def _most_padded(rows_MD: Tensor, up_EDF: Tensor) -> int:
    """Returns the maximum total of padded inner rows, for any distribution over the experts."""
    rows = rows_MD.shape[0]
    return rows + min((UNIT - 1) * up_EDF.shape[0], rows // 8) if _pads(rows_MD.dtype) else rows


def _pads(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_bf16_products()


def _rows(whole_MD: Tensor, span: _Span) -> Tensor:
    """Returns the rows that an expert's padded product reads; zeros after the last row."""
    rows_mD = whole_MD[span.start : span.start + span.padded]
    missing = span.padded - len(rows_mD)
    return pad(rows_mD, (0, 0, 0, missing)) if missing else rows_mD


def _run(
    compute: Callable[[Iterator[_Span], int], None], spans: list[_Span], inner_PF: Tensor
) -> None:
    """Computes experts: each with all threads, or in bf16 each in one thread.

    A product of 512 rows in fp32 is nearly twice as fast with two threads; in bf16 it is not.
    """
    threads, rows = torch.get_num_threads(), sum(span.padded for span in spans)
    shared = threads > 1 and _pads(inner_PF.dtype) and inner_PF.numel() >= SHARED_NUMBERS
    # Otherwise one thread would still compute a large expert after the others are done.
    most_alone = 1.5 * rows / threads if shared else 0
    together = [span for span in spans if span.padded > most_alone]
    compute(iter(together), max((span.padded for span in together), default=0))
    if len(together) < len(spans):
        alone = [span for span in spans if span.padded <= most_alone]
        alone.sort(key=lambda span: span.padded, reverse=True)
        parallel_for(lambda mine: compute(mine, alone[0].padded), alone)


def _multiply_rows(a: Tensor, b: Tensor, out: Tensor, buffer: Tensor) -> None:
    """Runs `_multiply` on the first rows of `a`; another thread may write to the next rows."""
    if len(a) == len(out):
        _multiply(a, b, out)
    else:
        _multiply(a, b, buffer[: len(a)])
        out.copy_(buffer[: len(out)])


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Computes out = a @ b; without bf16 instructions fp32 is faster by an order of magnitude."""
    if a.dtype == torch.bfloat16 and not has_bf16_products():
        out.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=out)
