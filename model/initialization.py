"""Initial values of parameters: each parameter is drawn from its own random generator.

A module with parameters describes their initial values in a method `initializers()`: a dict from
the parameter's name, relative to that module and dotted if a child holds it, to an `Initializer`.
Entries of parameters that the module lacks are not used. The method draws nothing, so it works on
the meta device; `model/build.py` finds the entry of a parameter in the module tree and draws.

Shapes: E experts.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

Fill = Callable[[Tensor, Generator], object]
"""Fills a tensor in place, drawing only from the generator."""


@dataclass(frozen=True)
class Initializer:
    """The initial distribution of one parameter."""

    fill: Fill
    """Fills the parameter, or one expert's slice of it, in place."""
    per_expert: bool = False
    """Whether the first dimension counts experts, each of which has its own generator: a process
    that holds some of the experts then draws only those."""

    def each_expert(self) -> "Initializer":
        """Returns this initializer for a parameter whose first dimension counts experts."""
        return Initializer(self.fill, per_expert=True)

    def without_row(self, row: int | None) -> "Initializer":
        """Returns this initializer with one row of zeros; unchanged if `row` is None."""
        if row is None:
            return self

        def fill(value: Tensor, generator: Generator) -> None:
            self.fill(value, generator)
            value[row] = 0

        return Initializer(fill)

    def draw(
        self, shape: torch.Size, seed: int, name: str, experts: Sequence[int] | None = None
    ) -> Tensor:
        """Draws the initial value of one parameter.

        Args:
            shape: The shape of the whole parameter.
            seed: The run's seed.
            name: The parameter's name in the model.
            experts: The experts to draw, for a parameter with one slice per expert; None for all.

        Returns:
            An fp32 CPU tensor of the shape; with `experts`, the first dimension has their number.

        Raises:
            ValueError: `experts` is given for a parameter without experts.
        """
        if not self.per_expert:
            if experts is not None:
                raise ValueError(f"{name} has no experts to choose from")
            value = torch.empty(shape, dtype=torch.float32, device="cpu")
            self.fill(value, seeded_generator(seed, name))
            return value
        chosen = range(shape[0]) if experts is None else experts
        value = torch.empty((len(chosen), *shape[1:]), dtype=torch.float32, device="cpu")
        for row, expert in enumerate(chosen):
            self.fill(value[row], seeded_generator(seed, name, expert))
        return value


def seeded_generator(seed: int, name: str, expert: int | None = None) -> Generator:
    """Makes the CPU generator of one parameter, or of one expert's slice of it.

    Args:
        seed: The run's seed.
        name: The parameter's name in the model.
        expert: The expert's index in the whole model.

    Returns:
        A generator that depends only on the arguments, in every process and Python version.
    """
    key = f"{seed}/{name}" if expert is None else f"{seed}/{name}/{expert}"
    digest = hashlib.sha256(key.encode()).digest()
    # Four bytes, since torch's CPU generator uses only the low 32 bits of a seed.
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "big"))


def normal(std: float, mean: float = 0.0) -> Initializer:
    """Normal distribution.

    Args:
        std: Standard deviation.
        mean: Mean.
    """
    return Initializer(lambda value, generator: value.normal_(mean, std, generator=generator))


def uniform(bound: float) -> Initializer:
    """Uniform distribution between -bound and bound.

    Args:
        bound: The largest absolute value.
    """
    return Initializer(lambda value, generator: value.uniform_(-bound, bound, generator=generator))


def orthogonal(std: float, modes: int = 1) -> Initializer:
    """Orthogonal rows, or columns if there are fewer, all of the same norm.

    Source: Saxe et al. 2013, "Exact solutions to the nonlinear dynamics of learning in deep linear
    neural networks"; drawn as in Mezzadri 2006.

    Args:
        std: Root mean square of the entries.
        modes: Number of leading dimensions that form the rows of the matrix; the rest are columns.
    """

    def fill(value: Tensor, generator: Generator) -> None:
        rows = math.prod(value.shape[:modes])
        shape = (rows, value.numel() // rows)
        drawn = torch.empty(max(shape), min(shape)).normal_(generator=generator)
        basis, triangle = torch.linalg.qr(drawn)
        basis *= triangle.diagonal().sign() * std * math.sqrt(max(shape))  # unique, and uniform
        value.copy_((basis if shape[0] >= shape[1] else basis.T).reshape(value.shape))

    return Initializer(fill)


def unit_rows() -> Initializer:
    """Rows of norm 1, in the direction of a vector of uniform numbers between -1 and 1."""

    def fill(value_NO: Tensor, generator: Generator) -> None:
        value_NO.uniform_(-1, 1, generator=generator)
        value_NO /= torch.linalg.vector_norm(value_NO, dim=1, keepdim=True)

    return Initializer(fill)


def constant(number: float) -> Initializer:
    """All elements equal.

    Args:
        number: The value.
    """
    return Initializer(lambda value, generator: value.fill_(number))


ZEROS, ONES = constant(0.0), constant(1.0)


def diagonal_around_one(std: float = 1.0) -> Initializer:
    """Diagonal slices [P, Q] per expert, with independent N(1, std^2) entries; N experts.

    Args:
        std: Standard deviation; 0 gives the identity.
    """

    def fill(value_NPQ: Tensor, generator: torch.Generator) -> None:
        diagonal = torch.empty(value_NPQ.shape[0], min(value_NPQ.shape[1:]))
        value_NPQ.zero_().diagonal(dim1=1, dim2=2).copy_(
            diagonal.normal_(1.0, std, generator=generator)
        )

    return Initializer(fill)
