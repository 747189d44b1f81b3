"""A study in real processes: finished, gone on with, interrupted, failed."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyad.data.text.samples import TrainingData
from polyad.launch.cli import run
from polyad.launch.study.folder import held, read_record, write_record
from polyad.train.config.run import load_config
from polyad.train.study.reading import load_study
from tests.helpers import started
from tests.helpers.started import SMALL, steps, wait_for
from tests.launch.study.conftest import CP, small_study
from tests.launch.study.test_checks import refused

# A study is a few whole runs: 47 s.
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

QUICK = {"evaluation.batch_size": 64, "log.trackers": []}
"""Keys for runs whose scores do not matter."""
Capture = pytest.CaptureFixture[str]


def write(folder: Path, data: Path, /, **changes: Any) -> Path:
    """A base and a study in a folder; keywords replace whole keys of the study."""
    base = folder / "base.yaml"
    base.write_text(yaml.safe_dump(SMALL))
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(small_study(folder, base, data) | changes, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A study's file, all of whose runs are finished: two variants, one seed."""
    path = write(tmp_path_factory.mktemp("study"), data)
    done = start(path, "--json", str(path.with_suffix(".json")))
    out, err = done.communicate(timeout=1200)
    assert done.returncode == 0, err
    path.with_suffix(".out").write_text(out)
    path.with_suffix(".err").write_text(err)
    return path


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    """`polyad study` in a process of its own."""
    words = [sys.executable, "-m", "polyad.launch", "study", str(path), *options]
    return started.start(words, start_new_session=True)  # so that all its processes can be told


def newest_step(run_folder: Path) -> int:
    """The step of a run's newest checkpoint."""
    return max(
        int(p.name.removeprefix("step-")) for p in (run_folder / "checkpoints").glob("step-*")
    )


def test_a_study_trains_and_scores_every_run_and_compares_them(finished: Path) -> None:
    folder = finished.parent / "study"
    result = json.loads(finished.with_suffix(".json").read_text())
    assert result == json.loads((folder / "results.json").read_text())
    assert result["finished"]
    for name in ("dense", "cp"):
        run_folder = folder / "runs" / name / "seed-1"
        assert newest_step(run_folder) == 4
        config = yaml.safe_load((run_folder / "config.yaml").read_text())
        assert (config["seed"], config["optimizer"]["learning_rate"]) == (1, 0.01)
        assert config["model"]["feed_forward"]["kind"] == ("dense" if name == "dense" else "mumoe")
        # The end of training scored the same tokens with the same weights.
        last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
        variant = result["variants"][name]
        assert variant["loss"]["mean"] == pytest.approx(last["validation_loss"], rel=1e-6)
        assert variant["loss"]["deviation"] is None
    dense, cp = result["variants"]["dense"], result["variants"]["cp"]
    assert dense["difference"] is None
    assert cp["difference"]["mean"] == pytest.approx(cp["loss"]["mean"] - dense["loss"]["mean"])
    assert cp["difference"]["low"] is None
    assert dense["routing"] == {}
    assert 0 < cp["routing"]["entropy"]["mean"] < 1.4  # ln 4 = 1.386
    assert [(r["variant"], r["seed"]) for r in result["runs"]] == [("dense", 1), ("cp", 1)]


def test_a_study_says_what_it_does_and_prints_tables_alone(finished: Path) -> None:
    out, err = finished.with_suffix(".out").read_text(), finished.with_suffix(".err").read_text()
    head, dense, cp = out.splitlines()[:3]
    assert head.split()[:3] == ["variant", "loss", "perplexity"]
    assert dense.startswith("dense ")
    assert cp.endswith("none of one pair      1")
    assert "2 runs to do; the time is estimated once one of them is finished\n" in err
    assert "\n== run 1 of 2: dense, seed 1\n" in err
    assert "\n== run 2 of 2: cp, seed 1\n" in err  # nothing is known of how long that takes
    assert re.search(r"\ndense, seed 1: loss \d\.\d{4}, perplexity [\d.]+ on [\d,]+ tokens\n", err)
    assert re.search(r"\ncp, seed 1: loss \d\.\d{4} \([+-]0\.\d{4} compared with dense\), ", err)
    assert err.index("parameters") < err.index("== run 1")


