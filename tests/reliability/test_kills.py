"""SIGKILL at any moment: the run always goes on, and ends as one that nothing happened to, bitwise.

One run of two processes is killed again and again, at moments that a seed chooses, two thirds of
them while a checkpoint is written, or copied while training goes on. Every start is a run of its
own, forked from a process that has imported everything. The slow cases have 50 kills each.
"""

import contextlib
import functools
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from polyad.parallel.checkpoint import save as save_file
from polyad.parallel.checkpoint.format import verify_contents
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.checkpoint.save import Task
from tests.helpers.everyday import everyday
from tests.helpers.forking import ForkedRun
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import records, write_config

pytestmark = pytest.mark.distributed


def slow_copies(folder: Path, rank: int) -> None:
    """Has every copy in a thread take about 50 ms, with a file `copying-RANK` there meanwhile.

    For the process of a run, of two blocks or so.
    """
    run, copy_tensor = Task.run, save_file.copy_tensor

    def marked(self: Task) -> None:
        mark = folder / f"copying-{rank}"
        mark.touch()
        try:
            run(self)
        finally:
            mark.unlink(missing_ok=True)

    def slow(place: torch.Tensor, values: torch.Tensor) -> None:
        time.sleep(0.001)
        copy_tensor(place, values)

    Task.run = marked  # type: ignore[method-assign]
    save_file.copy_tensor = slow


EVERY = 2
SAVE_SECONDS, COPY_SECONDS = 0.02, 0.06
"""About what a save takes here, and a copy that `slow_copies` slows."""
SYNCHRONOUS, ASYNCHRONOUS = ("saving", "saving", "any"), ("copying", "saving", "any")
"""Moments that chance chooses from."""
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss")


