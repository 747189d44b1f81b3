"""A task that Polyad knows nothing of does all that language modelling does.

`tests/helpers/vectors.py` is that task: one file, with its lines of the registries. No command has
been told of it but by `POLYAD_PLUGINS`.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.runs import records
from tests.helpers.started import ROOT, polyad

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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


def command(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command of `polyad` with the plugin."""
    added = {"POLYAD_PLUGINS": "tests.helpers.vectors", "PYTHONPATH": str(ROOT)}
    done = polyad(*arguments, **added)
    assert done.returncode == status, done.stderr
    return done


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"run": {"folder": str(folder / "run")}} | changes))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps in one go."""
    config = written(tmp_path_factory.mktemp("whole"))
    command("train", config)
    return config.parent / "run"


def test_records_count_its_units_and_go_on_where_they_were(whole: Path, tmp_path: Path) -> None:
    lines = records(whole)
    assert [line["vectors"] for line in lines] == [16 * step for step in range(1, 13)]
    assert all(line["vectors_per_second"] > 0 for line in lines)
    assert [line["step"] for line in lines if "validation_accuracy" in line] == [6, 12]
    assert lines[-1]["validation_accuracy"] > 0.8
    config = written(tmp_path)
    for steps in (6, 12):
        command("train", config, f"train.steps={steps}")
    assert [line["loss"] for line in records(tmp_path / "run")] == [line["loss"] for line in lines]


def test_two_processes_are_one(whole: Path, tmp_path: Path) -> None:
    command("launch", written(tmp_path), "--processes-per-node", 2)
    one, two = records(whole), records(tmp_path / "run")
    for key in ("loss", "grad_norm"):
        for ours, theirs in zip(one, two, strict=True):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (key, ours["step"])
    assert one[-1]["validation_accuracy"] == two[-1]["validation_accuracy"]
    assert one[-1]["validation_loss"] == pytest.approx(two[-1]["validation_loss"], rel=1e-6)


def test_validate_evaluate_and_report_speak_its_words(whole: Path, tmp_path: Path) -> None:
    config = written(tmp_path)
    shown = command("validate", config).stdout
    assert "12 of 16 vectors" in shown
    assert " per vector" in shown
    result = json.loads(command("evaluate", whole, "--split", "test", "--json", "-").stdout)
    assert result["vectors_scored"] == 101
    assert result["accuracy"] * 101 == pytest.approx(round(result["accuracy"] * 101))
    command("report", whole, "--output", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<dt>Vectors</dt><dd>192" in page
    assert "Validation accuracy" in page
    assert "tokens" not in page.partition("</style>")[2]
    for words, said in (
        (("validate", config, "model={kind: gpt2}"), "data.kind: vectors is not allowed with"),
        (("evaluate", whole, "--attack", "word-swap", "--rate", "0.1"), "--attack word-swap: is"),
        (("train", config, f"run.folder={whole}", "data.spread=0.4"), "holds another run"),
    ):
        (line,) = command(*words, status=2).stderr.splitlines()
        assert said in line
