"""`polyad compare`: which tokens two checkpoints of a model send to other experts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import load_model, open_checkpoint
from polyad.train.config.smaller import to_evaluate
from polyad.train.config.text import flatten
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import (
    Codes,
    Fluctuation,
    differences,
    encode,
    expert_codes,
    mean,
    shares,
)
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.guard.memory import explain_out_of_memory
from polyad.train.loop.device import allow_tf32
from polyad.train.reading import Evaluated, Reading, open_evaluated, read
from polyad.train.results import aligned
from polyad.train.tasks.samples import Samples, samples_of

PROBE_UNITS = 65_536
"""About how many tokens or images are compared, unless the user says it."""
FREE_KEYS = ("compile", "recompute", "dropout", "feed_forward.experts")
"""Keys of a model that change nothing of what it computes in evaluation."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the routing of two checkpoints differs."""

    checkpoint: str
    step: int
    compared_with: str
    compared_step: int
    data: str
    split: str
    data_kind: str
    unit: str
    """What was read: tokens or images."""
    units: int
    about: Mapping[str, int]
    """How the samples were made, by what each number is."""
    layers: Mapping[str, Fluctuation]
    """By name."""
    precision: str
    processes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        found = dict(vars(self))
        for name in ("unit", "units", "about", "layers", "precision", "processes", "seconds"):
            del found[name]
        return {
            **found,
            f"probe_{self.unit}": self.units,
            **self.about,
            "layers": self.layers,
            "mean": mean(self.layers),
            "precision": self.precision,
            "processes": self.processes,
            "seconds": self.seconds,
        }

    def text(self) -> str:
        """What people get."""
        windows = self.about.get("probe_windows")
        among = "" if windows is None else f", in {windows:,} windows"
        facts = [
            ("checkpoint", f"{self.checkpoint} (step {self.step:,})"),
            ("compared with", f"{self.compared_with} (step {self.compared_step:,})"),
            ("probe set", f"{self.units:,} {self.unit} of {self.split} of {self.data}{among} "
             f"evenly over it"),
            ("processes", f"{self.processes}"),
        ]  # fmt: skip
        table: list[tuple[str, ...]] = [
            ("", "other first expert", "other experts", "entropy ratio")
        ]
        measured = {name: layer.to_json() for name, layer in self.layers.items()}
        for name, layer in (measured | {"mean": mean(self.layers)}).items():
            shares = (f"{100 * layer[share]:.2f}%" for share in ("top1", "set"))
            table.append((name, *shares, f"{layer['entropy_ratio']:.4f}"))
        return "\n".join([*aligned(facts, "<"), "", *aligned(table)])


