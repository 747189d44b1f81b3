"""Experts: MLPs with stacked weights, over rows that are sorted by expert.

Shapes: M rows, E experts, D width, F inner width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, grouped_mm

from model.initialization import ZEROS, Initializer, normal
from model.interface import FeedForwardContext
from model.kernels.cpu.experts import experts_on_host
from model.smoe.config import SparseMoEConfig


class Experts(nn.Module):
    """Up, GELU (approximated by tanh, as in the dense feed-forward), down: E times.

    The second layer's bias is the layer's `output_bias`, not here: it is added to the sum over
    experts, where it costs no row.

    Args:
        config: Of the layer.
        context: What the model says.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        experts, width = config.num_experts, context.hidden_size
        inner = config.inner_size(width)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.up_bias = nn.Parameter(torch.empty(experts, inner)) if context.bias else None
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts, expert by expert; see `model/initialization.py`."""
        entries = {
            "up": normal(self.context.initializer_std).each_expert(),
            "down": normal(self.context.residual_std).each_expert(),
        }
        return entries | ({"up_bias": ZEROS.each_expert()} if self.up_bias is not None else {})

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Runs every row through its expert.

        Args:
            rows_MD: First all rows of expert 0, then all of expert 1, and so on.
            counts_E: Rows of each expert; 0 is allowed.

        Returns:
            [M, D], in the same order.
        """
        if self.config.experts == "loop":
            return self._one_by_one(rows_MD, counts_E)
        if rows_MD.device.type == "cpu":
            return experts_on_host(rows_MD, self.up, self.up_bias, self.down, counts_E)
        return self.on_device(rows_MD, counts_E)

    def on_device(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """As `forward` on a GPU: grouped products, for which the host need not know the counts."""
        if not _takes_grouped(rows_MD.dtype, self.up):
            return self._one_by_one(rows_MD, counts_E)
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        inner_MF = _product(rows_MD, self.up, offsets_E)
        if self.up_bias is not None:
            inner_MF = inner_MF + _of_each_row(self.up_bias, offsets_E, rows_MD.shape[0])
        return _product(gelu(inner_MF, approximate="tanh"), self.down, offsets_E)

    def _one_by_one(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        outputs = []
        for expert, rows in enumerate(torch.split(rows_MD, counts_E.tolist())):
            inner = rows @ self.up[expert]
            if self.up_bias is not None:
                inner = inner + self.up_bias[expert]
            outputs.append(gelu(inner, approximate="tanh") @ self.down[expert])
        return torch.cat(outputs)


def _takes_grouped(dtype: torch.dtype, up_EDF: Tensor) -> bool:
    """Whether the grouped product takes these: no float64, and rows of whole 16 bytes."""
    aligned = all(size * dtype.itemsize % 16 == 0 for size in up_EDF.shape[1:])
    return aligned and dtype != torch.float64


def _product(rows_MD: Tensor, weight_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """Each expert's rows, which end at its offset, times its weight: [M, F]."""
    if rows_MD.dtype == torch.bfloat16:
        return grouped_mm(rows_MD, weight_EDF, offs=offsets_E)
    product_MF: Tensor = _grouped_mm(rows_MD, weight_EDF, offsets_E)
    return product_MF


def _of_each_row(bias_EF: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """The bias of each row's expert: [M, F]."""
    bias_MF: Tensor = _OfEachRow.apply(  # type: ignore[no-untyped-call]
        bias_EF, offsets_E, num_rows
    )
    return bias_MF


class _OfEachRow(torch.autograd.Function):
    """By hand for the gradient: autograd's would add the rows of an expert up one by one, in bf16
    and on a GPU in any order. A product with ones adds them up in fp32.
    """

    @staticmethod
    def forward(ctx: Any, bias_EF: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(offsets_E)
        rows_M = torch.arange(num_rows, device=bias_EF.device, dtype=offsets_E.dtype)
        return bias_EF.index_select(0, torch.searchsorted(offsets_E, rows_M, right=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MF: Tensor) -> tuple[Tensor, None, None]:
        (offsets_E,) = ctx.saved_tensors
        # The grouped product takes rows of whole 16 bytes, so there are 8 equal columns of ones.
        ones_8M = gradient_MF.new_ones(gradient_MF.shape[0], 8).t()
        sums_E8F = _product(ones_8M, gradient_MF.contiguous(), offsets_E)
        return sums_E8F[:, 0], None, None


# grouped_mm takes fp32, but torch.compile and the meta device believe that it takes bf16 alone
# (PyTorch 2.13). As an operation of our own, it says itself what comes out.
@torch.library.custom_op("polyad::grouped_mm", mutates_args=())
def _grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    return grouped_mm(a, b, offs=offsets_E).contiguous()


@_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    if b.dim() == 3:  # [M, D] with [E, D, F]
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(offsets_E.shape[0], a.shape[0], b.shape[1])  # [D, M] with [M, F]


def _grouped_mm_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, gradient_MF: Tensor) -> tuple[Tensor, Tensor, None]:
    rows_MD, weight_EDF, offsets_E = ctx.saved_tensors
    gradient_MF = gradient_MF.contiguous()
    for_rows_MD = _grouped_mm(gradient_MF, weight_EDF.transpose(1, 2), offsets_E)
    for_weight_EDF = _grouped_mm(rows_MD.t(), gradient_MF, offsets_E)
    return for_rows_MD, for_weight_EDF, None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_grouped_mm_context)
