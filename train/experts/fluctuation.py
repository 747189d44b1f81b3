"""Routing fluctuation: which tokens of a fixed probe set change experts between two checkpoints.

Two numbers per token are stored, whatever the number of experts: its first expert (for a muMoE the
leaf with the highest coefficient), and a code of its set of experts.

Shapes: M tokens of a forward pass, N experts of a level, S experts of all levels side by side, L
layers, C measures.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyad.model.output import entropy
from polyad.parallel import comm
from polyad.parallel.zero import Engine
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers
from polyad.train.guard.stopping import explain_out_of_memory
from polyad.train.tasks.samples import Samples

SEED = 0
"""Seed of the experts' codes, which must be equal in all processes."""
LOGGED = ("top1", "set", "entropy_ratio")
"""Columns of differences that a run logs, and averages over layers."""


class Codes(NamedTuple):
    """The experts of each token in one layer, as codes."""

    first_M: Tensor
    """The expert selected first: the one with the highest score, or score plus balancing bias. For
    a muMoE the leaf with the highest coefficient, for a mixture of networks the largest share."""
    set_M: Tensor
    """Sum modulo 2^64 of a random number for each expert that is selected, or has a coefficient
    above 0: equal for equal sets, and with probability 2^-64 for different ones."""
    entropy_M: Tensor
    """Entropy of the scores or of the leaves' coefficients, in nats."""


@functools.cache
def expert_codes(num_experts: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns a random 64-bit code for each expert [S], the same in all processes."""
    generator = torch.Generator().manual_seed(SEED)
    codes_S = torch.randint(-(2**63), 2**63 - 1, (num_experts,), generator=generator)
    return codes_S.to(device)


def encode(decision: Decision) -> Codes:
    """Encodes the experts of each token of a layer."""
    entropies = [entropy(p_MN) for p_MN in decision.probabilities()]
    kept = torch.promote_types(decision.levels[0].dtype, torch.float32)
    entropy_M = torch.stack(entropies).sum(0).to(kept)
    sizes = [a_MN.shape[-1] for a_MN in decision.levels]
    codes_S = expert_codes(sum(sizes), entropy_M.device)
    if decision.selected is not None:
        ids_MK = decision.selected.expert_ids_NK
        return Codes(ids_MK[:, 0], codes_S[ids_MK].sum(-1), entropy_M)
    first_M = torch.zeros_like(entropy_M, dtype=torch.int64)
    set_M = torch.zeros_like(first_M)
    for a_MN, codes_N in zip(decision.levels, torch.split(codes_S, sizes), strict=True):
        first_M = first_M * a_MN.shape[-1] + a_MN.argmax(-1)
        set_M = set_M + codes_N.where(a_MN > 0, 0).sum(-1)
    return Codes(first_M, set_M, entropy_M)


class Differences:
    """Accumulates differences in routing between two checkpoints, by layer.

    Args:
        layers: the model's layers.
        device: device of the accumulators.
    """

    def __init__(self, layers: Sequence[RoutedLayer], device: torch.device | str = "cpu") -> None:
        self._layers = layers
        self._sums_L5 = torch.zeros(len(layers), 5, dtype=torch.float64, device=device)

    def add(self, layer: int, now: Codes, before: Codes) -> None:
        """Adds tokens of a layer that both checkpoints read: how many differ in first expert and in
        set, the sums of both entropies, and the number of tokens."""
        differ = [now.first_M != before.first_M, now.set_M != before.set_M]
        each_M = [*differ, now.entropy_M, before.entropy_M, torch.ones_like(now.entropy_M)]
        sums_5 = torch.stack([values_M.double().sum() for values_M in each_M])
        self._sums_L5[layer] += sums_5.to(self._sums_L5.device)

    def result(self, summed: Summed = lambda sums: sums) -> Any:
        """Returns a table with a row for each layer, its `module`.

        `top1` and `set` are the shares of tokens whose first expert, or whose set of experts,
        differs; `entropy` and `compared_entropy` the mean entropies over tokens, in nats, at the
        later and at the earlier checkpoint; `entropy_ratio` is the first divided by the second, NaN
        if that is 0.

        Args:
            summed: sums over processes.
        """
        import pandas as pd

        sums_L5 = summed(self._sums_L5).cpu()
        names = ["top1", "set", "entropy", "compared_entropy"]
        frame = pd.DataFrame((sums_L5[:, :4] / sums_L5[:, 4:]).numpy(), columns=names)
        frame.insert(0, "module", [layer.name for layer in self._layers])
        before = frame["compared_entropy"].where(frame["compared_entropy"] != 0)
        return frame.assign(entropy_ratio=frame["entropy"] / before)


class FluctuationLog:
    """Measures at every checkpoint of a run how routing differs from the previous checkpoint.

    Each process stores the codes of its share of the probe set in CPU memory: 20 bytes per token
    and layer.

    Args:
        engine: the run's engine.
        samples: the probe set.
        batch_size: samples per forward pass.
    """

    def __init__(self, engine: Engine, samples: Samples, batch_size: int) -> None:
        self._engine, self._samples, self._batch_size = engine, samples, batch_size
        self._layers = routed_layers(engine.module)
        self._before: list[list[Codes]] = []

    def __call__(self) -> dict[str, float]:
        """Reads the probe set; all processes call it together, in evaluation mode.

        Returns:
            `fluctuation/seconds`, and from the second call on `fluctuation/LAYER/MEASURE` for each
            layer and `fluctuation/MEASURE`, the mean over layers.
        """
        started = time.monotonic()
        with explain_out_of_memory(lambda: "comparing routing", self._engine.world):
            record = self._compare()
        return record | {"fluctuation/seconds": time.monotonic() - started}

    @torch.no_grad()
    def _compare(self) -> dict[str, float]:
        self._engine.train(False)
        world, now = self._engine.world, list[list[Codes]]()
        differences = Differences(self._layers, world.device)
        for number, (inputs, counts) in enumerate(self._samples.inputs(self._batch_size, world)):
            with deciding(self._engine.module, self._layers) as decisions:
                self._engine(inputs)
            now.append([])
            for place, layer in enumerate(self._layers):
                of_all = encode(decisions[layer.name])
                # A sample may have any number of tokens in a layer.
                counts_M = counts.flatten().repeat_interleave(len(of_all.first_M) // counts.numel())
                codes = Codes(*(each_M[counts_M].cpu() for each_M in of_all))
                now[number].append(codes)
                if self._before:
                    differences.add(place, codes, self._before[number][place])
        has_earlier, self._before = bool(self._before), now
        if not has_earlier:
            return {}
        table = differences.result(lambda sums: comm.sum_over_samples(sums, world))
        record = {f"fluctuation/{name}": value for name, value in mean(table).items()}
        for row in table.to_dict("records"):
            record |= {f"fluctuation/{row['module']}/{name}": row[name] for name in LOGGED}
        return record


def mean(table: Any) -> dict[str, float]:
    """The mean over layers of each measure in `LOGGED`."""
    means: dict[str, float] = table[list(LOGGED)].mean(skipna=False).to_dict()
    return means