def compare(
    path: Path,
    other: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    units: int = PROBE_UNITS,
    overrides: tuple[str, ...] = (),
) -> Comparison:
    """Compares the routing of two checkpoints, in one process or under torchrun.

    Both models are in memory, and of the data one batch.

    Args:
        path: a checkpoint, or a run whose newest one is taken: mostly the later one.
        other: another of the same model.
        data: prepared data; None takes that of the first one's run.
        split: `validation`, `test` or `train`.
        units: tokens or images, at least and evenly over the split: of text, full windows are read.
        overrides: `key=value` for keys that evaluation reads.

    Returns:
        The same on every process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides)
    task = opened.task
    if not isinstance(opened.weights, Checkpoint):
        raise ConfigError(
            f"compare: is not allowed with {path}, a folder of weights; `polyad convert --to "
            f"polyad` makes a checkpoint of it"
        )
    before = open_checkpoint(other)
    _check_pair(opened, opened.weights, before, data_is_named=data is not None)
    task.check_split(split)
    about = task.probe(units, split).about()
    config = opened.config
    world = opened.joined(split)
    allow_tf32(config.train.tf32, world.device)
    started = time.monotonic()
    with explain_out_of_memory(lambda: "comparing routing", world, lambda: to_evaluate(config)):
        samples = samples_of(task, split, units)
        now, other_model = (
            load_model(each.folder, device=world.device, precision=config.train.precision)
            for each in (opened.weights, before)
        )
        compared = _Compared(now, other_model, samples)
        read(
            *(now, compared.layers, samples, [compared]),
            batch_size=opened.batch_size,
            world=world,
            told="compare",
        )
        layers, count = compared.result(world)
    _check_finite(layers, opened.weights.folder)
    return Comparison(
        **opened.about(),
        compared_with=str(before.folder),
        compared_step=before.training_step,
        data=task.name,
        split=split,
        data_kind=config.data.kind,
        unit=f"{task.unit.name}s",
        units=count,
        about=about,
        layers=layers,
        precision=config.train.precision,
        processes=world.size,
        seconds=time.monotonic() - started,
    )


def _check_pair(
    opened: Evaluated, own: Checkpoint, other: Checkpoint, *, data_is_named: bool
) -> None:
    """Checks that both are of one model with experts, and fit the tokens of the probe set."""
    ours, theirs = (
        flatten(checkpoint.model_config().model_dump(mode="json")) for checkpoint in (own, other)
    )
    changed = [
        f"model.{key}: {theirs.get(key)!r} there, {ours.get(key)!r} in {own.folder}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and key not in FREE_KEYS
    ]
    if changed:
        more = f"; and {len(changed) - 2} more" if len(changed) > 2 else ""
        raise ConfigError(
            f"compare: {other.folder}: is of another model: {'; '.join(changed[:2])}{more}"
        )
    if not opened.config.model.has_experts():
        raise ConfigError(
            f"compare: {own.folder} has model.feed_forward.kind: dense, and no "
            f"experts whose choice could be compared"
        )
    opened.task.check_weights(other, f"checkpoint of --with {other.folder}")
    known = [c.state.data_fingerprint for c in (own, other)]
    if known[0] != known[1] and not data_is_named:
        raise ConfigError(
            f"compare: {other.folder}: was trained on other data than "
            f"{own.folder}; --data names the text that both are to read"
        )


class _Compared:
    """Adds up how what a model decides differs from what another decides of the same batches.

    Args:
        now: the model that reads.
        before: the other one.
        samples: that both read.
    """

    blocks: Sequence[int] = ()

    def __init__(self, now: nn.Module, before: nn.Module, samples: Samples) -> None:
        self.layers, self._before, self._samples = routed_layers(now), before, samples
        device = next(now.parameters()).device
        self._codes = {
            layer.name: expert_codes(layer.num_experts).to(device) for layer in self.layers
        }
        self._sums_LC = torch.zeros(len(self.layers), 4, dtype=torch.float64, device=device)
        self._tokens_L = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        self._units = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        with deciding(self._before, self.layers) as decisions:
            self._samples.forward(self._before, reading.batch, {})
        for number, layer in enumerate(self.layers):
            counted_N = reading.numbers_of(reading.decisions[layer.name]) >= 0
            now, before = (
                Codes(*(each[counted_N] for each in encode(one, self._codes[layer.name])))
                for one in (reading.decisions[layer.name], decisions[layer.name])
            )
            self._sums_LC[number] += differences(now, before)
            self._tokens_L[number] += counted_N.sum()
        counted = reading.counted_N
        self._units += len(reading.number_R) if counted is None else counted.sum()

    def result(self, world: comm.World) -> tuple[dict[str, Fluctuation], int]:
        """The shares of each layer over all processes, and the number of units."""
        parts = [self._sums_LC.flatten(), self._tokens_L, self._units]
        summed = comm.sum_over_samples(torch.cat(parts), world).cpu()
        sums, tokens_L, units = torch.split(summed, [len(part) for part in parts])
        return shares(sums.view(self._sums_LC.shape), tokens_L, self.layers), int(units)


def _check_finite(layers: dict[str, Fluctuation], folder: Path) -> None:
    for name, layer in layers.items():
        if not math.isfinite(layer.entropy + layer.entropy_before):
            raise ConfigError(
                f"compare: the scores of {name} are not finite in {folder} or in what "
                f"it is compared with: the weights hold NaN or inf, or are too large"
            )
