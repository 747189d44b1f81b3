"""Signals: all ranks agree on a step, save it, and end with the status that is documented."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from polyad.launch.processes import END_WITH_PARENT
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.checkpoint.save import Saver
from polyad.train.loop import loop
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import records
from tests.helpers.started import wait_for

pytestmark = pytest.mark.distributed


def slow_saves(folder: Path, rank: int) -> None:
    """Makes every save take a second longer; a file `saving` marks its start."""
    _slow_down(Saver, "save", folder / "saving")


def slow_steps(folder: Path, rank: int) -> None:
    """Makes every step take a second longer; a file `step` marks its start."""
    _slow_down(loop, "issue_step", folder / "step")


def _slow_down(owner: object, name: str, mark: Path) -> None:
    call = getattr(owner, name)

    def slow(*arguments, **named):
        mark.touch()
        time.sleep(1.0)
        return call(*arguments, **named)

    setattr(owner, name, slow)


def leave_the_shell(folder: Path, rank: int) -> None:
    """Makes the run's parent exit once the run takes steps, as with `polyad train &`."""
    metrics = folder / "run" / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        (folder / "process").write_text(f"{os.getpid()}")
        return
    while not (metrics.exists() and metrics.read_text()):
        time.sleep(0.005)
    os._exit(0)


LONG = ("train.steps=100000", "checkpoint.every=0", "evaluation.every=0")
GRACE = 25
AGAIN = "run the same command again to continue from"
RUN_CHANGES = {"log__trackers": []}


def lines(folder):
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def newest_of(folder):
    """The one checkpoint."""
    (path,) = complete_checkpoints(folder / "run" / "checkpoints")
    return path


def stop(run, number, *ranks):
    begun = time.monotonic()
    run.signal(number, *ranks)
    statuses = run.wait(GRACE + 10)
    assert time.monotonic() - begun < GRACE
    return statuses


@everyday(
    ("number", "ranks", "workers"),
    [
        (signal.SIGTERM, (), 0),
        (signal.SIGUSR1, (1,), 0),
        (signal.SIGINT, (0,), 2),
        (signal.SIGTERM, (1,), 2),
        (signal.SIGUSR1, (), 2),
        (signal.SIGINT, (), 0),
    ],
    keep=[(signal.SIGUSR1, (1,), 0)],
)
def test_in_a_step_all_ranks_save_the_same_one(forks, config, tmp_path, number, ranks, workers):
    run = forks.start(tmp_path, ["train", str(config), *LONG, f"data.num_workers={workers}"])
    run.until(lambda: lines(tmp_path) >= 3)
    assert stop(run, number, *ranks) == [128 + number] * 2
    done = lines(tmp_path)
    newest = newest_of(tmp_path)
    assert newest.name == f"step-{done:08d}"  # the step that it was in, and nothing after it
    name = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    said = [line for line in run.text().splitlines() if name in line or "error" in line]
    assert said == [f"polyad: {name}; {AGAIN} {newest}"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "checkpoints", "config.yaml", "environment.json", "metrics.jsonl"}
    again = forks.start(tmp_path, ["train", str(config), *LONG[1:], f"train.steps={done + 2}"])
    assert again.wait() == [0, 0]
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, done + 3))


