"""LoRA: adds a trainable product of two low-rank matrices to a frozen matrix.

    y = W x + (alpha / r) B (A x)

B starts at zero, so that the model initially computes the same as without it. The names of the
model's own parameters do not change; the adapter of `blocks.0.attention.qkv` is `...qkv.lora.A` and
`...qkv.lora.B`.

Source: Hu et al. 2022, "LoRA: Low-rank adaptation of large language models", section 4.1. A is
initialized as in the library peft: Kaiming uniform with a = sqrt(5), which is uniform(-1, 1) /
sqrt(inputs).

Shapes: M rows, r rank, E experts, I input width, O output width, D model width, F inner width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from polyad.model.attention import Attention
from polyad.model.config import Config, PatternError, matched, without_blocks
from polyad.model.feedforward import DenseFeedForward
from polyad.model.initialization import ZEROS, Initializer, uniform
from polyad.model.layers import Linear, Region, same
from polyad.model.mumoe.factorizations import Factorized, contract
from polyad.model.smoe.experts import Experts
from polyad.model.smoe.router import LinearScore, Router

Patterns = Annotated[tuple[str, ...], Field(strict=False)]


class LoRAConfig(Config):
    """LoRA: which layers get low-rank adapters and what else is trained; all other weights are
    frozen.

    A pattern is a name, or the end of a name after a dot, with * for anything.
    """

    rank: Annotated[int, Field(ge=1, le=2**20)] = 8
    """Rank r of the adapters; must be smaller than both sides of every adapted matrix."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    targets: Patterns = ("attention.*",)
    """Patterns of the layers that get adapters; the default is every linear layer of attention.
    Others are, for example, feed_forward.up, down and gate of dense feed-forwards,
    feed_forward.shared.* of shared experts, router.score of linear routers, and for a muMoE the
    input_factor and output_factor of feed_forward.up, up_gate and down."""
    experts: bool = False
    """Whether all layers of every sparse expert get adapters too, separate ones for each expert."""
    trained: Patterns = ()
    """Patterns of parameters that are fully trained in addition to the adapters, for example head.*
    for a new head."""


class AdaptConfig(Config):
    """Parameter-efficient fine-tuning."""

    lora: LoRAConfig | None = None
    """Low-rank adapters (LoRA) on top of the frozen weights of checkpoint.init_from; null: all
    weights are trained."""


class AdapterRegions(NamedTuple):
    """Where ranks that share an adapter exchange tensors; see `model/layers.py`."""

    A: Region = same
    B: Region = same
    narrow: Region = same
    """Applied to the r-dimensional vectors between the two matrices of a linear layer."""
    merged_B: Region = same
    """Applied to B where the product is merged into the weight."""


