"""A task that Polyad knows nothing of does all that language modelling does.

`tests/helpers/vectors.py` is that task: one file, with its lines of the registries. No command has
been told of it but by `POLYAD_PLUGINS`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from polyad.parallel.checkpoint.load import Checkpoint
from tests.helpers.runs import records

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "model": {"kind": "perceptron"},
    "data": {"kind": "vectors"},
    "train": {"steps": 12, "global_batch_size": 16, "micro_batch_size": 4},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    "schedule": {"kind": "constant"},
    "checkpoint": {"every": 6},
    "evaluation": {"every": 6},
    "log": {"trackers": []},
}

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def command() -> Command:
    """Runs a command of `polyad` with the plugin."""
    added = {"POLYAD_PLUGINS": "tests.helpers.vectors", "PYTHONPATH": str(ROOT)}

    def call(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "polyad.launch", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | added,
        )
        assert done.returncode == status, done.stderr
        return done

    return call


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"run": {"folder": str(folder / "run")}} | changes))
    return path


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps in one go."""
    config = written(tmp_path_factory.mktemp("whole"))
    command("train", config)
    return config.parent / "run"


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(run / "checkpoints" / f"step-{step:08d}")
    return {
        f"{name}/{field}": checkpoint.whole(name, field)
        for name, fields in checkpoint.tensors.items()
        for field in fields
    }


@pytest.mark.slow
def test_records_count_its_units_and_have_its_scores(whole: Path) -> None:
    lines = records(whole)
    assert [line["vectors"] for line in lines] == [16 * step for step in range(1, 13)]
    assert all(line["vectors_per_second"] > 0 for line in lines)
    scored = [line["step"] for line in lines if "validation_accuracy" in line]
    assert scored == [6, 12]
    assert lines[-1]["validation_accuracy"] > 0.8
    assert lines[-1]["loss"] < lines[0]["loss"] / 2


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_whole_one(
    command: Command, whole: Path, tmp_path: Path
) -> None:
    config = written(tmp_path)
    command("train", config, "train.steps=6")
    command("train", config)
    ours, theirs = tensors(tmp_path / "run", 12), tensors(whole, 12)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [line["loss"] for line in records(tmp_path / "run")][6:] == [
        line["loss"] for line in records(whole)
    ][6:]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_are_one(command: Command, whole: Path, tmp_path: Path) -> None:
    command("launch", written(tmp_path), "--processes-per-node", 2)
    one, two = records(whole), records(tmp_path / "run")
    for key in ("loss", "grad_norm"):
        for ours, theirs in zip(one, two, strict=True):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (key, ours["step"])
    assert one[-1]["validation_accuracy"] == two[-1]["validation_accuracy"]
    assert one[-1]["validation_loss"] == pytest.approx(two[-1]["validation_loss"], rel=1e-6)


@pytest.mark.slow
def test_validate_evaluate_and_report_speak_its_words(
    command: Command, whole: Path, tmp_path: Path
) -> None:
    shown = command("validate", written(tmp_path)).stdout
    assert "12 of 16 vectors" in shown
    assert "FLOPs/vector" in shown
    result = json.loads(command("evaluate", whole, "--split", "test", "--json", "-").stdout)
    assert result["vectors_scored"] == 101
    assert result["accuracy"] * 101 == pytest.approx(round(result["accuracy"] * 101))
    command("report", whole, "--output", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<dt>Vectors</dt><dd>192" in page
    assert "Validation accuracy" in page
    assert "token" not in page.partition("</style>")[2]


@pytest.mark.slow
def test_what_it_is_not_is_one_line(command: Command, whole: Path, tmp_path: Path) -> None:
    config = written(tmp_path)
    for arguments, said in (
        (("validate", config, "model={kind: gpt2}"), "data.kind: vectors is not allowed with"),
        (
            ("evaluate", whole, "--attack", "word-swap", "--rate", "0.1"),
            "--attack word-swap: is not",
        ),
        (("train", config, f"run.folder={whole}", "data.spread=0.4"), "holds another run"),
    ):
        (line,) = command(*arguments, status=2).stderr.splitlines()
        assert line.startswith("polyad: error: ")
        assert said in line


@pytest.mark.slow
def test_a_study_compares_it_by_its_first_score(command: Command, tmp_path: Path) -> None:
    base = written(tmp_path)
    study = {
        "base": str(base),
        "folder": str(tmp_path / "study"),
        "seeds": [1, 2],
        "baseline": "small",
        "variants": {"small": {"model.hidden_size": 2}, "large": {"model.hidden_size": 32}},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    assert "4 runs of 12 steps" in command("study", file, "--dry-run").stderr
    table = command("study", file).stdout
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    assert results["scores"] == ["accuracy", "loss"]
    small, large = (each for each in results["comparison"] if each["measure"] == "accuracy")
    assert large["mean"] > small["mean"]
    assert large["pairs"] == 2
    assert large["difference"] == pytest.approx(large["mean"] - small["mean"])
    assert "accuracy" in table
