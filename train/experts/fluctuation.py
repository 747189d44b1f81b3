"""Routing fluctuation: which tokens of a fixed probe set change experts between two checkpoints.

Two numbers per token are stored, however many experts there are: its first expert (of a muMoE: the
leaf with the highest coefficient), and a code of the set of its experts.

Shapes: M tokens of a forward pass, N experts of a level, S experts of all levels side by side, L
layers, C measures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyad.model.output import entropy
from polyad.parallel import comm
from polyad.parallel.zero import Engine
from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers
from polyad.train.guard.memory import RunMemory
from polyad.train.tasks.task import ProbeSet

SEED = 1_442_695_040_888_963_407
"""The seed of the experts' codes, which must be the same in every process."""


class Codes(NamedTuple):
    """The experts of each token in one layer, as codes."""

    first_M: Tensor
    """The expert that was selected first: the one with the highest score, or score and balancing
    bias. Of a muMoE the leaf with the highest coefficient, of a mixture of networks the largest
    share."""
    set_M: Tensor
    """The sum, modulo 2^64, of a random number for each expert that was selected, or that has a
    coefficient above 0: equal for equal sets, and for others with a chance of 2^-64."""
    entropy_M: Tensor
    """Entropy of the scores or of the leaves' coefficients, in nats."""