def test_while_it_starts_there_is_nothing_to_save(forks, config, tmp_path):
    run = forks.start(tmp_path, ["train", str(config), *LONG])
    run.until(lambda: (tmp_path / "run" / ".lock").exists())
    assert stop(run, signal.SIGTERM) == [143, 143]
    found = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert len(found) == (lines(tmp_path) > 0)  # the first step may have begun
    assert "stopped by SIGTERM; " in run.text()


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_in_a_validation_the_next_start_does_it(forks, config, tmp_path, last):
    """And everything is as if nothing had happened, the records too."""
    steps = 4 if last else 6
    options = [f"train.steps={steps}", "evaluation.every=4", "evaluation.max_windows=null",
               "model.dropout=0.1", "checkpoint.every=0"]  # fmt: skip
    long, quick = ([f"evaluation.batch_size={size}", f"evaluation.stride={stride}"]
                   for size, stride in ((1, 1), (64, 8)))  # fmt: skip
    run = forks.start(tmp_path, ["train", str(config), *options, *long])
    run.until(lambda: lines(tmp_path) == 3)
    state = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json"
    time.sleep(0.3)  # step 4 takes some 30 ms, its validation seconds
    assert stop(run, signal.SIGTERM) == [143, 143]
    assert lines(tmp_path) == 3
    assert json.loads(state.read_text())["unfinished"]["step"] == 4
    options += quick  # which may change
    assert forks.start(tmp_path, ["train", str(config), *options]).wait() == [0, 0]
    assert not json.loads(state.read_text()).get("unfinished")  # no third start does it again
    whole = [*options, f"run.folder={tmp_path / 'whole'}"]
    assert forks.start(tmp_path, ["train", str(config), *whole]).wait() == [0, 0]
    keys = ("step", "loss", "grad_norm", "validation_loss", "tokens", "skipped")
    ours, theirs = (
        [[each.get(key) for key in keys] for each in records(tmp_path / name)]
        for name in ("run", "whole")
    )
    assert ours == theirs
    name = f"checkpoints/step-{steps:08d}"
    assert_equal_state(tmp_path / "run" / name, tmp_path / "whole" / name)


@everyday(
    ("processes", "number"),
    [(n, number) for n in (1, 2) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    keep=[(2, signal.SIGTERM)],
)
@pytest.mark.slow
def test_a_second_signal_in_a_save_does_not_disturb_it(forks, config, tmp_path, processes, number):
    """A terminal, Slurm and torchrun may all tell a process of the same one."""
    before = functools.partial(slow_saves, tmp_path)
    run = forks.start(tmp_path, ["train", str(config), *LONG], processes=processes, before=before)
    run.until(lambda: lines(tmp_path) >= 2)
    run.signal(number)
    run.until(lambda: (tmp_path / "saving").exists())
    for again in (signal.SIGINT, number):
        time.sleep(0.1)
        run.signal(again)
    assert run.wait(GRACE) == [128 + number] * processes
    assert newest_of(tmp_path).name == f"step-{lines(tmp_path):08d}"
    assert f"; {AGAIN} {newest_of(tmp_path)}" in run.text()


@everyday("launched", [True, False], keep=[False])
@pytest.mark.slow
def test_ctrl_c_twice_in_a_step_ends_at_once_what_was_started_by_hand_alone(
    forks, config, tmp_path, launched
):
    """What `polyad study` or torchrun started is sent one Ctrl-C by the terminal and by them."""
    forks.start(tmp_path, ["--version"]).wait()  # so that there is a server
    parent = {END_WITH_PARENT: str(forks.process_id)} if launched else {}
    run = forks.start(
        tmp_path, ["train", str(config), *LONG], processes=1,
        before=functools.partial(slow_steps, tmp_path), **parent,
    )  # fmt: skip
    run.until(lambda: (tmp_path / "step").exists())
    for _ in range(2):
        time.sleep(0.1)
        run.signal(signal.SIGINT)
    assert run.wait(GRACE) == [130]
    found = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == ["step-00000001"] * launched


@pytest.mark.slow
def test_a_run_whose_shell_has_ended_is_saved_too(forks, config, tmp_path):
    before = functools.partial(leave_the_shell, tmp_path)
    shell = forks.start(tmp_path, ["train", str(config), *LONG], processes=1, before=before)
    assert shell.wait() == [0]
    process = int((tmp_path / "process").read_text())
    os.kill(process, signal.SIGTERM)
    wait_for(lambda: not os.path.exists(f"/proc/{process}"), seconds=GRACE)
    assert f"stopped by SIGTERM; {AGAIN} {newest_of(tmp_path)}" in shell.text()
