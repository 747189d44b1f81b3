"""Whole runs, called in worker processes: configuration to checkpoint, and evaluation."""

import contextlib
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MANIFEST_FILE, record_of, render
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.train.errors import Stopped
from polyad.train.evaluation.evaluate import evaluate
from polyad.train.loop.metrics import Metrics
from polyad.train.loop.profiling import memory_of_step, peak_memory_bytes
from polyad.train.loop.step import StepStatistics
from polyad.train.measures.atlas import Atlas
from polyad.train.measures.comparison import Comparison
from polyad.train.measures.measure import Analysis, examine
from polyad.train.measures.registry import MEASURES
from polyad.train.measures.rewriting import Rewriting
from polyad.train.measures.robustness import Robustness
from polyad.train.reading import EvaluationContext, open_evaluated
from polyad.train.results import json_value
from polyad.train.train import main
from tests.helpers.little_memory import little_memory


def ended(config: Path, *overrides: str) -> tuple[str, str]:
    """How `polyad train` ends, and what it says."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            end = f"step {main(config, overrides).step}"
        except (Exception, Stopped) as error:
            end = f"{type(error).__name__} {getattr(error, 'exit_status', '-')}: {error}"
    return end, said.getvalue()


def write_config(path: Path, data: Path, /, **changes: Any) -> Path:
    """A small run's configuration; `changes` are dotted keys with `__` for the dot."""
    tree: dict[str, Any] = {
        "seed": 3,
        "run": {"folder": str(path.parent / "run")},
        "model": {
            "kind": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4,
            "sequence_length": 32, "feed_forward": {"kind": "dense"},
        },
        "data": {"path": str(data)},
        "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32"},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01, "clip_grad_norm": 1.0},
        "schedule": {"kind": "constant"},
        "parallel": {"zero_stage": 1},
        "checkpoint": {"every": 3},
        "evaluation": {"every": 3, "max_windows": 5},
    }  # fmt: skip
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


QUIET: dict[str, Any] = {"evaluation__every": 0, "checkpoint__every": 0, "log__trackers": []}
"""Changes with which a run writes nothing but its records and its last checkpoint."""


def run(config: Path, *overrides: str) -> int:
    """`polyad train`; returns the steps done."""
    return main(config, overrides).step


def train_each(config: Path, overrides: list[str]) -> dict[str, str]:
    """Trains two steps with each override; gives the errors that are faults of the program."""
    wrong = {}
    for number, override in enumerate(overrides):
        folder = config.parent / f"run-{number}"
        try:
            words = (f"run.folder={folder}", "train.steps=2", "evaluation.max_windows=2", override)
            run_and_listen(config, *words)
        except Exception as error:
            if not isinstance(getattr(error, "exit_status", None), int):
                wrong[override] = repr(error)
    return wrong


