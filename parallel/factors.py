"""Factorized experts over tensor-parallel processes: every factor cut, narrow modes exchanged.

A factorized layer is narrow in the middle: R numbers a token (a ring: four times its rank) between
its input factor and its output factor, against F inner units. So the inner units stay cut, as those
of a dense MLP, and what is sent are the R numbers: gathered in the first layer, where every inner
unit needs all of them, and summed into parts in the second, where every process has a share of
each sum. The block's output is summed as a dense one's. The README says what that costs.

Shapes: M tokens, S experts of all levels, N experts of a level, P, Q and R ranks, X and Y the
narrow modes of a layer before and after mixing, I input width, O output width, D width.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.lora import FactorLowRank
from polyad.model.mumoe.base import Factorized, expert_factor
from polyad.model.mumoe.cp import CP
from polyad.model.mumoe.gating import Gate, GateOutput
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mumoe.products import contract
from polyad.model.mumoe.tr import TensorRing, TensorTrain
from polyad.model.mumoe.tucker import Tucker
from polyad.parallel import comm
from polyad.parallel.placement import Placement, cut, padded, split_columns, split_rows_and_rest
from polyad.parallel.regions import copy, sum_parts, tensor_group


def parallelize_factors(layer: MuMoE, world: comm.World) -> None:
    """Replaces the gate and both layers by ones that hold this process's part.

    Args:
        layer: on the meta device.
        world: this process, with its tensor-parallel rank.
    """
    first, second = CUT_LAYERS[type(layer.up)]
    with torch.device("meta"):
        layer.gate = _gate_class(layer)(layer.gate, world)
        layer.up = first(layer.up, world)
        layer.down = second(layer.down, world)


RANKS = 8
"""Ranks are stored as multiples of it, where no process shares them: 16 bytes in bf16."""


def pad_ranks(model: nn.Module) -> None:
    """Rounds the ranks of factorized layers up, in place, where they are not cut.

    The padding exists only here: no checkpoint and no count has it. It begins as zeros and stays
    zero, since in the gradient of each factor's padding there is another's.

    Args:
        model: on the meta device.
    """
    for layer in model.modules():
        if not isinstance(layer, Factorized) or layer.sizes.rank % RANKS == 0:
            continue
        before = layer.factor_shapes(layer.sizes)
        rank = -(-layer.sizes.rank // RANKS) * RANKS
        layer.sizes = replace(layer.sizes, rank=rank)
        for name, shape in layer.factor_shapes(layer.sizes).items():
            if shape != before[name]:
                with torch.device("meta"):
                    factor = nn.Parameter(torch.empty(shape))
                factor.placement = padded(shape, before[name])  # type: ignore[attr-defined]
                setattr(layer, name, factor)
        for adapter in (layer.input_lora, layer.output_lora):
            if isinstance(adapter, FactorLowRank):
                _pad_adapter(layer, adapter, before[adapter.adapts])


def _pad_adapter(layer: Factorized, adapter: FactorLowRank, before: tuple[int, ...]) -> None:
    """Pads what is beside a factor as the factor is."""
    after, modes, rank = layer.get_parameter(adapter.adapts).shape, adapter.modes, len(adapter.B)
    shapes = {
        "A": ((*after[:modes], rank), (*before[:modes], rank)),
        "B": ((rank, *after[modes:]), (rank, *before[modes:])),
    }
    for name, (shape, real) in shapes.items():
        if shape != real:
            with torch.device("meta"):
                matrix = nn.Parameter(torch.empty(shape))
            matrix.placement = padded(shape, real)  # type: ignore[attr-defined]
            setattr(adapter, name, matrix)


def _gate_class(layer: MuMoE) -> "type[_CutGate]":
    """The gate class that sums its gradients where they are fewer numbers per token.

    Where ranks are mixed in parts, each process has a part of the coefficients' gradient. It is
    summed as it is, or goes on through the gate, which is linear backward, to the gate's input.
    """
    if not isinstance(layer.up, CP):
        return _CutGate
    experts, width = layer.gate.weight.shape
    return _GateByCoefficients if experts <= width else _GateByInput


def _replace(module: nn.Module, name: str, placement: Placement) -> None:
    part = nn.Parameter(torch.empty(placement.shape))
    cut(part, placement)
    setattr(module, name, part)


class CutLayer(Factorized):
    """The base of all cut layers.

    A class below for each factorization says what is cut of it, and one for each of the two layers
    of a block what is exchanged; a layer is both.

    Args:
        whole: the layer in one process.
        world: this process.
    """

    def __init__(self, whole: Factorized, world: comm.World) -> None:
        super().__init__(whole.sizes, whole.output_scale, whole.activated)
        self.group = tensor_group()
        self.rank, self.parts = world.tensor_parallel_rank, world.tensor_parallel_size
        axes, shapes = self.rank_axes(), self.factor_shapes(self.sizes)
        # A narrow mode cut along its second axis is one cut block for each row of its first.
        self.input_blocks = shapes["input_factor"][1] if axes["input_factor"] == 2 else 1
        self.output_blocks = shapes["output_factor"][0] if axes["output_factor"] == 1 else 1
        for name, shape in shapes.items():
            if placement := self.placement(name, shape):
                _replace(self, name, placement)
        # Whole here: `cut_adapters` cuts them.
        self.input_lora, self.output_lora = whole.input_lora, whole.output_lora

    @abstractmethod
    def rank_axes(self) -> dict[str, int]:
        """The axis of the rank that is cut, by factor; factors that are not named stay whole."""

    def placement(self, name: str, shape: tuple[int, ...]) -> Placement | None:
        """Where this process's part of a factor lies; None: every process has the whole."""
        axis = self.rank_axes().get(name)
        return None if axis is None else split_columns(shape, axis, self.rank, self.parts)

    def gather(self, part: Tensor) -> Tensor:
        """Gathers the first layer's narrow modes from all processes."""
        blocks = part.view(part.shape[0], self.input_blocks, -1)
        return self.group.gather(blocks, 2).flatten(1)

    def scatter(self, whole: Tensor) -> Tensor:
        """Sums the second layer's narrow modes over processes; each receives a part."""
        blocks = whole.view(whole.shape[0], self.output_blocks, -1)
        return self.group.sum_and_scatter(blocks, 2).flatten(1)


