"""Factorizations of the experts' weight tensor: CP, tensor ring, tensor train and Tucker.

All experts of a linear layer form one tensor W of shape [N_1, ..., N_E, I, O], with one expert mode
per level of the hierarchy. For a token z with coefficients a_1, ..., a_E over the experts of each
level the layer computes

    y_o = sum_(n_1 ... n_E, i) W_(n_1 ... n_E, i, o) a_1,n_1 ... a_E,n_E z_i

from the factors of W, which is never materialized. The experts' biases are an extra row of the
input factor, as for a constant input of 1; it is added, so that nothing is concatenated.

Source: Oldfield et al. 2024, equations 3 and 5, appendices D.1.3 and E.

Shapes: M tokens, E levels, N experts of a level, R rank, I input width, O output width, C summed
values of a token, K columns of a factor; P and Q ranks of expert modes.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

from polyad.model.initialization import (
    Initializer,
    diagonal_around_one,
    normal,
    orthogonal,
    uniform,
)
from polyad.model.layers import Region, same


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that determine the factors of one layer."""

    num_experts: tuple[int, ...]
    """N of each level."""
    inputs: int
    """I, without the bias row."""
    outputs: int
    """O."""
    rank: int
    """R of the input and the output factor (tensor ring and train: R3)."""
    expert_rank: int
    """R1 = R2 of a ring, R2 of a train, R_N of Tucker; unused by CP."""
    bias: bool = True
    """Whether every expert has a bias."""
    factor_start: Literal["uniform", "orthogonal"] = "uniform"
    """Whether input and output factors are initialized with orthogonal rows or columns."""
    factor_scale: float = 1.0
    """Factor of the initial values of input and output factors."""
    expert_std: float = 1.0
    """Standard deviation of the initial expert factors of the first level."""
    level_std: float = 0.0
    """Standard deviation of the initial expert factors of levels after the first."""


class FactorRegions(NamedTuple):
    """Where ranks that share a layer exchange tensors; see `model/layers.py`."""

    input: Region = same
    """Applied to the tokens."""
    contracted: Region = same
    """Applied to the product of tokens and input factor, before experts are mixed."""
    experts: Region = same
    """Applied to the mixed expert factors of a token, which every rank computes."""
    core: Region = same
    """Applied to the core of a factorization that has one."""
    mixed: Region = same
    """Applied to a token's vector after the experts are mixed, before the output factor."""
    output: Region = same
    """Applied to the layer's output."""