def test_a_finished_study_starts_nothing_and_says_the_same(finished: Path, capfd: Capture) -> None:
    files = [p for p in (finished.parent / "study" / "runs").rglob("*") if p.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert run(["study", str(finished)]) == 0
    captured = capfd.readouterr()
    assert captured.out == finished.with_suffix(".out").read_text()
    assert "== run" not in captured.err
    for name in ("dense", "cp"):
        place = finished.parent / "study" / "runs" / name / "seed-1" / "checkpoints"
        line = f"{name}: seed 1 already finished: all 4 steps are done, in {place}"
        assert line in captured.err.splitlines()
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert run(["study", str(finished), "--markdown"]) == 0
    markdown = capfd.readouterr().out.splitlines()
    assert markdown[0] == "| variant | loss | perplexity | difference | 95% interval | pairs |"
    assert markdown[1] == "|---|---:|---:|---:|---:|---:|"


def test_a_study_that_is_another_one_by_now_is_refused(
    finished: Path, data: Path, text: Path, tmp_path: Path, capfd: Capture
) -> None:
    study = yaml.safe_load(finished.read_text())
    other = finished.parent / "other.yaml"

    def line(**changes: Any) -> str:
        other.write_text(yaml.safe_dump(study | changes, sort_keys=False))
        return refused(other, capfd)

    common = study["common"] | {"optimizer.learning_rate": 0.02}
    assert "variants.dense: optimizer.learning_rate: 0.01 there, 0.02 here" in line(common=common)
    assert "split: 'validation' there, 'test' here" in line(split="test")
    assert "holds another study, of dense, cp" in line(variants={"c": {}}, baseline="c")
    base = finished.parent / "base-2.yaml"
    base.write_text(
        yaml.safe_dump(SMALL | {"run": {"folder": "x"}, "optimizer": {"epsilon": 1e-6}})
    )
    assert "variants.dense: optimizer.epsilon: 1e-08 there, 1e-06 here" in line(base=str(base))
    options = ["--validation-fraction", "0.1", "--tokenizer", "train:400"]
    assert run(["prepare", "--source", str(text), *options, "--output", str(tmp_path / "t")]) == 0
    assert "holds other text than the runs" in line(data={"path": str(tmp_path / "t")})
    # What changes no result may be changed, and other variants and seeds may be added.
    harmless = study["common"] | {"log.every": 3, "checkpoint.every": 1}
    more = study["variants"] | {"wide": {"model.feed_forward.hidden_size": 256}}
    other.write_text(
        yaml.safe_dump(study | {"common": harmless, "variants": more, "seeds": [1, 2]})
    )
    assert run(["study", str(other), "--dry-run"]) == 0
    assert "2 finished, 0 to continue, 4 to start" in capfd.readouterr().out
    # So may what was recorded of a variant that nothing was trained of.
    folder = finished.parent / "study"
    write_record(load_study(other), read_record(folder)["data"])
    assert list(read_record(folder)["variants"]) == ["dense", "cp", "wide"]
    more = study["variants"] | {"wide": {"model.feed_forward.hidden_size": 512}}
    other.write_text(yaml.safe_dump(study | {"variants": more}))
    assert run(["study", str(other), "--dry-run"]) == 0
    write_record(load_study(finished), read_record(folder)["data"])
    assert list(read_record(folder)["variants"]) == ["dense", "cp"]


def test_a_record_from_before_a_key_existed_is_that_of_the_default(
    finished: Path, tmp_path: Path, capfd: Capture
) -> None:
    copy = tmp_path / "study"
    shutil.copytree(finished.parent / "study", copy, ignore=shutil.ignore_patterns("checkpoints"))
    study = yaml.safe_load(finished.read_text()) | {"folder": str(copy)}
    path, record = tmp_path / "study.yaml", json.loads((copy / "study.json").read_text())
    cp = record["variants"]["cp"]
    assert cp.pop("model.feed_forward.gate_norm") == "layer"
    assert cp.pop("loss.router_z") == 0.0
    (copy / "study.json").write_text(json.dumps(record))
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    assert run(["study", str(path), "--dry-run"]) == 0
    assert "2 finished" in capfd.readouterr().out
    # Another value than the default is another study, and so is a key that is known no more.
    study["variants"]["cp"] = study["variants"]["cp"] | {"loss.router_z": 0.5}
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    assert "variants.cp: loss.router_z: 0.0 there, 0.5 here" in refused(path, capfd)
    study["variants"]["cp"].pop("loss.router_z")
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    cp["model.flavour"] = "mild"
    (copy / "study.json").write_text(json.dumps(record))
    assert "model.flavour: 'mild' there, None here" in refused(path, capfd, "--dry-run")


def test_two_starts_of_a_study_do_not_run_at_once(finished: Path, capfd: Capture) -> None:
    with held(load_study(finished)):
        assert "is in use by another start" in refused(finished, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "study"),  # kill PID
        (signal.SIGINT, "all"),  # Ctrl-C in a terminal, twice
        (signal.SIGTERM, "run"),
    ],
)
def test_a_study_that_a_signal_stopped_goes_on_where_it_was(
    tmp_path: Path, data: Path, number: signal.Signals, whom: str
) -> None:
    common = {"train.steps": 300, "schedule.decay_steps": 300, "checkpoint.every": 0}
    path = write(tmp_path, data, common=common | QUICK, variants={"dense": None})
    first = tmp_path / "study" / "runs" / "dense" / "seed-1"
    process = start(path)
    wait_for(lambda: steps(first), process)
    run_processes = children(process.pid)
    if whom == "all":
        for _ in range(2):
            os.killpg(process.pid, number)
    else:
        os.kill(process.pid if whom == "study" else run_processes[0], number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert all(state(each) == "Z" for each in run_processes)
    assert out == ""
    assert "Traceback" not in err
    name = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    *_, its, ours = err.splitlines()
    assert its.startswith(f"polyad: {name}; run the same command again to continue from {first}")
    end = f"{name}; dense, seed 1: run the same command again to continue this run"
    assert ours == f"polyad: {end}"
    stopped = newest_step(first)
    assert steps(first)[-1] == stopped < 300  # the step that it was in
    process = start(path, "--json", "-")
    if whom != "study":  # one of them to its end is enough
        wait_for(lambda: steps(first)[-1] > stopped, process)
        os.killpg(process.pid, signal.SIGKILL)
        assert f"\ncontinues from step {stopped} of 300 " in process.communicate()[1]
        return
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "0 finished, 1 to continue, 0 to start" in err
    assert f"\ncontinues from step {stopped} of 300 ({300 - stopped} left), from {first}" in err
    assert steps(first) == list(range(1, 301))
    starts = json.loads((first / "environment.json").read_text())["earlier"]
    assert len(starts) == 1
    assert json.loads(out)["finished"]


@pytest.mark.slow
def test_a_signal_while_a_study_starts_or_scores_ends_it_in_one_line(
    tmp_path: Path, data: Path
) -> None:
    path = write(tmp_path, data, variants={"dense": None}, common=QUICK)
    process = start(path)
    wait_for(lambda: catches(process.pid, signal.SIGUSR1), process)  # long before all is imported
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, len(err.splitlines())) == (138, 1), err
    assert err.startswith("polyad: stopped by SIGUSR1; ")
    process = start(path)
    # Training is done, scoring has begun; at once, and for the run's process too early to answer.
    wait_for(lambda: any(command(each)[3:4] == ["evaluate"] for each in children(process.pid)),
             process)  # fmt: skip
    scoring = children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert all(state(each) == "Z" for each in scoring)
    assert not (tmp_path / "study" / "runs" / "dense" / "seed-1.json").exists()
    process = start(path, "--json", "-")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    place = tmp_path / "study" / "runs" / "dense" / "seed-1" / "checkpoints" / "step-00000004"
    assert f"\nnothing left to train: all 4 steps are done, see {place}\n" in err
    assert json.loads(out)["finished"]


