"""`checkpoint.py`: what it measures at a tiny size, and what it refuses."""

import pytest

from tests.benchmarks.checkpoint import checkpoint
from tests.benchmarks.script import run
from tests.helpers.saving import bench_saves
from tests.helpers.training import MODEL

pytestmark = pytest.mark.distributed


def test_every_figure_is_measured_and_nothing_is_left(workers, tmp_path):
    ((result, table),) = workers(1).run(bench_saves, str(tmp_path), MODEL)
    assert list(tmp_path.iterdir()) == []
    assert set(result["all_seconds"]) == {
        "plain_write", "synchronous_save", "asynchronous_save", "asynchronous_wait",
        "asynchronous_stall", "asynchronous_commit", "step", "step_while_copying",
        "step_while_writing", "verify_from_disk", "verify_from_memory", "load",
    }  # fmt: skip
    assert all(len(taken) >= 2 for taken in result["all_seconds"].values())
    for name, (lowest, highest) in result["spread"].items():
        assert lowest <= result["seconds"][name] <= highest
    stalls = zip(
        *(result["all_seconds"][f"asynchronous_{part}"] for part in ("save", "wait", "stall")),
        strict=True,
    )
    assert all(save > 0 and wait > 0 and save + wait == stall for save, wait, stall in stalls)
    seconds = result["seconds"]
    parameters = 12 * (61 * 36 + 17 * 36 + 2 * (12 * 36 * 36 + 13 * 36) + 2 * 36)
    assert result["bytes"] == pytest.approx(parameters, rel=0.15)  # and an index
    assert 0 < seconds["asynchronous_stall"] < seconds["asynchronous_commit"]
    ratio = seconds["asynchronous_stall"] / seconds["synchronous_save"]
    assert result["stall_ratio"] == pytest.approx(ratio)
    assert result["stall_reached"] == (ratio <= 1 / 20)
    assert result["bandwidth_ratio"] == pytest.approx(
        seconds["plain_write"] / seconds["synchronous_save"]
    )
    assert "stall / synchronous save" in table
    assert len(table.splitlines()) == 1 + 1 + 12 + 2


def test_a_folder_that_is_not_there_is_refused(capfd):
    assert run(checkpoint, ["--folder", "nowhere"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "polyad: error: --folder: nowhere: there is no such folder"