class _FirstLayer(CutLayer):
    """The layer whose output units are cut; narrow modes are gathered for them before mixing."""

    def placement(self, name: str, shape: tuple[int, ...]) -> Placement | None:
        if name == "output_factor":
            return split_columns(shape, len(shape) - 1, self.rank, self.parts)
        return super().placement(name, shape)

    def contract_input(self, z_MI: Tensor) -> Tensor:
        return self.gather(super().contract_input(copy(z_MI)))


class _SecondLayer(CutLayer):
    """The layer whose input units are cut. After mixing each process gets a part of the sums."""

    def placement(self, name: str, shape: tuple[int, ...]) -> Placement | None:
        if name == "input_factor":
            return split_rows_and_rest(shape, self.sizes.inputs, self.rank, self.parts)
        return super().placement(name, shape)

    def contract_input(self, z_MI: Tensor) -> Tensor:
        # The last process has the bias row; in the others padding is in its place.
        return self.multiply_input(z_MI, self.sizes.bias and self.rank == self.parts - 1)

    def contract_output(self, mixed: Tensor) -> Tensor:
        return sum_parts(super().contract_output(self.scatter(mixed)))


class _CutCP(CutLayer, CP):
    """R is cut, of expert factors too: a term of the sum is a column of each."""

    def rank_axes(self) -> dict[str, int]:
        experts = {expert_factor(level): 1 for level in range(len(self.sizes.num_experts))}
        return experts | {"input_factor": 1, "output_factor": 0}