def run_and_listen(config: Path, *overrides: str) -> tuple[int, str]:
    """`polyad train`; returns the steps done, and what was written to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(config, overrides).step, said.getvalue()


def run_expecting_error(config: Path, *overrides: str) -> tuple[str, str, int]:
    """The error that a run ends with: class, text, exit status."""
    try:
        main(config, overrides)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "exit_status", -1)
    return "none", "", 0


def refusal(pool: Any, config: Path, *overrides: str) -> str:
    """The one line that a run is refused with, for bad input; the same on all processes.

    Args:
        pool: of worker processes.
        config: of the run.
        overrides: `key=value`.
    """
    first, *others = pool.run(run_expecting_error, config, *overrides)
    assert all(other == first for other in others)
    _, text, status = first
    assert status == 2, first
    assert "\n" not in text
    return str(text)


def evaluation(path: Path, **options: Any) -> dict[str, Any]:
    """`polyad evaluate`: the values for programs."""
    return evaluated(path, **options)[0]


def evaluation_in_parts(folder: Path, **asked: Any) -> Any:
    """The same of a model that is read block by block."""
    with little_memory():
        return evaluation(folder, **asked)


def evaluation_error(path: Path, **options: Any) -> tuple[str, int]:
    """The error that `polyad evaluate` ends with: text, exit status."""
    try:
        evaluation(path, **options)
    except Exception as error:
        return str(error), getattr(error, "exit_status", -1)
    return "none", 0


def evaluated(path: Path, **options: Any) -> tuple[dict[str, Any], str]:
    """`polyad evaluate`: the values for programs, and the text for people."""
    opened, split = _opened(path, options), options.pop("split", "validation")
    values, text = evaluate(opened, split, **options)
    return json_value(values), text


def _opened(path: Path, options: dict[str, Any]) -> EvaluationContext:
    """Opens a checkpoint with the options that say how, which are taken out."""
    names = ("data", "overrides", "weights", "base", "interventions")
    return open_evaluated(path, **{name: options.pop(name) for name in names if name in options})


def measured(path: Path, name: str, **options: Any) -> tuple[dict[str, Any], str]:
    """A measure by its name: the values for programs, and the text for people."""
    return both_forms(path, MEASURES[name], **options)


def both_forms(path: Path, kind: type[Analysis], **options: Any) -> tuple[dict[str, Any], str]:
    """What is found out about a checkpoint: the values for programs, and the text for people."""
    opened, split = _opened(path, options), options.pop("split", "validation")
    found = examine(opened, kind(**options), split)
    return json_value(found), found.text()


def frame_of(result: dict[str, Any], name: str, **where: Any) -> pd.DataFrame:
    """A table of a result, with the rows that have these values."""
    rows = pd.DataFrame(result[name])
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows.reset_index(drop=True)


def counts_of(
    result: dict[str, Any],
    module: str,
    by: str,
    classes: Sequence[str] | None = None,
    level: int = 0,
) -> "np.ndarray[Any, Any]":
    """How many tokens of each class every expert of a level gets [S, Y]."""
    (experts,) = frame_of(result, "levels", module=module, level=level)["experts"]
    counts = frame_of(result, "counts", module=module, level=level, by=by)
    table = counts.pivot_table("tokens", "expert", "class", fill_value=0)
    columns = list(table.columns) if classes is None else list(classes)
    return table.reindex(index=range(experts), columns=columns, fill_value=0).to_numpy()


def compare(path: Path, other: Path, **options: Any) -> dict[str, Any]:
    """`polyad compare`."""
    return both_forms(path, Comparison, other=other, **options)[0]


def rewriting(path: Path, option: str, **options: Any) -> dict[str, Any]:
    """`polyad experts rewrite`."""
    return both_forms(path, Rewriting, move=option, **options)[0]


def atlas(path: Path, **options: Any) -> dict[str, Any]:
    """`polyad experts atlas`."""
    return both_forms(path, Atlas, **options)[0]


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none before the first step."""
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.open()] if metrics.exists() else []


def in_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """The numbers that a run has in TensorBoard, by name and step."""
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {n: {e.step: e.value for e in found.Scalars(n)} for n in found.Tags()["scalars"]}


def highest_memory(rank: int, size: int) -> tuple[int, int]:
    """What a step tells of the processes' memory while one holds much; this one's own peak."""
    world = comm.initialize()
    ballast = torch.ones(size // 4) if world.rank == rank else None
    peak = peak_memory_bytes(world.device)
    step = StepStatistics(world.device)
    step.add(torch.zeros(()), ())
    step.exchange([memory_of_step(world.device)])
    del ballast
    return step.numbers.highest[0], peak


FEED_FORWARDS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "smoe": {
        "kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "graph": "attention",
        "balancing_rate": 0.01, "placement": [1],
    },
    "emoe": {"kind": "emoe", "num_experts": 8, "top_k": 4, "blocks": [1]},
    "cp": {"kind": "mumoe", "factorization": "cp", "num_experts": [16]},
    "tr": {"kind": "mumoe", "factorization": "tr", "num_experts": [16, 2]},
    "mxd": {"kind": "mxd", "num_experts": 64, "top_k": 4},
    "transcoder": {"kind": "transcoder", "num_experts": 96, "top_k": 4},
}  # fmt: skip
"""One of each kind of feed-forward, for what has to work alike with all of them. The sparse one
has state in buffers."""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every master weight of a checkpoint by name."""
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.whole(name) for name in checkpoint.shapes()}


def newest(run_folder: Path) -> Path:
    """The last checkpoint of a finished run of 6 steps."""
    return run_folder / "checkpoints" / "step-00000006"


def reseal(checkpoint: Path) -> None:
    """Writes a manifest that vouches for a checkpoint's files as they are now."""
    manifest = checkpoint / MANIFEST_FILE
    step = json.loads(manifest.read_text())["step"]
    others = sorted(path for path in checkpoint.iterdir() if path != manifest)
    manifest.write_bytes(render(step, {path.name: record_of(path.read_bytes()) for path in others}))


def run_with_slow_records(config: Path, seconds: float, *overrides: str) -> int:
    """`polyad train` whose records take so long to write; returns the steps done."""
    write = Metrics.write

    def slow_write(metrics: Metrics, record: dict[str, Any]) -> None:
        time.sleep(seconds)
        write(metrics, record)

    with mock.patch.object(Metrics, "write", slow_write):
        return main(config, overrides).step


def scored_set(path: Path, name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """`polyad robustness`."""
    return both_forms(path, Robustness, set=name, folder=folder, **options)[0]
