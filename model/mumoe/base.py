"""The interface of all factorizations of the experts' weight tensor.

All experts of a linear layer are one tensor W of [N_1, ..., N_E, I, O], one expert mode a level of
the hierarchy. A token z with coefficients a_1, ..., a_E over the experts of each level gets

    y_o = sum_(n_1 ... n_E, i) W_(n_1 ... n_E, i, o) a_1,n_1 ... a_E,n_E z_i

from the factors of W, which is never built. A bias of each expert is one more row of the input
factor, which a constant input of 1 would meet: it is added, nothing is concatenated.

Shapes: M tokens, E levels, N experts of a level, R rank, I input width, O output width, C numbers
of a token that are summed over, K columns of a factor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu

from polyad.model.initialization import Initializer, orthogonal, uniform
from polyad.model.regions import Region, same


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that decide the factors of one layer."""

    num_experts: tuple[int, ...]
    """N of each level."""
    inputs: int
    """I, without the bias row."""
    outputs: int
    """O."""
    rank: int
    """R of the input and the output factor (tensor ring and train: R3)."""
    expert_rank: int
    """R1 = R2 of a ring, R2 of a train, R_N of Tucker; CP has none."""
    bias: bool
    """Whether every expert has a bias."""
    orthogonal: bool = False
    """Whether input and output factors begin with orthogonal rows or columns."""
    factor_scale: float = 1.0
    """Times the initial values of input and output factors."""
    expert_std: float = 1.0
    """Standard deviation of the initial expert factors of the first level."""
    level_std: float = 0.0
    """Standard deviation of the initial expert factors of levels after the first."""

    @property
    def input_rows(self) -> int:
        """Rows of the input factor: I, and one for the bias."""
        return self.inputs + self.bias


class FactorRegions(NamedTuple):
    """Where the processes that share a layer exchange numbers; see `model/regions.py`."""

    input: Region = same
    """The tokens."""
    contracted: Region = same
    """The tokens with the input factor, before experts are mixed."""
    experts: Region = same
    """What a token's coefficients choose, which every process computes."""
    core: Region = same
    """The core, of a factorization that has one."""
    mixed: Region = same
    """What the mixed experts make of a token, before the output factor."""
    output: Region = same
    """The layer's output."""


