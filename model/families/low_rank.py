"""Low-rank matrices in the format of the library peft, for the weights of transformers' models.

    a linear layer or a router   MODULE.lora_A.weight [R, in], MODULE.lora_B.weight [out, R]
    stacked experts              [E R, in], all rows of one expert before those of the next, and
                                 [out, R E], one column of each expert, then the next of each

Names are those in memory, where experts are stacked (`Family.in_memory`). If a module has two
stacks, the matrices of the first have `.base_layer` in their names. A tensor that holds several of
ours, such as gate and up, has the sum of their ranks: the As are stacked, and B is zero where the
outputs of one meet the rank of another.

Shapes: E experts (1 for a linear layer), R rank in the file, I inputs, O outputs.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from polyad.model.families.tensors import Piece

STACKS = ("gate_up_proj", "down_proj")
"""Names of stacked experts, in the order of their module."""
_INNER = ".base_layer"


class Factors(NamedTuple):
    """Both matrices for one of their tensors, or for our share of it."""

    A_ERI: Tensor
    B_EOR: Tensor

    @classmethod
    def unpacked(cls, A: Tensor, B: Tensor, experts: int) -> "Factors":
        """Converts two matrices from a file.

        Args:
            A: A in the file's layout.
            B: B in the file's layout.
            experts: E.
        """
        rank = A.shape[0] // experts
        B_EOR = B.view(B.shape[0], rank, experts).permute(2, 0, 1)
        return cls(A.view(experts, rank, A.shape[1]), B_EOR)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Returns A and B in the file's layout."""
        outputs = self.B_EOR.shape[1]
        return self.A_ERI.flatten(0, 1), self.B_EOR.permute(1, 2, 0).reshape(outputs, -1)

    def of_share(self, piece: Piece) -> "Factors":
        """Returns the matrices for a share of the tensor.

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
    """Combines the matrices of shares into those of one of their tensors.

    Args:
        parts: Shares of the tensor with their matrices; other shares get none.
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
    """Returns the common prefix of the names of both matrices for a tensor.

    Args:
        name: The name of the tensor.
        stacks: The names in `STACKS` that have such matrices.
    """
    owner, _, own = name.rpartition(".")
    if own not in STACKS:
        return owner
    outside = sum(other in stacks for other in STACKS[STACKS.index(own) + 1 :])
    return owner + outside * _INNER


def low_rank_of(A: Tensor, B: Tensor) -> Factors:
    """Converts our matrices to `Factors`.

    Args:
        A: [r, I], or [E, I, r] for stacked experts.
        B: [O, r], or [E, r, O] for stacked experts.
    """
    return Factors(A[None], B[None]) if A.ndim == 2 else Factors(A.mT, B.mT)


def delta(factors: Factors, scale: float, slices: tuple[slice, ...]) -> Tensor:
    """Computes a box of the update of one of our weights.

    Args:
        factors: Factors of the whole weight.
        scale: Factor of the product.
        slices: The box: [O, I], or [E, I, O] for stacked experts.
    """
    A_ERI, B_EOR = factors
    if len(slices) == 2:
        return scale * (B_EOR[0, slices[0]] @ A_ERI[0][:, slices[1]])
    A_ERI, B_EOR = A_ERI[slices[0], :, slices[1]], B_EOR[slices[0], slices[2]]
    return scale * (B_EOR @ A_ERI).mT


def of_rows(factors: Factors, rows: slice) -> Factors:
    """Returns the matrices for some outputs of a linear layer.

    Args:
        factors: Factors for all outputs.
        rows: The outputs.
    """
    return Factors(factors.A_ERI, factors.B_EOR[:, rows])
