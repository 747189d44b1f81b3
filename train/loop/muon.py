"""Muon: the update of a matrix is its momentum with all singular values set to about 1.

    m <- 0.95 m + 0.05 g        W <- W - lr (decay W + 0.2 sqrt(max(A, B)) NS(0.05 g + 0.95 m))

NS divides by the Frobenius norm and takes five Newton-Schulz steps from X to a X + b (X X^T) X + c
(X X^T)^2 X. They keep singular vectors, and bring singular values above 0.002 to between 0.68 and
1.21. The factor scales the entries of an update to a root mean square of 0.2, about that of AdamW,
so that its learning rate and decay carry over. All parameters except matrices of blocks get AdamW
in the same step.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the factor and the decay:
Liu et al. 2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2.

Shapes: A x B a matrix, N matrices side by side.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from polyad.parallel.fragments import PART, FlatPart
from polyad.parallel.zero import STATE_TENSORS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients a, b and c."""
STEPS = 5
MOMENTUM = 0.95
EPSILON = 1e-7
"""Smallest norm by which a matrix is divided."""
ADAMW_RMS = 0.2
"""Root mean square of the entries of AdamW's updates, as Liu et al. measured it."""

OF_MATRICES = ("exp_avg",)
"""Names of the state tensors of a matrix, which have its shape."""
OF_OTHERS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state tensors."""
_MATRICES = re.compile(
    r"(?:^|\.)blocks\.\d+\..*?"
    r"(attention\.(?:qkv|query|key|value|projection)\.weight"  # attention
    r"|attention\.(?:query|key_value)_(?:down|up)\.weight"  # latent attention
    r"|feed_forward\.(?:shared\.|dense\.)?(?:gate|up|down)\.weight"  # also in mixtures
    r"|feed_forward\.experts\.(?:gate|up|down|keys|linear|values)"  # stacks of experts
    r"|feed_forward\.(?:up_gate|up|down)\."  # muMoE
    r"(?:input_factor|output_factor|core|expert_factor_\d+))$"
)

_GATE, _UP = "feed_forward.gate.weight", "feed_forward.up.weight"
LOT = 2**25
"""Maximum number of elements that are orthogonalized at once, unless one matrix has more."""


_BLOCK = re.compile(r"(?:^|.*\.)blocks\.\d+\.")


class Matrix(NamedTuple):
    """A parameter as Muon treats it: matrices of one shape, one after the other."""

    rows: int
    columns: int
    scale: float
    """The factor of the update."""


def matrices(names: Iterable[str]) -> frozenset[str]:
    """Returns the parameters of a model that get Muon's update.

    Routers and gates of mixtures do not (Liu et al. leave theirs to AdamW), nor do embeddings and
    heads, the table of a mixture of decoders, whose rows are looked up like an embedding's, and
    adapters. The gate of a dense feed-forward does; unlike that of a muMoE, it has an `up.weight`
    beside it.

    Args:
        names: Names of all parameters.
    """
    matches = {name for name in names if _MATRICES.search(name)}
    gates = {name for name in matches if name.endswith(_GATE)}
    return frozenset(matches - {n for n in gates if n.removesuffix(_GATE) + _UP not in matches})


def matrix_of(name: str, shape: tuple[int, ...], real: tuple[int, ...]) -> Matrix:
    """Returns how a parameter is laid out as matrices.

    A fused q, k, v weight is three matrices, one below the other, and a stack of experts one per
    expert. A factor of a muMoE is the matrix that the forward pass multiplies by: first mode by all
    others, or for an output factor all others by the last. The bias row of an input factor belongs
    to its matrix, which multiplies (z, 1).

    Args:
        name: One of `matrices`.
        shape: The stored shape, in which ranks may be padded; padding has no gradient and stays
            zero.
        real: The shape without padding.
    """
    match = _MATRICES.search(name)
    assert match is not None
    rows, columns = _sides(match[1], shape)
    return Matrix(rows, columns, ADAMW_RMS * math.sqrt(max(_sides(match[1], real))))


def _sides(kind: str, shape: tuple[int, ...]) -> tuple[int, int]:
    if kind == "attention.qkv.weight":
        return shape[0] // 3, shape[1]
    if ".experts." in kind:
        return shape[1], shape[2]
    if kind.endswith("output_factor"):
        return math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:])


def orthogonalized(x_NAB: Tensor) -> Tensor:
    """Returns each matrix with its singular values set to about 1, by Newton-Schulz steps.

    Returns:
        [N, A, B], in the same precision.
    """
    a, b, c = COEFFICIENTS
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = x_NAB.mT if tall else x_NAB  # the smaller of the two products with itself
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _update(ahead_NS: Tensor, matrix: Matrix) -> Tensor:
    """Matrices [N, S], orthogonalized."""
    return orthogonalized(ahead_NS.view(-1, matrix.rows, matrix.columns)).flatten(1)


class Muon(torch.optim.Optimizer):
    """Muon for groups with a `matrix`, AdamW for those whose `matrix` is None.

    Where ZeRO has sharded a group's matrices, each process orthogonalizes those of which it has a
    part (`FlatPart`). Each expert of a stack is a separate matrix, so one that no token chose moves
    as far as the others, by its momentum from earlier steps.

    Args:
        params: Parameter groups with `weight_decay`, `lr`, `matrix` and the state
            (`STATE_TENSORS`).
        defaults: AdamW's `betas` and `eps`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                for name in group[STATE_TENSORS]:
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)
                state.setdefault("step", torch.zeros(()))
            if group["matrix"] is None:
                self._adamw(parameters, group)
            else:
                for parameter in parameters:
                    self._muon(parameter, group)

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        state["step"] += 1
        momentum = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
        matrix = group["matrix"]
        ahead, size = gradient.lerp(momentum, MOMENTUM), matrix.rows * matrix.columns  # Nesterov's
        part: FlatPart | None = group.get(PART)
        edges = [] if part is None else part.edges(ahead, size)
        inner_NS = ahead.view(-1, size) if part is None else part.inner(ahead, size)
        # In place and in chunks, since a shard may hold many experts.
        for lot_NS in torch.split(inner_NS, max(1, LOT // size)):
            lot_NS.copy_(_update(lot_NS, matrix))
        for edge in edges:
            ahead[edge.here] = _update(edge.whole_S[None], matrix)[0, edge.there]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(ahead, alpha=-group["lr"] * matrix.scale)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