class _FirstCP(_FirstLayer, _CutCP):
    """Mixes its own part of the ranks, and gathers afterwards."""

    def contract_input(self, z_MI: Tensor) -> Tensor:
        return Factorized.contract_input(self, copy(z_MI))

    def contract_output(self, mixed: Tensor) -> Tensor:
        return super().contract_output(self.gather(mixed))


class _SecondCP(_SecondLayer, _CutCP):
    """Receives its part of the sums before mixing."""

    def contract_input(self, z_MI: Tensor) -> Tensor:
        return self.scatter(super().contract_input(z_MI))

    def contract_output(self, mixed: Tensor) -> Tensor:
        return sum_parts(Factorized.contract_output(self, mixed))


class _CutRing(CutLayer, TensorRing):
    """Q of the input and P of the output factor are cut if they have equal parts, or else R."""

    def rank_axes(self) -> dict[str, int]:
        first, ring = self.first_rank(self.sizes), self.sizes.expert_rank
        return {
            "input_factor": 2 if ring % self.parts else 1,
            "output_factor": 1 if first % self.parts else 0,
        }

    def mix_experts(self, coefficients: Sequence[Tensor]) -> Tensor:
        # Every process computes the same matrix and multiplies a part by it.
        return copy(super().mix_experts(coefficients))


class _FirstRing(_FirstLayer, _CutRing):
    pass


class _SecondRing(_SecondLayer, _CutRing):
    pass


class _FirstTrain(_FirstLayer, _CutRing, TensorTrain):
    pass


class _SecondTrain(_SecondLayer, _CutRing, TensorTrain):
    pass


class _CutTucker(CutLayer, Tucker):
    """S of the input and T of the output factor are cut; of the core each process keeps a part."""

    def rank_axes(self) -> dict[str, int]:
        return {"input_factor": 1, "core": 0, "output_factor": 0}

    def contract_core(self, contracted_MS: Tensor) -> Tensor:
        return contract(contracted_MS, self.group.gather(self.core, 0))

    def mix_experts(self, coefficients: Sequence[Tensor]) -> list[Tensor]:
        # Every process computes the same vectors and multiplies a part by them.
        return [copy(a_MQ) for a_MQ in super().mix_experts(coefficients)]


class _FirstTucker(_FirstLayer, _CutTucker):
    pass


class _SecondTucker(_SecondLayer, _CutTucker):
    pass


# A new factorization adds two classes and a line here.
CUT_LAYERS: dict[type[Factorized], tuple[type[_FirstLayer], type[_SecondLayer]]] = {
    CP: (_FirstCP, _SecondCP),
    TensorRing: (_FirstRing, _SecondRing),
    TensorTrain: (_FirstTrain, _SecondTrain),
    Tucker: (_FirstTucker, _SecondTucker),
}


class _CutGate(Gate):
    """A gate of which every process keeps some columns and computes all scores.

    Gradients of its coefficients are whole: those of what they mix are summed in `mix_experts`.

    Args:
        whole: the gate in one process.
        world: this process.
    """

    def __init__(self, whole: Gate, world: comm.World) -> None:
        nn.Module.__init__(self)
        self.norm, self.activation, self.std = whole.norm, whole.activation, whole.std
        self.dropout = whole.dropout
        self.group = tensor_group()
        rank, parts = world.tensor_parallel_rank, world.tensor_parallel_size
        _replace(self, "weight", split_columns(tuple(whole.weight.shape), 1, rank, parts))

    def scores(self, u_MD: Tensor) -> Tensor:
        return linear(u_MD, self.group.gather_equal(self.weight, 1))


class _GateByCoefficients(_CutGate):
    """A gate that sums the gradients of its coefficients over processes at once."""

    def mixing_weights(self, output: GateOutput, dtype: torch.dtype) -> list[Tensor]:
        return [copy(a_MN) for a_MN in super().mixing_weights(output, dtype)]


class _GateByInput(_CutGate):
    """A gate that sums gradients later: those of its input and of its weight."""

    def scores(self, u_MD: Tensor) -> Tensor:
        return linear(copy(u_MD), self.group.gather(self.weight, 1))