@pytest.mark.slow
def test_a_killed_study_leaves_no_run_behind(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path, data, common={"train.steps": 100_000, "checkpoint.every": 0})
    metrics = tmp_path / "study" / "runs" / "dense" / "seed-1" / "metrics.jsonl"
    process = start(path)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [child] = children(process.pid)
    process.kill()
    process.wait()
    while os.path.exists(f"/proc/{child}") and "Z" not in state(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def children(process: int) -> list[int]:
    """Processes that a process has started and that are still there."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]


def command(process: int) -> list[str]:
    """The words that a process was started with."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    return []


def state(process: int) -> str:
    """The state of a process; Z: it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.slow
def test_a_run_that_fails_stops_the_study_and_names_itself(tmp_path: Path, data: Path) -> None:
    # A learning rate that makes steps infinite: known only once it runs.
    failing = {
        **{"optimizer.kind": "sgd", "optimizer.learning_rate": 1e6},
        **{"optimizer.clip_grad_norm": 0.0, "train.max_skipped_steps": 2},
    }
    variants = {"dense": None, "wild": failing}
    path = write(tmp_path, data, variants=variants, seeds=[1, 2], common={"train.steps": 9})
    process = start(path)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 1
    assert out == ""
    *_, child, ours = err.splitlines()
    assert "2 steps in a row had a loss or gradient that is not finite" in child
    assert ours.startswith("polyad: error: wild, seed 1: `polyad train` ended with status 1; ")
    found = json.loads((tmp_path / "study" / "results.json").read_text())
    assert not found["finished"]
    assert list(found["variants"]) == ["dense"]
    # With another in the place of the variant that cannot be trained the rest is done.
    variants = {"dense": None, "cp": {"model.feed_forward": CP}}
    path = write(tmp_path, data, variants=variants, seeds=[1, 2], common={"train.steps": 9})
    process = start(path, "--json", "-")
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "== run 1 of" not in err
    difference = json.loads(out)["variants"]["cp"]["difference"]
    assert difference["seeds"] == [1, 2]
    assert difference["low"] < difference["mean"] < difference["high"]


def test_two_variants_of_one_seed_see_the_same_batches(finished: Path) -> None:
    batches = {}
    for one in load_study(finished).runs({}):
        config = load_config(one.folder / "config.yaml")
        samples = TrainingData.open(config.data).samples(config.model.sequence_length, config.seed)
        batches[one.variant.name] = [samples[i].tolist() for i in range(16)]
        other = TrainingData.open(config.data).samples(config.model.sequence_length, 2)
        assert [other[i].tolist() for i in range(16)] != batches[one.variant.name]
    assert batches["dense"] == batches["cp"]


@pytest.mark.slow
def test_a_run_begins_with_the_run_of_the_same_seed_and_goes_on_after_a_kill(
    tmp_path: Path, data: Path, capfd: Capture
) -> None:
    # Named first, trained last; it stands still, so that its weights are those it began with.
    variants = {"again": {"optimizer.learning_rate": 1e-12}, "dense": None}
    changes = {
        "variants": variants,
        "seeds": [1, 2],
        "from_runs": {"again": {"checkpoint.init_from": "dense"}},
        "common": {"log.trackers": []},
    }
    path = write(tmp_path, data, **changes)
    assert run(["study", str(path), "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "again: checkpoint.init_from is the run of dense with the same seed\n" in said
    runs = tmp_path / "study" / "runs"
    process = start(path)
    # Between the two: its weights are there, and it is not scored yet.
    wait_for(lambda: (runs / "dense" / "seed-1" / "checkpoints" / "latest").exists(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    process = start(path, "--json", "-")
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert [(each["variant"], each["seed"]) for each in result["runs"]] == [
        ("dense", 1), ("again", 1), ("dense", 2), ("again", 2),
    ]  # fmt: skip
    assert list(result["variants"]) == ["again", "dense"]
    losses = {(each["variant"], each["seed"]): each["loss"] for each in result["runs"]}
    for seed in (1, 2):
        config = load_config(runs / "again" / f"seed-{seed}" / "config.yaml")
        assert config.checkpoint.init_from == str(runs / "dense" / f"seed-{seed}")
        assert losses["again", seed] == pytest.approx(losses["dense", seed], rel=1e-6)
    assert losses["again", 1] != losses["again", 2]
    # Another source is another variant.
    changes["variants"] = variants | {"other": None}
    changes["from_runs"] = {"again": {"checkpoint.init_from": "other"}}
    message = "variants.again: checkpoint.init_from: 'dense' there, 'other' here"
    assert message in refused(write(tmp_path, data, **changes), capfd)


def test_experts_of_text_are_measured_later_and_nothing_is_trained_again(
    finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.parent / "study", copy)
    study = yaml.safe_load(finished.read_text())
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study | {"folder": str(copy), "specialization": True}))
    process = start(path, "--json", "-")
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "== run" not in err
    assert "specialization of cp, seed 1" in err
    known = {name: each["measures"] for name, each in json.loads(out)["variants"].items()}
    assert "entropy_bits" not in known["dense"]
    cp = {name: value["mean"] for name, value in known["cp"].items()}
    assert 0 < cp["entropy_bits"] <= cp["usage_entropy_bits"] <= 2  # 4 experts
    assert 1 <= cp["experts_used"] <= 4
    for label in ("characters", "position", "frequency"):
        assert 0 <= cp[f"information_bits_{label}"] < 2
    assert -1 <= cp["expert_cosine"] <= 1
