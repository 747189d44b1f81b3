"""LoRA over processes: of the two matrices of an adapter one is cut, the other is whole.

The cut one follows the weight that it stands beside. What is exchanged are the narrow numbers
between the two, r for each token; where the layer's own sum joins the parts, nothing but the
gradient of the whole matrix, of which each process then has a part. The README has the table.

Shapes: r rank, I input width, O output width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.lora import Adapter, ExpertsLowRank, FactorLowRank, LoRAExperts, LowRank
from polyad.model.mumoe.base import Factorized
from polyad.parallel import comm
from polyad.parallel.expert import cut_experts
from polyad.parallel.placement import Piece, Placement, cut, placement_of
from polyad.parallel.regions import copy, sum_parts, tensor_group
from polyad.parallel.tensor import CutTokens


def cut_adapters(model: nn.Module, world: comm.World, tokens: CutTokens | None) -> None:
    """Cuts the adapters of a model over processes, in place.

    Args:
        model: on the meta device; the layers that adapters belong to are cut.
        world: this process.
        tokens: how tokens are cut between the layers of a GPT-2; None: every process has all.
    """
    for module in list(model.modules()):
        if isinstance(module, LoRAExperts):
            _cut_beside_experts(module, world)
        if world.tensor_parallel_size == 1:
            continue
        if isinstance(getattr(module, "lora", None), LowRank):
            _cut_beside_linear(module, tokens)
        elif isinstance(module, Factorized):
            for name in ("input_lora", "output_lora"):
                _cut_beside_factor(module, name)


def _cut_beside_linear(layer: nn.Module, tokens: CutTokens | None) -> None:
    placement, whole = placement_of(layer.get_parameter("weight")), layer.get_submodule("lora")
    assert isinstance(whole, LowRank)
    by_output = placement.shape[0] < placement.global_shape[0]
    if placement.replicated:  # a layer that no process shares
        return
    if by_output:
        layer.lora = ColumnLowRank(whole, tokens)
        _replace(layer.lora, "B", _front(placement, 1, len(whole.A)))
    else:
        layer.lora = RowLowRank(whole, tokens)
        _replace(layer.lora, "A", _back(placement, 1, len(whole.A)))


def _cut_beside_experts(experts: LoRAExperts, world: comm.World) -> None:
    if world.tensor_parallel_size > 1:
        experts.up_lora = CutExpertsLowRank(experts.up_lora, "A")
        experts.down_lora = CutExpertsLowRank(experts.down_lora, "B")
    cut_experts(experts.up_lora, "A", world, inner=None)
    cut_experts(experts.up_lora, "B", world, inner=2)
    cut_experts(experts.down_lora, "A", world, inner=1)
    cut_experts(experts.down_lora, "B", world, inner=None)


def _cut_beside_factor(layer: Factorized, name: str) -> None:
    whole = getattr(layer, name)
    if not isinstance(whole, FactorLowRank):
        return
    placement = placement_of(layer.get_parameter(whole.adapts))
    sizes = zip(placement.shape, placement.global_shape, strict=True)
    axis = next(axis for axis, (here, everywhere) in enumerate(sizes) if here != everywhere)
    rank, modes = len(whole.B), whole.modes
    if axis < modes:
        adapter = CutFactorLowRank(whole, "B")
        _replace(adapter, "A", _front(placement, modes, rank))
    else:
        adapter = CutFactorLowRank(whole, "A")
        _replace(adapter, "B", _back(placement, modes, rank))
    setattr(layer, name, adapter)


def _front(placement: Placement, modes: int, rank: int) -> Placement:
    """The placement of a matrix with the first modes of a cut parameter, and the rank."""
    pieces = tuple(
        Piece(piece.first_row, piece.num_rows, (*piece.origin[:modes], 0))
        for piece in placement.pieces
    )
    shape, whole = placement.shape[:modes], placement.global_shape[:modes]
    return Placement((*shape, rank), (*whole, rank), pieces, False)


def _back(placement: Placement, modes: int, rank: int) -> Placement:
    """The placement of a matrix with the rank, and the modes behind the first ones."""
    piece = Piece(0, rank, (0, *placement.pieces[0].origin[modes:]))
    shape, whole = placement.shape[modes:], placement.global_shape[modes:]
    return Placement((rank, *shape), (rank, *whole), (piece,), False)


def _replace(adapter: Adapter, name: str, placement: Placement) -> None:
    with torch.device("meta"):
        part = nn.Parameter(torch.empty(placement.shape))
    cut(part, placement)
    setattr(adapter, name, part)


class _CutAdapter(Adapter):
    """An adapter of which a process has one matrix whole and of the other a part.

    Args:
        whole: the adapter in one process.
    """

    def __init__(self, whole: Adapter) -> None:
        Adapter.__init__(self, whole.adapts, whole.scale)
        self.A, self.B = whole.A, whole.B
        self._group = tensor_group()


class ColumnLowRank(_CutAdapter, LowRank):
    """Beside a layer that is cut by output: A is whole, B is cut.

    Args:
        whole: the adapter in one process.
        tokens: how tokens are cut; then A meets those of this process alone.
    """

    def __init__(self, whole: Adapter, tokens: CutTokens | None) -> None:
        super().__init__(whole)
        self._own_tokens = tokens is not None
        self._share = copy if tokens is None else tokens.gather

    def forward(self, x: Tensor) -> Tensor:
        """See `LowRank.forward`; the gradient of the narrow numbers is summed."""
        A = self._group.sum_gradient(self.A) if self._own_tokens else self.A
        return self.scale * linear(self._share(linear(x, A)), self.B)


class RowLowRank(_CutAdapter, LowRank):
    """Beside a layer that is cut by input: A is cut, B is whole.

    Args:
        whole: the adapter in one process.
        tokens: how tokens are cut; then B meets those of this process alone.
    """

    def __init__(self, whole: Adapter, tokens: CutTokens | None) -> None:
        super().__init__(whole)
        self._own_tokens = tokens is not None
        self._sum = sum_parts if tokens is None else tokens.sum_and_scatter

    def forward(self, x: Tensor) -> Tensor:
        """See `LowRank.forward`; the narrow numbers are summed."""
        B = self._group.sum_gradient(self.B) if self._own_tokens else self.B
        return self.scale * linear(self._sum(linear(x, self.A)), B)

    def merged(self) -> Tensor:
        """What is added to this process's columns of the weight, which it alone computes with."""
        return self.delta(self.A, self._group.sum_gradient(self.B))


