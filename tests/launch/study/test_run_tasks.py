"""A study of several tasks with a grid, in real processes."""

import json
from pathlib import Path

import pytest

from polyad.launch.study.result import TasksResult
from polyad.launch.study.sentences import answers
from tests.launch.study.test_page import Reader
from tests.launch.study.test_run import QUICK, start, write

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_tasks_and_a_grid_are_trained_and_the_best_point_is_compared(
    tmp_path: Path, data: Path
) -> None:
    path = write(
        tmp_path,
        data,
        data=None,
        seeds=[1, 2],
        grid={"optimizer.learning_rate": [1.0e-6, 0.01]},
        grid_seeds=1,
        tasks={
            "two": {"data.path": str(data), "train.steps": 2},
            "four": {"data.path": str(data), "train.steps": 4, "checkpoint.keep_best": True},
        },
        common={"evaluation.every": 2, **QUICK},
    )
    done = start(path, "--json", "-")
    out, err = done.communicate(timeout=1200)
    assert done.returncode == 0, err
    result = json.loads(out)
    folder = tmp_path / "study"
    assert result == json.loads((folder / "results.json").read_text())
    assert "=== task four, 2 of 2" in err
    assert "== run 6 of 6: four, cp at learning_rate=0.01, seed 2" in err
    for name, task in result["tasks"].items():
        assert task["finished"]
        for variant in ("dense", "cp"):
            # With a rate of 1e-6 nothing is learned; the second seed trains the other point alone.
            assert task["variants"][variant]["point"] == "learning_rate=0.01"
            points = task["grids"][variant]
            (other,) = (point for point in points if point != "learning_rate=0.01")
            assert points["learning_rate=0.01"] < points[other]
            runs = folder / name / "runs" / variant
            assert (runs / "learning_rate=0.01" / "seed-2" / "metrics.jsonl").exists()
            assert not (runs / other / "seed-2").exists()
        assert [run["seed"] for run in task["runs"]] == [1, 1, 2, 2]
        assert len(task["swept"]) == 2
    means = result["variants"]["cp"]["mean"]["values"]
    by_task = [
        [r["loss"] for r in t["runs"] if r["variant"] == "cp"] for t in result["tasks"].values()
    ]
    assert means == pytest.approx([(a + b) / 2 for a, b in zip(*by_task, strict=True)])
    # The task of four steps was validated on the way: the curve is of the best points.
    assert result["tasks"]["two"]["variants"]["cp"]["curve"] == []
    curve = result["tasks"]["four"]["variants"]["cp"]["curve"]
    assert [each["step"] for each in curve] == [2, 4]
    for each in curve:
        of_cp, of_dense = (
            [
                json.loads(line)["validation_loss"]
                for seed in (1, 2)
                for line in (at / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
                if json.loads(line)["step"] == each["step"]
            ]
            for at in (folder / f"four/runs/{v}/learning_rate=0.01" for v in ("cp", "dense"))
        )
        assert each["tokens"] == each["step"] * 4 * 32
        wanted = [a - b for a, b in zip(of_cp, of_dense, strict=True)]
        assert each["difference"]["differences"] == pytest.approx(wanted)
        assert each["score"]["mean"] == pytest.approx(sum(of_cp) / 2)
    # The same command again trains nothing.
    again = start(path, "--json", "-", "--page", str(tmp_path / "page.html"))
    out, err = again.communicate(timeout=1200)
    assert "== run" not in err
    assert json.loads(out)["variants"] == result["variants"]
    read = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    said = answers(TasksResult.from_json(result))[0]
    assert f"{said}." in read.text("What the intervals say")
    assert "Four: validation loss minus that of dense" in read.text("Figure")