class Factorized(nn.Module, ABC):
    """A linear layer of every expert, mixed by coefficients.

    Factors are stored with the mode that is contracted first in front, so that a forward pass
    consists of plain matrix products. Parameters belong to this module itself, not to a list inside
    it: ZeRO 3 gathers the parameters of the module whose `forward` runs.

    Args:
        sizes: The sizes of the factors.
        output_scale: Factor of the output factor's initial values.
        activated: Whether it applies GELU to its input.
    """

    mixes_parts: ClassVar[bool] = False
    """Whether a rank that has a part of R can mix the experts for that part alone."""

    input_factor: Tensor
    output_factor: Tensor
    input_lora: nn.Module | None
    """LoRA's adapter of the input factor; see `model/lora.py`."""
    output_lora: nn.Module | None

    def __init__(self, sizes: Sizes, output_scale: float = 1.0, activated: bool = False) -> None:
        super().__init__()
        self.sizes, self.output_scale, self.activated = sizes, output_scale, activated
        self.adds_bias = sizes.bias
        """Whether this rank has the bias row."""
        self.regions = FactorRegions()
        for name, shape in self.factor_shapes(sizes).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.register_module("input_lora", None)
        self.register_module("output_lora", None)

    @classmethod
    @abstractmethod
    def expert_shape(cls, sizes: Sizes, level: int) -> tuple[int, ...]:
        """Returns the shape of one expert's slice of the expert factor of a level."""

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the factors by name; expert factors are named
        `expert_factor_LEVEL`. By default input and output factors are matrices."""
        experts = {
            expert_factor(level): (number, *cls.expert_shape(sizes, level))
            for level, number in enumerate(sizes.num_experts)
        }
        return experts | {
            "input_factor": (sizes.inputs + sizes.bias, sizes.rank),
            "output_factor": (sizes.rank, sizes.outputs),
        }

    @classmethod
    @abstractmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """Returns the axis of each factor along which tensor parallelism splits R.

        Args:
            sizes: The sizes of the factors.
            parts: Number of ranks that share them.

        Returns:
            Axes by factor; a factor that is not listed is replicated.
        """

    def expert_initializer(self, level: int) -> Initializer:
        """Returns the initializer of the expert factor of a level: by default N(1, 1), so that
        experts start equal except for noise; further levels have less noise or none."""
        return normal(self.sizes.level_std if level else self.sizes.expert_std, mean=1)

    @abstractmethod
    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """Mixes the experts by their coefficients. Linear in each of its arguments.

        Args:
            contracted: The product of input and input factor, [M, ...], its other modes flattened.
            coefficients: The coefficients of each level, [M, N].

        Returns:
            [M, ...], flattened, to be contracted with the output factor.
        """

    def forward(self, z_MI: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """Mixes the experts' outputs.

        Args:
            z_MI: Tokens.
            coefficients: The coefficients of each level, [M, N].

        Returns:
            [M, O].
        """
        regions, bias, activated = self.regions, self.adds_bias, self.activated
        z_MI = regions.input(z_MI)
        contracted = contract(z_MI, self.input_factor, bias=bias, activated=activated)
        if self.input_lora is not None:
            contracted = contracted + self.input_lora(z_MI, bias, activated)
        mixed = regions.mixed(self.mix(regions.contracted(contracted), coefficients))
        output_MO = contract(mixed, self.output_factor, modes=self.output_factor.dim() - 1)
        if self.output_lora is not None:
            output_MO = output_MO + self.output_lora(mixed, False, False)
        return regions.output(output_MO)

    @classmethod
    def num_parameters(cls, sizes: Sizes) -> int:
        """Counts the entries of all factors."""
        return sum(math.prod(shape) for shape in cls.factor_shapes(sizes).values())

    def initializers(self) -> dict[str, Initializer]:
        """Initializes input and output factors uniformly, as in torch's linear layers, or
        orthogonally at that scale, both times `factor_scale`; expert factors depend on the
        factorization.

        Source: Oldfield et al. 2024, appendix F.2. The bias row is initialized like its factor.

        The full tensor then has mean 0 and the variance

            factor_scale^4 (1 + expert_std^2) (1 + level_std^2)^(E - 1) / (9 I)

        over its experts and their entries, whatever the rank: each of P paths that
        an output sums contributes 1 / (3 I) from its input factor and 1 / (3 P) from its output
        factor.
        Tucker's core is one more factor and contributes a third. `output_scale` multiplies the
        standard deviation.
        """
        sizes = self.sizes
        experts = {
            expert_factor(level): self.expert_initializer(level)
            for level in range(len(sizes.num_experts))
        }
        paths = self.factor_shapes(sizes)["output_factor"][:-1]
        return experts | {
            "input_factor": self._start(sizes.inputs),
            "output_factor": self._start(math.prod(paths), len(paths), self.output_scale),
        }

    def _start(self, fan: int, modes: int = 1, scale: float = 1.0) -> Initializer:
        """Initializes a factor seen as a matrix from its first modes to the others."""
        bound = scale * self.sizes.factor_scale / math.sqrt(fan)
        if self.sizes.factor_start == "orthogonal":
            return orthogonal(bound / math.sqrt(3), modes)  # same RMS as uniform entries
        return uniform(bound)

    def expert_factors(self) -> list[Tensor]:
        """Returns the factors of the expert modes, the first level first."""
        levels = range(len(self.sizes.num_experts))
        return [self.get_parameter(expert_factor(level)) for level in levels]


def expert_factor(level: int) -> str:
    """Returns the name of the factor of an expert mode.

    Args:
        level: The level, from 0.
    """
    return f"expert_factor_{level}"


def contract(
    x_MC: Tensor, factor: Tensor, *, modes: int = 1, bias: bool = False, activated: bool = False
) -> Tensor:
    """Multiplies tokens, or their GELU, by a factor as a matrix.

    Only the two arguments are saved for the backward pass. GELU is recomputed there: its output is
    as large as everything else that a block saves, and it costs a hundredth of the products. The
    factor is not a view: autograd would keep a view's memory, which ZeRO 3 must free after the
    forward pass.

    Args:
        x_MC: Tokens.
        factor: [C, ...], the parameter as stored in its module. It may have one row more than
            tokens have values.
        modes: Number of its leading modes that make up C.
        bias: Whether the last row is added.
        activated: Whether GELU is applied to the tokens first.

    Returns:
        [M, K], the other modes of the factor flattened.
    """
    result: Tensor = _Contraction.apply(x_MC, factor, modes, bias, activated)  # type: ignore[no-untyped-call]
    return result


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MC: Tensor, factor: Tensor, modes: int, bias: bool, activated: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MC, factor)
        ctx.modes, ctx.bias, ctx.activated = modes, bias, activated
        weight_CK, bias_K = _split(factor, modes, x_MC.shape[1])
        active_MC = gelu(x_MC) if activated else x_MC
        return torch.addmm(bias_K, active_MC, weight_CK) if bias else active_MC @ weight_CK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_MK: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_MC, factor = ctx.saved_tensors
        for_x_MC = for_factor = None
        if ctx.needs_input_grad[0]:
            weight_CK, _ = _split(factor, ctx.modes, x_MC.shape[1])
            for_x_MC = gradient_MK @ weight_CK.t()
            if ctx.activated:
                for_x_MC = torch.ops.aten.gelu_backward(for_x_MC, x_MC)
        if ctx.needs_input_grad[1]:
            active_MC = gelu(x_MC) if ctx.activated else x_MC
            # Not into a part of the whole, which a compiler would copy once more.
            for_factor = active_MC.t() @ gradient_MK
            if for_factor.numel() < factor.numel():  # a row below the matrix
                added_MK = gradient_MK if ctx.bias else torch.zeros_like(gradient_MK[:1])
                for_factor = torch.cat((for_factor, added_MK.sum(0, keepdim=True)))
            for_factor = for_factor.view_as(factor)
        return for_x_MC, for_factor, None, None, None


def _split(factor: Tensor, modes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the matrix that multiplies tokens, and the row below it; empty if there is none."""
    matrix = factor.flatten(0, modes - 1).flatten(1)
    return matrix[:rows], matrix[rows:].flatten()


