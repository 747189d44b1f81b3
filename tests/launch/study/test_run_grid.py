"""A grid in a study of real processes."""

import json
from pathlib import Path

import pytest

from tests.launch.study.test_run import QUICK, start, write

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_point_of_a_grid_that_diverges_is_worse_than_others_and_the_study_goes_on(
    tmp_path: Path, data: Path
) -> None:
    path = write(
        tmp_path,
        data,
        variants={"dense": None},
        seeds=[1, 2],
        common={"train.steps": 12, "train.max_skipped_steps": 3, **QUICK},
        grid={"optimizer.learning_rate": [1.0e6, 0.01]},
        grid_seeds=1,
    )
    page = tmp_path / "study.html"
    process = start(path, "--json", str(tmp_path / "r.json"), "--page", str(page))
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "dense at learning_rate=1000000.0, seed 1: diverged at step" in err
    assert "not finite" in out
    kept = start(tmp_path / "r.json").communicate(timeout=1200)[0]
    assert "not finite" in kept
    assert "0.01" in page.read_text(encoding="utf-8")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["finished"]
    compared = [(run["point"], run["seed"], run["step"]) for run in found["runs"]]
    assert compared == [("learning_rate=0.01", 1, 12), ("learning_rate=0.01", 2, 12)]
    (diverged,) = found["swept"]
    assert diverged["loss"] is None
    assert diverged["step"] < 12
