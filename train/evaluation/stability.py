"""`polyad compare`: which tokens two checkpoints of a model send to other experts."""

import math
import time
from pathlib import Path
from typing import Any

import torch

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import load_model, open_checkpoint
from polyad.train.config.smaller import to_evaluate
from polyad.train.config.text import flatten
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import Fluctuation, Probe, differences, mean, shares
from polyad.train.guard.memory import explain_out_of_memory
from polyad.train.loop.device import allow_tf32
from polyad.train.reading import Evaluated, open_evaluated
from polyad.train.results import aligned
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.task import ProbeSet

PROBE_UNITS = 65_536
"""About how many tokens or images are compared, unless the user says it."""
FREE_KEYS = ("compile", "recompute", "dropout", "feed_forward.experts")
"""Of a model: they change nothing of what it computes in evaluation."""


def compare(
    path: Path,
    other: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    units: int = PROBE_UNITS,
    overrides: tuple[str, ...] = (),
) -> dict[str, Any]:
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
        The result, JSON values; the same on every process.

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
    probe = task.probe(units, split)
    config = opened.config
    world = opened.joined(split)
    allow_tf32(config.train.tf32, world.device)
    started = time.monotonic()
    with explain_out_of_memory(lambda: "comparing routing", world, to_evaluate(config)):
        layers, count = _compare(opened, before, probe, world)
    _check_finite(layers, opened.weights.folder)
    return {
        **opened.about(),
        "compared_with": str(before.folder),
        "compared_step": before.training_step,
        "data": task.name,
        "split": split,
        "data_kind": config.data.kind,
        f"probe_{task.unit.name}s": count,
        **probe.about(),
        "layers": {
            name: {
                "top1": layer.top1,
                "set": layer.set,
                "entropy": layer.entropy,
                "compared_entropy": layer.entropy_before,
                "entropy_ratio": layer.entropy_ratio,
            }
            for name, layer in layers.items()
        },
        "mean": mean(layers),
        "precision": config.train.precision,
        "processes": world.size,
        "seconds": time.monotonic() - started,
    }


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


def _compare(
    opened: Evaluated, other: Checkpoint, probe: ProbeSet, world: comm.World
) -> tuple[dict[str, Fluctuation], int]:
    """The shares of each layer over all processes, and the number of units."""
    precision, device = opened.config.train.precision, world.device
    probes = []
    for checkpoint in (opened.weights, other):
        model = load_model(checkpoint.folder, device=device, precision=precision)
        probes.append(Probe(model, model, device))
    now, before = probes
    size = opened.batch_size * world.data_parallel_size
    total = math.ceil(len(probe) / size)
    unit = opened.task.unit
    per_sample = opened.task.model.units_per_sample()
    report = Progress("compare", len(probe) * per_sample, unit.short) if world.is_main else None
    sums_LC = torch.zeros(len(now.layers), 4, dtype=torch.float64, device=device)
    tokens_L = torch.zeros(len(now.layers), dtype=torch.float64, device=device)
    units = torch.zeros(1, dtype=torch.float64, device=device)
    for done, batch in enumerate(probe.batches(opened.batch_size, world), start=1):
        pairs = list(zip(now.read(*batch), before.read(*batch), strict=True))
        sums_LC += torch.stack([differences(*pair) for pair in pairs])
        tokens_L += torch.tensor([codes.first_M.numel() for codes, _ in pairs], device=device)
        units += batch[1].sum()
        if report is not None:
            report(done / total)
    parts = [sums_LC.flatten(), tokens_L, units]
    summed = comm.sum_over_samples(torch.cat(parts), world).cpu()
    sums, tokens_L, units = torch.split(summed, [len(part) for part in parts])
    return shares(sums.view(sums_LC.shape), tokens_L, now.layers), int(units)


def _check_finite(layers: dict[str, Fluctuation], folder: Path) -> None:
    for name, layer in layers.items():
        if not math.isfinite(layer.entropy + layer.entropy_before):
            raise ConfigError(
                f"compare: the scores of {name} are not finite in {folder} or in what "
                f"it is compared with: the weights hold NaN or inf, or are too large"
            )


def comparison_table(result: dict[str, Any]) -> str:
    """A comparison for a person."""
    units = f"{task_class(result['data_kind']).unit.name}s"
    windows = f", in {result['probe_windows']:,} windows" if "probe_windows" in result else ""
    rows = [
        ("checkpoint", f"{result['checkpoint']} (step {result['step']:,})"),
        ("compared with", f"{result['compared_with']} (step {result['compared_step']:,})"),
        ("probe set", f"{result[f'probe_{units}']:,} {units} of {result['split']} of "
         f"{result['data']}{windows} evenly over it"),
        ("processes", f"{result['processes']}"),
    ]  # fmt: skip
    table = [("", "other first expert", "other experts", "entropy ratio")]
    for name, layer in {**result["layers"], "mean": result["mean"]}.items():
        shares = (f"{100 * layer[share]:.2f}%" for share in ("top1", "set"))
        table.append((name, *shares, f"{layer['entropy_ratio']:.4f}"))
    return "\n".join([*aligned(rows, "<"), "", *aligned(table)])
