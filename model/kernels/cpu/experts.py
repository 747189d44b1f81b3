"""Experts on a CPU: plain products into buffers, one expert after the other.

On a CPU the counts can be read at no cost, and a small expert's activations stay in the cache
between its products. For the backward pass only the inner rows before bias and activation are
saved, half of what a dense MLP saves.

Shapes: M rows, E experts, D width, F inner width; m rows of one expert.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyad.model.kernels.cpu.gelu import gelu_backward, gelu_forward


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
    output_MD = torch.empty_like(rows_MD)
    inner_MF = rows_MD.new_empty(len(rows_MD), up_EDF.shape[2])
    buffer_mF = inner_MF.new_empty(int(counts_E.max()), inner_MF.shape[1])
    for expert, rows in _rows_of_experts(counts_E):
        inner_mF = inner_MF[rows]
        active_mF = buffer_mF[: len(inner_mF)]
        torch.mm(rows_MD[rows], up_EDF[expert], out=inner_mF)
        gelu_forward(inner_mF, None if bias_EF is None else bias_EF[expert], active_mF)
        torch.mm(active_mF, down_EFD[expert], out=output_MD[rows])
    return output_MD, inner_MF


@_forward.register_fake
def _like_forward(
    rows_MD: Tensor, up_EDF: Tensor, bias_EF: Tensor | None, down_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_MD), rows_MD.new_empty(len(rows_MD), up_EDF.shape[2])


@torch.library.custom_op("polyad::experts_on_cpu_backward", mutates_args=())
def _backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_MF: Tensor,
    up_EDF: Tensor,
    bias_EF: Tensor | None,
    down_EFD: Tensor,
    counts_E: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns gradients of rows, first layers, their biases, second layers; empty if unwanted."""
    of_rows, of_up, of_bias, of_down = wanted
    gradients = _like_backward(
        gradient_MD, rows_MD, inner_MF, up_EDF, bias_EF, down_EFD, counts_E, wanted
    )
    for_rows_MD, for_up_EDF, for_bias_EF, for_down_EFD = gradients
    for whole in gradients[1:]:
        if whole.numel():
            whole[counts_E == 0] = 0
    buffers_mF = inner_MF.new_empty(2, int(counts_E.max()), inner_MF.shape[1])
    for expert, rows in _rows_of_experts(counts_E):
        inner_mF = inner_MF[rows]
        active_mF, change_mF = buffers_mF[:, : len(inner_mF)]
        gradient_mD, bias_F = gradient_MD[rows], None if bias_EF is None else bias_EF[expert]
        if of_rows or of_up or of_bias:
            torch.mm(gradient_mD, down_EFD[expert].t(), out=change_mF)
            for_bias_F = for_bias_EF[expert] if of_bias else None
            gelu_backward(inner_mF, bias_F, active_mF, change_mF, for_bias_F)
        else:
            gelu_forward(inner_mF, bias_F, active_mF)
        if of_down:
            torch.mm(active_mF.t(), gradient_mD, out=for_down_EFD[expert])
        if of_up:
            torch.mm(rows_MD[rows].t(), change_mF, out=for_up_EDF[expert])
        if of_rows:
            torch.mm(change_mF, up_EDF[expert].t(), out=for_rows_MD[rows])
    return gradients


def _like_backward(
    gradient_MD: Tensor,
    rows_MD: Tensor,
    inner_MF: Tensor,
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


def _rows_of_experts(counts_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and which rows."""
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count