def expert_codes(num_experts: int) -> Tensor:
    """A 64-bit number for each expert, the same on every machine: splitmix64 of its number.

    Args:
        num_experts: S.

    Returns:
        int64 [S].
    """
    mask, codes = 2**64 - 1, []
    for expert in range(num_experts):
        x = (SEED + (expert + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
        codes.append(x - 2**64 if x >= 2**63 else x)
    return torch.tensor(codes, dtype=torch.int64)


def encode(decision: Decision, codes_S: Tensor) -> Codes:
    """Encodes the experts of each token in a few numbers.

    Args:
        decision: Of a layer.
        codes_S: Of its experts, from `expert_codes`, on its device.
    """
    entropies = [entropy(a_MN) for a_MN in map(_full, decision.levels)]
    entropy_M = torch.stack(entropies).sum(0)
    if decision.selected is not None:
        ids_MK = decision.selected.expert_ids_NK
        return Codes(ids_MK[:, 0], codes_S[ids_MK].sum(-1), entropy_M)
    first_M = torch.zeros_like(decision.levels[0][:, 0], dtype=torch.int64)
    set_M, begin = torch.zeros_like(first_M), 0
    for a_MN in decision.levels:
        size = a_MN.shape[-1]
        first_M = first_M * size + a_MN.argmax(-1)
        set_M = set_M + codes_S[begin : begin + size].where(a_MN > 0, 0).sum(-1)
        begin += size
    return Codes(first_M, set_M, entropy_M)


def _full(a_MN: Tensor) -> Tensor:
    return a_MN.to(torch.promote_types(a_MN.dtype, torch.float32))


def differences(now: Codes, before: Codes) -> Tensor:
    """Counts the tokens whose experts differ, and sums both entropies.

    Args:
        now: Of some tokens.
        before: Of the same tokens.

    Returns:
        float64 [C]: tokens with another first expert, with another set, entropy now, and before.
    """
    changed = [(now.first_M != before.first_M).sum(), (now.set_M != before.set_M).sum()]
    entropies = [now.entropy_M.double().sum(), before.entropy_M.double().sum()]
    return torch.stack([count.double() for count in changed] + entropies)


@dataclass(frozen=True, kw_only=True)
class Fluctuation:
    """How the routing of one layer differs between an earlier and a later checkpoint."""

    top1: float
    """Share of the tokens whose first expert differs."""
    set: float
    """Share of the tokens whose experts differ, in whatever order."""
    entropy: float
    """Mean entropy over tokens at the later checkpoint, in nats."""
    entropy_before: float
    """Mean entropy over tokens at the earlier checkpoint, in nats."""

    @property
    def entropy_ratio(self) -> float:
        """Later over earlier; NaN where the earlier one is 0."""
        return self.entropy / self.entropy_before if self.entropy_before else float("nan")

    def to_json(self) -> dict[str, float]:
        """What programs get."""
        return {
            "top1": self.top1,
            "set": self.set,
            "entropy": self.entropy,
            "compared_entropy": self.entropy_before,
            "entropy_ratio": self.entropy_ratio,
        }


def shares(
    sums_LC: Tensor, tokens_L: Tensor, layers: Sequence[RoutedLayer]
) -> dict[str, Fluctuation]:
    """Sums over the tokens of each layer as shares, by the layer's name."""
    means = (sums_LC / tokens_L.unsqueeze(-1)).tolist()
    return {
        layer.name: Fluctuation(top1=top1, set=set_, entropy=now, entropy_before=before)
        for layer, (top1, set_, now, before) in zip(layers, means, strict=True)
    }


class Probe:
    """A model that reads the probe set.

    Args:
        forward: input ids [B, T] -> output; dropout off.
        module: the model behind it.
        device: where it is.
    """

    def __init__(
        self, forward: Callable[[Tensor], object], module: torch.nn.Module, device: torch.device
    ) -> None:
        self._forward, self._module = forward, module
        self.layers = routed_layers(module)
        self._codes = {n: expert_codes(n).to(device) for n in {x.num_experts for x in self.layers}}

    @torch.no_grad()
    def read(self, inputs: Tensor, counts: Tensor) -> list[Codes]:
        """Codes of a batch, for each layer.

        Args:
            inputs: Of the model.
            counts: Which tokens count, [B, T], or which samples, [B]: then all of their tokens do.
        """
        with deciding(self._module, self.layers) as decisions:
            self._forward(inputs)
            found = [
                encode(decisions[layer.name], self._codes[layer.num_experts])
                for layer in self.layers
            ]
        return [_counted(codes, counts.flatten()) for codes in found]


def _counted(codes: Codes, counts: Tensor) -> Codes:
    """The codes of what counts; a sample may have any number of tokens in a layer."""
    counts_M = counts.repeat_interleave(codes.first_M.numel() // counts.numel())
    return Codes(*(values_M[counts_M] for values_M in codes))


class FluctuationLog:
    """Measures at every checkpoint of a run how routing differs from the checkpoint before.

    Each process stores the codes of its share of the probe set in the CPU's memory: 20 bytes per
    token and layer.

    Args:
        engine: of the run.
        probe_set: what is read.
        batch_size: samples in a forward pass.
        memory: explains an error where memory runs out.
    """

    def __init__(
        self, engine: Engine, probe_set: ProbeSet, batch_size: int, memory: RunMemory
    ) -> None:
        self._engine, self._probe_set, self._batch_size = engine, probe_set, batch_size
        self._memory = memory
        self._probe = Probe(engine, engine.module, engine.device)
        self._before: list[list[Codes]] = []

    def __call__(self) -> dict[str, float]:
        """Reads the probe set; all processes call it together, in evaluation mode.

        Returns:
            `fluctuation/seconds`, and from the second call on `fluctuation/LAYER/MEASURE` of each
            layer and `fluctuation/MEASURE`, the mean over layers.
        """
        with self._memory.during("validate", lambda: "comparing routing"):
            return self._compare()

    def _compare(self) -> dict[str, float]:
        started = time.monotonic()
        self._engine.train(False)
        world, layers = self._engine.world, self._probe.layers
        sums_LC = torch.zeros(len(layers), 4, dtype=torch.float64)
        tokens_L = torch.zeros(len(layers), dtype=torch.float64)
        now = []
        for number, batch in enumerate(self._probe_set.batches(self._batch_size, world)):
            codes = [Codes(*(v.cpu() for v in layer)) for layer in self._probe.read(*batch)]
            now.append(codes)
            if self._before:
                pairs = zip(codes, self._before[number], strict=True)
                sums_LC += torch.stack([differences(*pair) for pair in pairs])
                tokens_L += torch.tensor([layer.first_M.numel() for layer in codes])
        has_earlier, self._before = bool(self._before), now
        record: dict[str, float] = {}
        if has_earlier:
            flat_LD = torch.cat([sums_LC, tokens_L.unsqueeze(-1)], dim=-1).to(world.device)
            flat_LD = comm.sum_over_samples(flat_LD, world).cpu()
            record = fluctuation_record(shares(flat_LD[:, :-1], flat_LD[:, -1], layers))
        return record | {"fluctuation/seconds": time.monotonic() - started}


def fluctuation_record(layers: dict[str, Fluctuation]) -> dict[str, float]:
    """Flat keys for metrics.jsonl and TensorBoard.

    Args:
        layers: by name.
    """
    each = {
        name: {"top1": x.top1, "set": x.set, "entropy_ratio": x.entropy_ratio}
        for name, x in layers.items()
    }
    record = {f"fluctuation/{measure}": value for measure, value in mean(layers).items()}
    for name, values in each.items():
        record |= {f"fluctuation/{name}/{measure}": value for measure, value in values.items()}
    return record


def mean(layers: Mapping[str, Fluctuation]) -> dict[str, float]:
    """The mean over layers of each measure."""
    count = len(layers)
    return {
        measure: sum(getattr(layer, measure) for layer in layers.values()) / count
        for measure in ("top1", "set", "entropy_ratio")
    }
