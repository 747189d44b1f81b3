"""Several runs of a study at a time, in real processes."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyad.launch.machine import cores_here
from polyad.launch.study.jobs import VISIBLE, Jobs, Work
from polyad.train.errors import RunError
from tests.helpers.started import steps, wait_for
from tests.launch.study.conftest import CP, WriteStudy
from tests.launch.study.test_checks import refused
from tests.launch.study.test_run import (
    QUICK,
    children,
    newest_step,
    start,
    state,
    write,
)

pytestmark = pytest.mark.distributed

IMAGES = {
    "model": {
        **{"kind": "vit", "num_layers": 1, "hidden_size": 16, "num_heads": 2},
        **{"image_size": 8, "patch_size": 4},
    },
    "data": {"kind": "images"},
    "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
    "schedule": {"decay_steps": 2},
}


def finish(path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """A study to its end: its result, and what it said."""
    process = start(path, "--json", "-", *options)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_jobs_that_cannot_be_is_one_line(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str], number: str
) -> None:
    line = refused(write_study(), capfd, f"--jobs={number}")
    assert f"--jobs: '{number}' is not a whole number of at least 1" in line


def begun(works: Jobs[int], number: int, variable: str) -> list[str]:
    """Begins a work, and reads a variable in the environment of its process."""
    others = set(children(os.getpid()))
    works.begin(number, f"dense, seed {number}", works_of(("--version",)))
    (ours,) = set(children(os.getpid())) - others
    place = Path(f"/proc/{ours}/environ")
    for _ in range(1000):  # it is empty while the program is being loaded
        if environment := place.read_text():
            break
        time.sleep(0.001)
    return re.findall(rf"\0{variable}=([^\0]*)", f"\0{environment}")


def threads_of_a_work(jobs: int) -> list[str]:
    """What OMP_NUM_THREADS is in the process of a work."""
    with Jobs[int](jobs) as works:
        found = begun(works, 1, "OMP_NUM_THREADS")
        works.wait()
    return found


def test_jobs_share_the_cores_unless_the_user_has_divided_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_a_work(1) == []
    assert threads_of_a_work(2) == [str(max(1, cores_here() // 2))]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_a_work(2) == ["3"]


def test_jobs_take_turns_among_the_gpus_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VISIBLE, "5, 2")
    with Jobs[int](3) as works:
        assert [begun(works, number, VISIBLE) for number in range(3)] == [["5"], ["2"], ["5"]]
        ended, _ = works.wait()
        assert begun(works, 3, VISIBLE) == [("5", "2", "5")[ended]]  # the place that is free


@pytest.mark.parametrize(("named", "jobs"), [("4", 2), ("", 2), ("5,2", 1)])
def test_one_gpu_or_one_job_leaves_what_the_user_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], named: str, jobs: int
) -> None:
    monkeypatch.setenv(VISIBLE, named)
    with Jobs[int](jobs) as works:
        assert begun(works, 1, VISIBLE) == [named]


def works_of(*commands: tuple[str, ...]) -> Work:
    """A work whose result is how many of its commands ended well."""
    yield from commands
    return {"done": len(commands)}


@pytest.mark.slow
def test_a_work_that_fails_ends_the_others_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    others = children(os.getpid())  # of other tests
    with Jobs[int](2) as works:
        works.begin(1, "a", works_of(("--version",), ("--help",)))
        assert works.wait() == (1, {"done": 2})
        works.begin(2, "b", works_of(("train", "/no/such.yaml"), ("--version",)))
        with pytest.raises(
            RunError, match=r"^b: `polyad train` ended with status 2; run the same "
        ):
            works.wait()
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["b: polyad: error: /no/such.yaml: there is no such file"]
    assert set(children(os.getpid())) <= set(others)


SLOW = {"train.steps": 300, "schedule.decay_steps": 300, "checkpoint.every": 0}


@pytest.mark.slow
def test_two_at_a_time_learn_what_one_after_the_other_does(tmp_path: Path, data: Path) -> None:
    changes: dict[str, Any] = {
        "seeds": [1],
        "from_runs": {"again": {"checkpoint.init_from": "cp"}},
        "variants": {
            "again": {"model.feed_forward": CP},
            "dense": None,
            "cp": {"model.feed_forward": CP},
        },
        "attack": {"rate": 0.1},
        "common": QUICK,
    }
    found = {}
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        folder.mkdir()
        found[jobs], err = finish(write(folder, data, **changes), "--jobs", jobs)
        assert found[jobs] == json.loads((folder / "study" / "results.json").read_text())
        assert found[jobs]["finished"]
    losses = [
        [
            (r["variant"], r["seed"], r["loss"], r["training_loss"], r["attack"])
            for r in each["runs"]
        ]
        for each in found.values()
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    # Every line of a child has its run in front, and `again` began after its source was scored.
    assert re.search(r"^cp, seed 1: .*step", err, re.MULTILINE)
    assert re.search(r"^dense, seed 1: evaluate validation .* 100%", err, re.MULTILINE)
    lines = err.splitlines()
    scored = next(i for i, line in enumerate(lines) if re.match(r"cp, seed 1: loss \d", line))
    begun = next(
        i for i, line in enumerate(lines) if re.match(r"== run . of 3: again, seed 1", line)
    )
    assert scored < begun
    # Two go on at a time: the second begins before the first is scored.
    first = [line for line in lines if re.match(r"== run|\w+, seed \d: loss \d", line)][:2]
    assert [line.partition(";")[0] for line in first] == [
        *("== run 1 of 3: dense, seed 1", "== run 2 of 3: cp, seed 1"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGINT, "all"), (signal.SIGUSR1, "study"), (signal.SIGTERM, "run")]
)
def test_a_signal_ends_all_runs_that_go_on_and_they_are_saved(
    tmp_path: Path, data: Path, number: signal.Signals, whom: str
) -> None:
    path = write(tmp_path, data, common=SLOW | QUICK)
    folders = [tmp_path / "study" / "runs" / name / "seed-1" for name in ("dense", "cp")]
    process = start(path, "--jobs", "2")
    wait_for(lambda: all(steps(f) for f in folders), process)
    both = children(process.pid)
    assert len(both) == 2
    if whom == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if whom == "study" else both[0], number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, ""), err
    assert "Traceback" not in err
    assert all(state(each) == "Z" for each in both)
    name = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    runs = "dense, seed 1; cp, seed 1"
    ours = f"polyad: {name}; {runs}: run the same command again to continue these runs"
    assert err.splitlines()[-1] == ours
    for folder in folders:
        assert 0 < newest_step(folder) == steps(folder)[-1] < 300
    if whom == "all":
        result, err = finish(path, "--jobs", "2")
        assert result["finished"]
        assert "0 finished, 2 to continue, 0 to start" in err
        assert all(steps(folder) == list(range(1, 301)) for folder in folders)


@pytest.mark.slow
def test_a_run_that_fails_stops_the_other_which_is_saved(tmp_path: Path, data: Path) -> None:
    failing = {
        **{"optimizer.kind": "sgd", "optimizer.learning_rate": 1e6},
        **{"optimizer.clip_grad_norm": 0.0, "train.max_skipped_steps": 2},
    }
    long = {"train.steps": 3000, "schedule.decay_steps": 3000, "checkpoint.every": 0}
    path = write(tmp_path, data, variants={"dense": None, "wild": failing}, common=long | QUICK)
    process = start(path, "--jobs", "2")
    out, err = process.communicate(timeout=1200)
    assert (process.returncode, out) == (1, ""), err
    line = "polyad: error: wild, seed 1: `polyad train` ended with status 1; run the same command "
    assert err.splitlines()[-1].startswith(line)
    assert "Traceback" not in err
    dense = tmp_path / "study" / "runs" / "dense" / "seed-1"
    stopped = newest_step(dense) if (dense / "checkpoints").exists() else 0
    if stopped:  # else it was still starting
        assert stopped == steps(dense)[-1]
    assert not (tmp_path / "study" / "runs" / "dense" / "seed-1.json").exists()


@pytest.mark.slow
def test_a_killed_study_leaves_none_of_its_runs_behind(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path, data, common=QUICK | {"train.steps": 100_000, "checkpoint.every": 0})
    folders = [tmp_path / "study" / "runs" / name / "seed-1" for name in ("dense", "cp")]
    process = start(path, "--jobs", "2")
    wait_for(lambda: all(steps(f) for f in folders), process)
    both = children(process.pid)
    process.kill()
    process.wait()
    until = time.monotonic() + 120
    while any("Z" not in state(each) for each in both):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_two_studies_that_need_the_same_data_at_once_wait_for_each_other(
    tmp_path: Path, text: Path, kind: str
) -> None:
    data = tmp_path / "prepared" / "data"
    base: dict[str, Any] = {"data": {"path": str(data), "source": "digits"}}
    if kind == "text":
        base = {"data": {"path": str(data), "source": str(text), "tokenizer": "train:400"}}
    paths = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        path = write(folder, data, variants={"dense": None}, common=QUICK, **base)
        if kind == "images":
            (folder / "base.yaml").write_text(yaml.safe_dump(IMAGES))
        paths.append(path)
    both = [start(path, "--json", "-") for path in paths]
    said = [process.communicate(timeout=1200) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = (json.loads(out)["runs"][0]["loss"] for out, _ in said)
    assert first == second
    if kind == "text":
        assert sum("already prepared" in err for _, err in said) == 1
    assert sum("waiting for another study that is preparing it" in err for _, err in said) <= 1