def saving(run: Path, since: float = 0.0) -> bool:
    """Whether a checkpoint is being written that was begun after a moment."""
    for path in (run / "checkpoints").glob(".*partial*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ctime > since:
                return True
    return False


def copying(run: Path) -> bool:
    """Whether a thread copies weights while the run goes on."""
    return any(run.parent.glob("copying-*"))


def kill_at_a_moment(
    process: ForkedRun, run: Path, chance: random.Random, moments: Sequence[str]
) -> str:
    """Kills one process or all, and whatever is left of them after it; says when."""
    begun = time.time()
    when = chance.choice(moments)
    ranks = chance.choice([(0,), (1,), (0, 1)])
    if when == "saving":
        for _ in range(chance.choice([0, 1, 2])):  # let so many saves of this start pass
            wait_for(lambda: saving(run, begun), process)
            wait_for(lambda: not saving(run, begun), process)
        wait_for(lambda: saving(run, begun), process)
        time.sleep(chance.random() * SAVE_SECONDS)
    elif when == "copying":
        for _ in range(chance.choice([0, 1, 2])):
            wait_for(lambda: copying(run), process)
            wait_for(lambda: not copying(run), process)
        wait_for(lambda: copying(run), process)
        time.sleep(chance.random() * COPY_SECONDS)
        when = "copying" if copying(run) else "saving"
    else:
        time.sleep(chance.random() * 1.5)  # start-up, steps, validation
    process.signal(signal.SIGKILL, *ranks)
    if len(ranks) == 1:
        # Its peer hears of it through the closed connection; a launcher would kill it then.
        time.sleep(0.02)
    process.kill()
    return f"{when} {ranks}"


@everyday(
    ("kills", "stage", "seed", "moments"),
    [
        (4, 1, 0, SYNCHRONOUS),
        (3, 1, 1, ("copying",)),
        *[
            (50, stage, 100 + stage, moments)
            for stage, moments in enumerate((ASYNCHRONOUS, SYNCHRONOUS, ASYNCHRONOUS), start=1)
        ],
    ],
    keep=[(4, 1, 0, SYNCHRONOUS)],
)
def test_a_run_survives_every_kill(forks, tmp_path, prepared_path, kills, stage, seed, moments):
    asynchronous = "copying" in moments
    # Long enough that no start comes to the end: each gets on by a few checkpoints at most.
    steps = 4 * kills
    config = write_config(
        tmp_path / "config.yaml", prepared_path, train__steps=steps, checkpoint__every=EVERY,
        evaluation__every=8, evaluation__max_windows=2, model__dropout=0.1,
        parallel__zero_stage=stage, checkpoint__asynchronous=asynchronous,
        log__trackers=[], log__every=1000,
        monitor__spike_warmup=8, monitor__spike_window=16,
    )  # fmt: skip
    run, chance, done, log = tmp_path / "run", random.Random(seed), 0, []
    while done < kills:
        for mark in tmp_path.glob("copying-*"):  # of processes that were killed
            mark.unlink()
        before = functools.partial(slow_copies, tmp_path) if asynchronous else None
        process = forks.start(tmp_path, ["train", str(config)], before=before)
        moment = kill_at_a_moment(process, run, chance, moments)
        if set(process.statuses.values()) == {0}:  # it came to its end: begin another one
            assert complete_checkpoints(run / "checkpoints")[-1].name == f"step-{steps:08d}"
            check_whole(run, steps)
            run.rename(tmp_path / f"done-{done}")
            continue
        done += 1
        newest = complete_checkpoints(run / "checkpoints")
        log.append((moment, newest[-1].name if newest else None))
        assert "Traceback" not in process.logs[0].read_text() or 137 in process.statuses.values()
        assert 2 not in process.statuses.values(), process.text()  # it was not even started
    (tmp_path / "kills.json").write_text(json.dumps(log))
    to_the_end(forks.start(tmp_path, ["train", str(config)]))
    check_whole(run, steps)
    to_the_end(forks.start(tmp_path, ["train", str(config), f"run.folder={tmp_path / 'whole'}"]))
    ours, theirs = records(run), records(tmp_path / "whole")
    assert [[r.get(k) for k in KEYS] for r in ours] == [[r.get(k) for k in KEYS] for r in theirs]
    last = f"checkpoints/step-{steps:08d}"
    assert_equal_state(run / last, tmp_path / "whole" / last)
    states = [
        json.loads((at / last / "state.json").read_text()) for at in (run, tmp_path / "whole")
    ]
    for key in ("samples", "tokens", "recent_losses", "recent_grad_norms"):
        assert states[0][key] == states[1][key]
    # The moments were what they were meant to be: most kills hit a save or its neighbourhood.
    hits = [moment.split()[0] for moment, _ in log]
    assert hits.count("saving") + hits.count("copying") >= kills / 2
    assert not asynchronous or hits.count("copying") > kills / 10


@pytest.mark.slow
def test_a_signal_in_the_middle_of_a_copy_ends_the_run_saved(forks, tmp_path, prepared_path):
    config = write_config(
        tmp_path / "config.yaml", prepared_path, train__steps=100, checkpoint__every=EVERY,
        checkpoint__asynchronous=True, evaluation__every=0, log__trackers=[],
    )  # fmt: skip
    before = functools.partial(slow_copies, tmp_path)
    process = forks.start(tmp_path, ["train", str(config)], before=before)
    process.until(lambda: copying(tmp_path / "run"))
    process.signal(signal.SIGTERM)
    assert process.wait() == [143, 143], process.text()
    assert "Traceback" not in process.text()
    written = complete_checkpoints(tmp_path / "run" / "checkpoints")
    steps = [int(path.name.removeprefix("step-")) for path in written]
    assert steps[0] == EVERY  # whose copy it was
    assert steps[-1] == records(tmp_path / "run")[-1]["step"]
    assert not saving(tmp_path / "run")
    for path in written:
        verify_contents(path)


def wait_for(condition: Callable[[], bool], process: ForkedRun, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while process.running() and not condition() and time.monotonic() < until:
        time.sleep(0.0005)


def to_the_end(process: ForkedRun) -> None:
    statuses = process.wait(120)
    assert statuses == [0, 0], process.text()


def check_whole(run: Path, steps: int) -> None:
    assert [record["step"] for record in records(run)] == list(range(1, steps + 1))
    assert not saving(run)