class CP(Factorized):
    """W is a sum of R outer products: factors [N, R] of every level, [I + 1, R] and [R, O].

    W_(n..., i, o) = sum_r U1_(n, r) ... U2_(i, r) U3_(r, o)     y = ((a U1) * ... * (z U2)) U3
    """

    mixes_parts: ClassVar[bool] = True

    @classmethod
    def expert_shape(cls, sizes: Sizes, level: int) -> tuple[int, ...]:
        """See `Factorized`."""
        return (sizes.rank,)

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """R, also of expert factors: a term of the sum is a column of each factor."""
        experts = {expert_factor(level): 1 for level in range(len(sizes.num_experts))}
        return experts | {"input_factor": 1, "output_factor": 0}

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, R] to [M, R]."""
        for a_MN, factor_NR in zip(coefficients, self.expert_factors(), strict=True):
            contracted = contracted * contract(a_MN, factor_NR)
        return contracted


class TensorRing(Factorized):
    """W is a product of small matrices, one per mode: factors [N, P, Q] of the first level, [N, Q,
    Q] of others, [I + 1, Q, R] and [P, R, O].

        W_(n_1 ... n_E, i, o) = trace(U1_(:, n_1, :) ... U2_(:, i, :) U3_(:, o, :))

    A token's coefficients select a matrix [P, Q] and its input a matrix [Q, R]; the output factor
    contracts their product: two large matrix products with a small one per token in between.
    """

    @classmethod
    def first_rank(cls, sizes: Sizes) -> int:
        """Returns P."""
        return sizes.expert_rank

    @classmethod
    def expert_shape(cls, sizes: Sizes, level: int) -> tuple[int, ...]:
        """See `Factorized`."""
        return (sizes.expert_rank if level else cls.first_rank(sizes), sizes.expert_rank)

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `Factorized`."""
        return super().factor_shapes(sizes) | {
            "input_factor": (sizes.inputs + sizes.bias, sizes.expert_rank, sizes.rank),
            "output_factor": (cls.first_rank(sizes), sizes.rank, sizes.outputs),
        }

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """Q of the input and P of the output factor if these divide evenly, otherwise R."""
        return {
            "input_factor": 2 if sizes.expert_rank % parts else 1,
            "output_factor": 1 if cls.first_rank(sizes) % parts else 0,
        }

    def expert_initializer(self, level: int) -> Initializer:
        """A diagonal slice of N(1, 1) per expert; in further levels closer to the identity."""
        return diagonal_around_one(self.sizes.level_std if level else self.sizes.expert_std)

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, Q R] to [M, P R]."""
        input_MQR = contracted.view(-1, self.sizes.expert_rank, self.sizes.rank)
        # The matrix that a token's coefficients select is a product over levels.
        of_levels = (
            contract(a_MN, factor_NPQ).view(-1, *factor_NPQ.shape[1:])
            for a_MN, factor_NPQ in zip(coefficients, self.expert_factors(), strict=True)
        )
        chosen_MPQ = self.regions.experts(functools.reduce(torch.matmul, of_levels))
        return (chosen_MPQ @ input_MQR).flatten(1)


class TensorTrain(TensorRing):
    """A ring with P = 1."""

    @classmethod
    def first_rank(cls, sizes: Sizes) -> int:
        """Returns P = 1."""
        return 1

    def expert_initializer(self, level: int) -> Initializer:
        """N(1, 1) / sqrt(Q) in every entry; further levels as in a ring. Not from the paper.

        A diagonal slice [1, Q] would be zero except for its first entry and disable Q - 1 of the
        paths. An output is the sum of Q paths, so the scale gives it the same variance as in CP and
        the ring.
        """
        if level:
            return super().expert_initializer(level)
        scale = 1 / math.sqrt(self.sizes.expert_rank)
        return normal(scale * self.sizes.expert_std, mean=scale)


class Tucker(Factorized):
    """W is a small core tensor [S, Q, ..., Q, T] with a factor on each mode: [N, Q] of every level,
    [I + 1, S] and [T, O], here with S = T = R.

        W_(n..., i, o) = sum_(q..., s, t) Z_(s, q..., t) U1_(n, q) ... U2_(i, s) U3_(t, o)

    One expert's matrix has rank at most R, for R x R entries of the core: the paper's reason to
    prefer the other factorizations.
    """

    core: Tensor

    @classmethod
    def expert_shape(cls, sizes: Sizes, level: int) -> tuple[int, ...]:
        """See `Factorized`."""
        return (sizes.expert_rank,)

    @classmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `Factorized`."""
        ranks = (sizes.expert_rank,) * len(sizes.num_experts)
        return super().factor_shapes(sizes) | {"core": (sizes.rank, *ranks, sizes.rank)}

    @classmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """S of the input and T of the output factor; each rank keeps a part of the core."""
        return {"input_factor": 1, "core": 0, "output_factor": 0}

    def initializers(self) -> dict[str, Initializer]:
        """Initializes the core like any factor: uniformly, by the number of summed terms."""
        fan = math.prod(self.core.shape[:-1])
        return super().initializers() | {"core": uniform(1 / math.sqrt(fan))}

    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """See `Factorized.mix`; [M, S] to [M, T]."""
        h = contract(contracted, self.regions.core(self.core))  # [M, Q ... Q T]
        for a_MN, factor_NQ in zip(coefficients, self.expert_factors(), strict=True):
            a_MQ = self.regions.experts(contract(a_MN, factor_NQ))
            h_MQX = h.view(*a_MQ.shape, -1)
            h = (a_MQ.unsqueeze(1) @ h_MQX).squeeze(1)  # one Q fewer
        return h


FACTORIZATIONS: dict[str, type[Factorized]] = {
    "cp": CP,
    "tr": TensorRing,
    "tt": TensorTrain,
    "tucker": Tucker,
}
"""To add a factorization, write a class and add a line here and a name to `FactorizationName`."""