class Adapter(nn.Module, ABC):
    """The two low-rank matrices added to one parameter of the module that holds it.

    Args:
        adapts: The name of the adapted parameter.
        config: Rank and alpha.
        shapes: Those of A and of B.
    """

    def __init__(self, adapts: str, config: LoRAConfig, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.adapts, self.scale = adapts, config.alpha / config.rank
        self.A, self.B = (nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.regions = AdapterRegions()

    @abstractmethod
    def delta(self, A: Tensor, B: Tensor) -> Tensor:
        """Returns the update of the parameter, in its shape.

        Args:
            A: A value of the first matrix.
            B: A value of the second.
        """


class LowRank(Adapter):
    """The adapter of a linear layer: A [r, I] and B [O, r].

    Args:
        weight_OI: Its weight.
        config: Rank and alpha.
    """

    def __init__(self, weight_OI: Tensor, config: LoRAConfig) -> None:
        outputs, inputs = weight_OI.shape
        super().__init__("weight", config, (config.rank, inputs), (outputs, config.rank))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of both matrices; see `model/initialization.py`."""
        return {"A": uniform(1 / math.sqrt(self.A.shape[1])), "B": ZEROS}

    def delta(self, A: Tensor, B: Tensor) -> Tensor:
        """See `Adapter.delta`."""
        return self.scale * (B @ A)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the update of the layer's output, [..., O], in the precision of the input.

        Args:
            x: The layer's input, [..., I].
        """
        regions = self.regions
        narrow = regions.narrow(linear(x, regions.A(self.A).to(x.dtype)))
        return self.scale * linear(narrow, regions.B(self.B).to(x.dtype))

    def merged(self) -> Tensor:
        """Returns the update of the weight, or of this rank's columns of it."""
        return self.delta(self.A, self.regions.merged_B(self.B))


class ExpertsLowRank(Adapter):
    """The adapter of a layer of stacked experts: A [E, I, r] and B [E, r, O], one per expert.

    Args:
        adapts: The name of the layer's weights.
        weight_EIO: The weights.
        config: Rank and alpha.
    """

    def __init__(self, adapts: str, weight_EIO: Tensor, config: LoRAConfig) -> None:
        (experts, inputs, outputs), rank = weight_EIO.shape, config.rank
        super().__init__(adapts, config, (experts, inputs, rank), (experts, rank, outputs))

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of both matrices, per expert; see `model/initialization.py`."""
        bound = 1 / math.sqrt(self.A.shape[1])
        return {"A": uniform(bound).each_expert(), "B": ZEROS.each_expert()}

    def delta(self, A: Tensor, B: Tensor) -> Tensor:
        """See `Adapter.delta`."""
        return self.scale * (A @ B)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Returns A and scale B, the factors by which rows are multiplied; their rank is padded
        with zeros to a multiple of 16 bytes, as grouped products require."""
        A_EIr, B_ErO = self.regions.A(self.A), self.scale * self.regions.B(self.B)
        rest = -A_EIr.shape[2] % (16 // A_EIr.element_size())
        return (pad(A_EIr, (0, rest)), pad(B_ErO, (0, 0, 0, rest))) if rest else (A_EIr, B_ErO)


class FactorLowRank(Adapter):
    """The adapter of a factor of a factorized layer, seen as a matrix applied to tokens.

    Args:
        layer: The layer.
        adapts: The name of the factor.
        config: Rank and alpha.
    """

    def __init__(self, layer: Factorized, adapts: str, config: LoRAConfig) -> None:
        shape, modes = layer.get_parameter(adapts).shape, _modes(layer, adapts)
        rank = config.rank
        super().__init__(adapts, config, (*shape[:modes], rank), (rank, *shape[modes:]))
        self.modes = modes
        """Number of the factor's leading modes that are contracted with tokens."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers of both matrices; see `model/initialization.py`."""
        return {"A": uniform(1 / math.sqrt(math.prod(self.A.shape[:-1]))), "B": ZEROS}

    def delta(self, A: Tensor, B: Tensor) -> Tensor:
        """See `Adapter.delta`."""
        matrix = A.flatten(0, -2) @ B.flatten(1)
        return self.scale * matrix.view(*A.shape[:-1], *B.shape[1:])

    def forward(self, x_MC: Tensor, bias: bool, activated: bool) -> Tensor:
        """Computes the update of the product of tokens with the factor.

        Args:
            x_MC: Tokens.
            bias: Whether the last row of A is added, like that of the factor.
            activated: Whether GELU is applied to the tokens first.

        Returns:
            [M, ...], the factor's other modes flattened.
        """
        A, B = self.regions.A(self.A), self.regions.B(self.B)
        narrow_MR = contract(x_MC, A, modes=self.modes, bias=bias, activated=activated)
        return self.scale * contract(narrow_MR, B)


class _Place(NamedTuple):
    """A place where an adapter can be added."""

    smaller_side: int
    """The smaller side of the matrix; the rank must be less."""
    owner: nn.Module
    attribute: str
    """The attribute of `owner` that becomes the adapter made by `build`."""
    build: Callable[[LoRAConfig], Adapter]


def add_lora(model: nn.Module, config: LoRAConfig) -> None:
    """Adds adapters to a model and freezes all other weights, in place.

    Args:
        model: The whole model, on the meta device.
        config: The targets, and what else is trained.

    Raises:
        PatternError: A pattern matches nothing, or a rank is not less than a side of a matrix.
    """
    places, experts = dict(_places(model)), dict(_expert_places(model))
    own = [name for name, _ in model.named_parameters()]
    chosen = matched("adapt.lora.targets", config.targets, places)
    if config.experts and not experts:
        raise PatternError(
            "adapt.lora.experts: true is not allowed with a model that has no sparse experts; "
            "allowed: false"
        )
    trained = set(matched("adapt.lora.trained", config.trained, own))
    if not chosen and not config.experts:
        raise PatternError(
            "adapt.lora: neither targets nor experts name a layer; there are "
            f"{', '.join(without_blocks(places))}"
        )
    wanted = {name: places[name] for name in chosen} | (experts if config.experts else {})
    for name, place in wanted.items():
        if config.rank >= place.smaller_side:
            raise PatternError(
                f"adapt.lora.rank: {config.rank} is not less than the smaller side of {name}, "
                f"{place.smaller_side}, so it would not be a low rank"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with torch.device("meta"):
        for place in wanted.values():
            setattr(place.owner, place.attribute, place.build(config))


def _places(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Lists the layers and factors that targets can name."""
    for path, module in model.named_modules():
        before = f"{path}." if path else ""
        if isinstance(module, Attention | DenseFeedForward):
            layers = {n: each for n, each in module.named_children() if isinstance(each, Linear)}
            for name in sorted(layers, key=lambda name: name in ("projection", "down")):
                yield f"{before}{name}", _of_linear(layers[name])
        elif isinstance(module, Router) and type(module.score) is LinearScore:
            yield f"{before}score", _of_linear(module.score)
        elif isinstance(module, Factorized):
            for name in ("input_factor", "output_factor"):
                shape, modes = module.get_parameter(name).shape, _modes(module, name)
                side = min(math.prod(shape[:modes]), math.prod(shape[modes:]))
                attribute = name.replace("_factor", "_lora")
                build = partial(FactorLowRank, module, name)
                yield f"{before}{name}", _Place(side, module, attribute, build)


def _of_linear(layer: Linear) -> _Place:
    return _Place(min(layer.weight.shape), layer, "lora", partial(LowRank, layer.weight))


def _expert_places(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Lists the layers of sparse experts, not groups of units of a dense feed-forward."""
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name in ("up", "down", "gate"):
                if (weight := getattr(module, name)) is not None:
                    build = partial(ExpertsLowRank, name, weight)
                    side = min(weight.shape[1:])
                    yield f"{path}.{name}", _Place(side, module, f"{name}_lora", build)


def _modes(layer: Factorized, factor: str) -> int:
    """Returns how many modes of a factor are contracted with tokens."""
    return 1 if factor == "input_factor" else layer.get_parameter(factor).dim() - 1


def adapters(model: nn.Module) -> Iterator[tuple[str, str, Adapter]]:
    """Lists the adapters of a model.

    Yields:
        The name of the adapted parameter, the name of the adapter, and the adapter.
    """
    for path, module in model.named_modules():
        if isinstance(module, Adapter):
            parent = path.rpartition(".")[0]
            yield (f"{parent}.{module.adapts}" if parent else module.adapts), path, module


def of_base(model: nn.Module) -> frozenset[str]:
    """Returns the names of adapted frozen weights; empty in a model without adapters."""
    own = {f"{path}.{name}" for _, path, _ in adapters(model) for name in ("A", "B")}
    if not own:
        return frozenset()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return frozenset(frozen - own)