class CutExpertsLowRank(_CutAdapter, ExpertsLowRank):
    """Beside experts whose inner units are cut.

    Args:
        whole: the adapter in one process.
        uncut: which of its matrices has no inner units.
    """

    def __init__(self, whole: Adapter, uncut: str) -> None:
        super().__init__(whole)
        self._uncut = uncut

    def matrices(self) -> tuple[Tensor, Tensor]:
        """See `ExpertsLowRank.matrices`."""
        A = self._group.sum_gradient(self.A) if self._uncut == "A" else self.A
        B = self._group.sum_gradient(self.B) if self._uncut == "B" else self.B
        return A, self.scale * B


class CutFactorLowRank(_CutAdapter, FactorLowRank):
    """Beside a factor that is cut.

    Args:
        whole: the adapter in one process.
        uncut: which of its matrices is not.
    """

    def __init__(self, whole: FactorLowRank, uncut: str) -> None:
        super().__init__(whole)
        self.modes, self._uncut = whole.modes, uncut

    def matrices(self) -> tuple[Tensor, Tensor]:
        """See `FactorLowRank.matrices`."""
        A = self._group.sum_gradient(self.A) if self._uncut == "A" else self.A
        B = self._group.sum_gradient(self.B) if self._uncut == "B" else self.B
        return A, B