class Factorized(nn.Module, ABC):
    """A linear layer of every expert, mixed by coefficients.

    Factors are stored with the mode that is contracted first in front, so that a forward pass is
    plain matrix products. Parameters belong to this module itself and to no list below it: ZeRO 3
    gathers what the module whose `forward` runs holds.

    Args:
        sizes: The sizes of the factors.
        output_scale: Multiplies the output factor's initial values.
        activated: Whether it takes GELU of its input.
    """

    mixes_parts: ClassVar[bool] = False
    """Whether a process that has a part of the rank can mix the experts for it alone."""

    input_factor: Tensor
    output_factor: Tensor
    input_lora: nn.Module | None
    """What LoRA adds beside the input factor; see `model/lora.py`."""
    output_lora: nn.Module | None

    def __init__(self, sizes: Sizes, output_scale: float = 1.0, activated: bool = False) -> None:
        super().__init__()
        self.sizes, self.output_scale, self.activated = sizes, output_scale, activated
        self.adds_bias = sizes.bias
        """Whether this process has the bias row."""
        self.regions = FactorRegions()
        for name, shape in self.factor_shapes(sizes).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.register_module("input_lora", None)
        self.register_module("output_lora", None)

    @classmethod
    @abstractmethod
    def factor_shapes(cls, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """The factors by name; those of the experts are named `expert_factor_LEVEL`."""

    @classmethod
    @abstractmethod
    def rank_axes(cls, sizes: Sizes, parts: int) -> dict[str, int]:
        """The axis of each factor along which tensor parallelism cuts the rank.

        Args:
            sizes: The sizes of the factors.
            parts: Processes that share them.

        Returns:
            Axes by factor; a factor that is not named stays whole.
        """

    @classmethod
    @abstractmethod
    def expert_matrix_rank(cls, sizes: Sizes) -> int:
        """The highest rank that the I x O matrix of one expert can have."""

    @classmethod
    @abstractmethod
    def output_fan(cls, sizes: Sizes) -> int:
        """How many products an output is the sum of, in the output factor."""

    @abstractmethod
    def expert_initializer(self, level: int) -> Initializer:
        """Says how the expert factor of a level starts."""

    @abstractmethod
    def mix(self, contracted: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
        """Mixes the experts by their coefficients. Linear in each of its arguments.

        Args:
            contracted: The input with the input factor, [M, ...], its other modes flattened.
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
        regions = self.regions
        contracted = regions.contracted(self.contract_input(regions.input(z_MI)))
        mixed = regions.mixed(self.mix(contracted, coefficients))
        return regions.output(self.contract_output(mixed))

    @classmethod
    def num_parameters(cls, sizes: Sizes) -> int:
        """Counts the numbers in all factors."""
        return sum(math.prod(shape) for shape in cls.factor_shapes(sizes).values())

    def initializers(self) -> dict[str, Initializer]:
        """Uniform input and output factors, as torch's linear layers, or orthogonal ones of that
        size, both times `factor_scale`; experts by factorization.

        Source: Oldfield et al. 2024, appendix F.2. The bias row starts as the rest of its factor.

        What they are factors of starts with mean 0 and the variance

            factor_scale^4 (1 + expert_std^2) (1 + level_std^2)^(E - 1) / (9 I)

        over its experts and their entries, whatever the rank: each of `output_fan` paths has
        1 / (3 I) by its input factor and 1 / (3 output_fan) by its output factor. Tucker's core is
        one more factor and makes it a third. `output_scale` multiplies the standard deviation.
        """
        sizes = self.sizes
        experts = {
            expert_factor(level): self.expert_initializer(level)
            for level in range(len(sizes.num_experts))
        }
        outputs = self.output_factor.dim() - 1
        return experts | {
            "input_factor": self._start(sizes.inputs),
            "output_factor": self._start(self.output_fan(sizes), outputs, self.output_scale),
        }

    def _start(self, fan: int, modes: int = 1, scale: float = 1.0) -> Initializer:
        """Initializes a factor that is a matrix from its first modes to the others."""
        bound = scale * self.sizes.factor_scale / math.sqrt(fan)
        if self.sizes.orthogonal:
            return orthogonal(bound / math.sqrt(3), modes)  # entries as large as uniform ones
        return uniform(bound)

    def expert_factors(self) -> list[Tensor]:
        """The factors of the expert modes, the first level first."""
        levels = range(len(self.sizes.num_experts))
        return [self.get_parameter(expert_factor(level)) for level in levels]

    def contract_input(self, z_MI: Tensor) -> Tensor:
        """Contracts the input, or GELU of it, with the input factor, and adds the bias row.

        Args:
            z_MI: Tokens.

        Returns:
            [M, ...], the other modes of the input factor flattened.
        """
        bias, activated = self.adds_bias, self.activated
        contracted = contract(z_MI, self.input_factor, bias=bias, activated=activated)
        if self.input_lora is None:
            return contracted
        added: Tensor = self.input_lora(z_MI, bias, activated)
        return contracted + added

    def contract_output(self, mixed: Tensor) -> Tensor:
        """Contracts what was mixed with all modes of the output factor but the last.

        Args:
            mixed: [M, ...], flattened.

        Returns:
            [M, O].
        """
        output_MO = contract(mixed, self.output_factor, modes=self.output_factor.dim() - 1)
        if self.output_lora is None:
            return output_MO
        added_MO: Tensor = self.output_lora(mixed, False, False)
        return output_MO + added_MO


def expert_factor(level: int) -> str:
    """The name of the factor of an expert mode.

    Args:
        level: From 0.
    """
    return f"expert_factor_{level}"


def contract(
    x_MC: Tensor, factor: Tensor, *, modes: int = 1, bias: bool = False, activated: bool = False
) -> Tensor:
    """Multiplies tokens, or GELU of them, by a factor as a matrix.

    Only the two arguments are saved for the backward pass. GELU is computed again there: its output
    is as large as all else that a block saves, and costs a hundredth of the products. The factor is
    no view: autograd would keep a view's memory, which ZeRO 3 has to free after the forward pass.

    Args:
        x_MC: Tokens.
        factor: [C, ...], a parameter as it stands in its module. It may have one row more than
            tokens have numbers.
        modes: How many of its modes, from the first on, make up C.
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
            for_factor = torch.empty_like(factor)
            for_weight_CK, for_bias_K = _split(for_factor, ctx.modes, x_MC.shape[1])
            active_MC = gelu(x_MC) if ctx.activated else x_MC
            torch.mm(active_MC.t(), gradient_MK, out=for_weight_CK)
            if ctx.bias:
                for_bias_K.copy_(gradient_MK.sum(0))
            else:
                for_bias_K.zero_()
        return for_x_MC, for_factor, None, None, None


def _split(factor: Tensor, modes: int, rows: int) -> tuple[Tensor, Tensor]:
    """The matrix that multiplies tokens, and the row below it; empty where there is none."""
    matrix = factor.flatten(0, modes - 1).flatten(1)
    return matrix[:rows], matrix[rows:].flatten()
