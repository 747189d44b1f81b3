"""The watchdog: who is to blame, by hand; and runs that stall, in which the right rank is named."""

import json
import re
import signal
import time

import pytest

from polyad.train.guard.watchdog import Beat, Judge
from tests.helpers.runs import records, write_config
from tests.helpers.stalls import sleep_in_python, sleep_with_the_lock

LIMIT = 10.0


def beat(rank, number, moves=5, **begun):
    return Beat(
        rank=rank, host="h", pid=100 + rank, number=number, place="step 3", moves=moves,
        begun=begun or {"0": 7}, stack=[f'  File "a.py", line {rank}'],
    )  # fmt: skip


def blame(*rounds, size=2):
    """Ranks that are blamed at last; each round is (seconds, heartbeats)."""
    judge = Judge(size, LIMIT)
    for now, beats in rounds:
        found = judge.blame(beats, now)
    return [b.rank for b in found]


def test_nobody_is_blamed_while_all_move():
    rounds = [(t, [beat(0, t, moves=t), beat(1, t, moves=t)]) for t in range(0, 100, 5)]
    assert blame(*rounds) == []
    # Collectives are progress as well, in a step of very many micro-batches.
    rounds = [(t, [beat(r, t, g=t) for r in (0, 1)]) for t in range(0, 100, 5)]
    assert blame(*rounds) == []


def test_the_one_that_waits_is_not_blamed():
    rounds = [(t, [beat(0, t, g=8), beat(1, t, g=7)]) for t in (0, 5, 11)]
    assert blame(*rounds) == [1]


def test_a_long_time_in_which_the_others_wait_is_no_stall():
    # Rank 0 waits for rank 1, which is slow but moves.
    rounds = [(t, [beat(0, t, g=8), beat(1, t, g=7, moves=t)]) for t in range(0, 100, 5)]
    assert blame(*rounds) == []


def test_in_a_chain_of_groups_the_last_one_is_blamed():
    # Rank 2 waits for 1 in group b; 1 waits for 0 in group a.
    beats = [{"a": 4}, {"a": 5, "b": 9}, {"b": 10}]
    rounds = [(t, [beat(r, t, **begun) for r, begun in enumerate(beats)]) for t in (0, 5, 11)]
    assert blame(*rounds, size=3) == [0]


def test_one_without_heartbeats_is_blamed_even_if_it_seems_ahead():
    rounds = [(t, [beat(0, t, g=7), beat(1, min(t, 5), g=8)]) for t in (0, 5, 10, 16)]
    assert blame(*rounds) == [1]


def test_what_most_others_wait_in_is_named(tmp_path):
    judge = Judge(4, LIMIT)
    waits = [["all_reduce of 5 numbers (number 9 of a)", "b"], [], ["c"], None]
    waits[3] = waits[0]
    for now in (0, 5, 11):
        beats = [beat(r, now, a=8 if r == 1 else 9) for r in range(4)]
        for each, waited in zip(beats, waits, strict=True):
            each.waits = waited
        found = judge.blame(beats, now)
    assert [b.rank for b in found] == [1]
    line, *_ = judge.report(found, tmp_path).splitlines()
    assert line.endswith("in step 3; 2 others wait in all_reduce of 5 numbers (number 9 of a)")


def test_where_nobody_is_behind_all_are_named(tmp_path):
    judge = Judge(3, LIMIT)
    for now in (0, 5, 11):
        found = judge.blame([beat(r, now) for r in range(3)], now)
    assert [b.rank for b in found] == [0, 1, 2]
    line, *_ = judge.report(found, tmp_path).splitlines()
    assert line == (
        "polyad: error: stalled for 10 s: rank 0 (h, process 100), rank 1 (h, process 101), "
        "rank 2 (h, process 102), in step 3; no process is behind the others"
    )


KINDS = {
    # What stalls, and what its line and its stack say.
    "asleep": (1, sleep_in_python, None, "in reading data for step", "slow_storage"),
    "with-the-lock": (0, sleep_with_the_lock, None, "without a sign of life", "slow_storage"),
    "frozen-0": (0, None, signal.SIGSTOP, "without a sign of life", "File "),
    "frozen-1": (1, None, signal.SIGSTOP, "without a sign of life", "File "),
}


@pytest.mark.slow
@pytest.mark.distributed
def test_the_rank_that_stalls_is_named_with_its_stack(forks, tmp_path, prepared_path):
    """All kinds at once: most of the time is waiting."""
    runs = {}
    for kind, (_, before, _, _, _) in KINDS.items():
        (tmp_path / kind).mkdir()
        config = write_config(tmp_path / kind / "config.yaml", prepared_path)
        options = ["train.steps=100000", "evaluation.every=0", "checkpoint.every=0"]
        options += ["monitor.stall_minutes=0.14", "log.trackers=[]"]
        runs[kind] = forks.start(tmp_path / kind, ["train", str(config), *options], before=before)
    for kind, (rank, _, number, _, _) in KINDS.items():
        records = tmp_path / kind / "run" / "metrics.jsonl"
        runs[kind].until(lambda at=records: at.exists() and at.read_text().count("\n") >= 3)
        if number:
            runs[kind].signal(number, rank)
    until = time.monotonic() + 90
    for kind, (rank, _, _, place, frame) in KINDS.items():
        run, other = runs[kind], 1 - rank
        while run.running() and run.pids[other] not in run.statuses:
            assert time.monotonic() < until, (kind, run.text())
            time.sleep(0.01)
        assert run.statuses[run.pids[other]] == 75, (kind, run.text())
        said = run.text().splitlines()
        (line,) = [line for line in said if line.startswith("polyad: error: stalled for 8.4 s: ")]
        assert f"stalled for 8.4 s: rank {rank} (" in line, kind
        assert f"process {run.pids[rank]})" in line
        assert f"rank {other}" not in line
        assert place in line, (kind, line)
        # What the other waits in, and what it knows of its collectives.
        waits = r"; 1 other waits in \w+ of [\d,]+ numbers \(number \d+ among "
        assert re.search(waits, line), line
        recorded = tmp_path / kind / "run" / "collectives" / f"rank-{other:05d}.json"
        assert json.loads(recorded.read_bytes())["entries"]
        stack = said[said.index(line) :]
        assert stack[1].startswith(f"rank {rank} in ")
        assert any(frame in entry for entry in stack), (kind, stack)
        kept = (tmp_path / kind / "run" / "stalls.txt").read_text()
        assert line in kept
        assert f"rank {other} in " in kept  # where the waiting one stood is in the file
    assert runs["asleep"].wait(10) == [75, 75]  # the thread of one that is asleep ends it
    for run in runs.values():
        run.kill()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_that_goes_on_is_not_taken_for_stalled(forks, tmp_path, prepared_path):
    config = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    limit = 10  # seconds; fewer are lost now and then on a busy machine, to a disk alone
    options = ["train.steps=600", f"monitor.stall_minutes={limit / 60}"]
    run = forks.start(tmp_path, ["train", str(config), *options])
    assert run.wait() == [0, 0]
    assert sum(record["step_seconds"] for record in records(tmp_path / "run")) > limit
    assert "stalled" not in run.text()
    assert not (tmp_path / "run" / ".watch").exists()
    assert not (tmp_path / "run" / "stalls.txt").exists()
