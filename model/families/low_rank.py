"""Low-rank matrices as the library peft lays them out beside the weights of transformers' models.

    a linear layer or a router   MODULE.lora_A.weight [R, in], MODULE.lora_B.weight [out, R]
    stacked experts              [E R, in], all rows of one expert before those of the next, and
                                 [out, R E], one column of each expert before the next of each

Names are those in memory, where experts are stacked (`Family.in_memory`). Of two stacks of one
module the first has its matrices behind `.base_layer`. Where a tensor there is several of ours, as
gate and up, it has the sum of their ranks: A's are one below the other, and B is zero where the
outputs of one meet the rank of another.

Shapes: E experts (1 of a linear layer), R rank there, I inputs, O outputs.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyad.model.families.tensors import Piece

STACKS = ("gate_up_proj", "down_proj")
"""Names of stacked experts, in the order of their module."""
_INNER = ".base_layer"


class Factors(NamedTuple):
    """Both matrices beside one tensor there, or the share of it that is ours."""

    A_ERI: Tensor
    B_EOR: Tensor

    @classmethod
    def unpacked(cls, A: Tensor, B: Tensor, experts: int) -> "Factors":
        """Makes them of two matrices in a file.

        Args:
            A: As in the file.
            B: As in the file.
            experts: E.
        """
        rank = A.shape[0] // experts
        B_EOR = B.view(B.shape[0], rank, experts).permute(2, 0, 1)
        return cls(A.view(experts, rank, A.shape[1]), B_EOR)

    def packed(self) -> tuple[Tensor, Tensor]:
        """A and B as a file has them."""
        outputs = self.B_EOR.shape[1]
        return self.A_ERI.flatten(0, 1), self.B_EOR.permute(1, 2, 0).reshape(outputs, -1)

    def of_share(self, piece: Piece) -> "Factors":
        """The matrices beside a share of the tensor.

        Args:
            piece: The share.
        """
        share, outputs = piece.rule.share, self.B_EOR.shape[1]
        if share is None:
            return self
        rows = slice(share.index, None, share.count)
        if not share.in_turns:
            size = outputs // share.count
            rows = slice(share.index * size, (share.index + 1) * size)
        return Factors(self.A_ERI, self.B_EOR[:, rows])


def fused(parts: Sequence[tuple[Piece, Factors]]) -> Factors:
    """The matrices beside a tensor there.

    Args:
        parts: Shares of it with what is beside each; those that are not named get none.
    """
    (piece, (A_ErI, B_EOr)), share = parts[0], parts[0][0].rule.share
    if share is None:
        return parts[0][1]
    experts, rank, inputs = A_ErI.shape
    A_ERI = A_ErI.new_zeros(experts, share.count * rank, inputs)
    B_EOR = A_ErI.new_zeros(experts, share.count * B_EOr.shape[1], share.count * rank)
    whole = Factors(A_ERI, B_EOR)
    for piece, (A_ErI, B_EOr) in parts:
        assert piece.rule.share is not None
        here = slice(piece.rule.share.index * rank, (piece.rule.share.index + 1) * rank)
        A_ERI[:, here] = A_ErI
        whole.of_share(piece).B_EOR[:, :, here] = B_EOr
    return whole


def module_of(name: str, stacks: Collection[str]) -> str:
    """What the names of both matrices beside a tensor begin with.

    Args:
        name: Of the tensor.
        stacks: The names in `STACKS` that have matrices beside them.
    """
    owner, _, own = name.rpartition(".")
    if own not in STACKS:
        return owner
    outside = sum(other in stacks for other in STACKS[STACKS.index(own) + 1 :])
    return owner + outside * _INNER


def low_rank_of(A: Tensor, B: Tensor) -> Factors:
    """Matrices of ours in the form of `Factors`.

    Args:
        A: [r, I], or of stacked experts [E, I, r].
        B: [O, r], or of stacked experts [E, r, O].
    """
    return Factors(A[None], B[None]) if A.ndim == 2 else Factors(A.mT, B.mT)


def delta(factors: Factors, scale: float, slices: tuple[slice, ...]) -> Tensor:
    """A box of what is added to a weight of ours.

    Args:
        factors: Of the whole weight.
        scale: What the product is multiplied by.
        slices: Of the weight: [O, I], or of stacked experts [E, I, O].
    """
    A_ERI, B_EOR = factors
    if len(slices) == 2:
        return scale * (B_EOR[0, slices[0]] @ A_ERI[0][:, slices[1]])
    A_ERI, B_EOR = A_ERI[slices[0], :, slices[1]], B_EOR[slices[0], slices[2]]
    return scale * (B_EOR @ A_ERI).mT


def of_rows(factors: Factors, rows: slice) -> Factors:
    """The matrices beside some outputs of a linear layer.

    Args:
        factors: Beside all.
        rows: The outputs.
    """
    return Factors(
        factors.A_ERI, torch.narrow(factors.B_EOR, 1, rows.start, rows.stop - rows.start)
    )
