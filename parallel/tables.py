"""Sparse tables over tensor-parallel ranks: each has some experts, with their scores and rows.

Every rank finds its own best experts, and the best of all are chosen among those: 2 K values per
token are gathered, and no scores. Each then sums the rows of its own experts, and the sums are
all-reduced. Product keys are few, so they are replicated and every rank makes the same choice.

Shapes: M tokens, S scores of all levels, K experts of a token, G ranks.
"""

import torch
from torch import Tensor

from polyad.model.mxd.gate import SparseGate
from polyad.model.mxd.layer import SparseTable
from polyad.model.smoe.selection import Selected
from polyad.parallel import comm
from polyad.parallel.regions import Group, copy, sum_parts, tensor_group
from polyad.parallel.shard import Axis, Placement, cut


def parallelize_table(layer: SparseTable, world: comm.World) -> None:
    """Splits the table and, unless experts have product keys, the gate, in place.

    The dense feed-forward that the table scales is split like any other.

    Args:
        layer: the layer on the meta device.
        world: this rank, with its tensor-parallel rank.
    """
    parts, rank = world.tensor_parallel_size, world.tensor_parallel_rank
    own = Axis.part(layer.config.table_rows, rank, parts)
    if len(layer.gate.levels) == 1:
        layer.gate = CutGate(layer.gate, own, tensor_group())
    else:
        layer.gate.agreed = tensor_group().of_first
    cut(layer, "table", Placement.cut(tuple(layer.table.shape), {0: own}))
    first = own.runs[0].there

    def of_this_process(selected: Selected) -> tuple[Tensor, Tensor]:
        # The rows are local to this rank, and so are the gradients of their weights.
        weights_MK = copy(selected.weights_NK)
        rows_MK = selected.expert_ids_NK - first
        is_own_MK = (rows_MK >= 0) & (rows_MK < own.size)
        return weights_MK * is_own_MK, torch.where(is_own_MK, rows_MK, 0)

    layer.own, layer.mixed = of_this_process, sum_parts


class CutGate(SparseGate):
    """A gate of which each rank has the scores of some experts.

    Args:
        gate: the whole gate, with one level.
        own: the experts of this rank.
        group: the ranks.
    """

    def __init__(self, gate: SparseGate, own: Axis, group: Group) -> None:
        with torch.device("meta"):
            super().__init__(gate.levels, gate.weight.shape[1], gate.top_k)
        self._first, self._size, self._group = own.runs[0].there, own.size, group
        for name in ("weight", "bias"):
            shape = tuple(gate.get_parameter(name).shape)
            cut(self, name, Placement.cut(shape, {0: own}))

    def forward(self, u_MD: Tensor) -> Selected:
        """See `SparseGate.forward`; each rank has a part of the input's gradient."""
        return super().forward(copy(u_MD))

    def best(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """See `SparseGate.best`; scores from other ranks have no gradient."""
        own_MK, ids_MK = scores_MS.topk(min(self.top_k, self._size), dim=1)
        scores_MG, ids_MG = (
            self._group.all_parts(part.detach().t()).t() for part in (own_MK, ids_MK + self._first)
        )
        scores_MK, place_MK = scores_MG.topk(self.top_k, dim=1)
        rank_MK, column_MK = place_MK // own_MK.shape[1], place_MK % own_MK.shape[1]
        is_own_MK = rank_MK == self._group.rank
        return torch.where(is_own_MK, own_MK.gather(1, column_MK), scores_MK), ids_MG.gather(
            1, place_MK
        )
