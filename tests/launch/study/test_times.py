"""How long a study takes: by hand from what trials and runs took, and trials in real processes."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyad.launch.cli import run
from polyad.launch.study.folder import write_record
from polyad.launch.study.plan import planned
from polyad.launch.study.progress import estimate_line, spoken
from polyad.launch.study.times import TIMES, Times, estimate, run_seconds, spread_over, time_left
from polyad.launch.study.trials import take_trials
from polyad.train.config.plan import open_plan
from polyad.train.study.reading import load_study
from tests.helpers import sequences as made
from tests.launch.conftest import SMALL
from tests.launch.study.conftest import CP, WriteStudy
from tests.launch.study.test_jobs import IMAGES
from tests.launch.study.test_run import children, command, start, wait_for, write

TRIAL = {
    **{"start_seconds": 5.0, "step_seconds": 0.5, "pass_seconds": 0.1},
    **{"validation_passes": 7, "scoring_passes": 9, "device": "cpu"},
}
STEPS = {"train.steps": 10, "evaluation.every": 4, "log.trackers": []}
SECONDS = 2 * 5 + 10 * 0.5 + (3 * 7 + 9) * 0.1
"""Two starts, ten steps, validations at steps 4, 8 and 10, and the evaluation: 18 s."""


def took(seconds: float, jobs: int = 1) -> dict[str, Any]:
    """A finished run, as far as times are concerned."""
    return {"seconds": seconds, "jobs": jobs}


def test_works_at_a_time_are_begun_by_the_job_that_is_free_first() -> None:
    assert spread_over(1, [3.0, 1.0, 2.0]) == 6.0
    # One job does 3, the other 1 and 2.
    assert spread_over(2, [3.0, 1.0, 2.0]) == 3.0
    # 4 | 1, 2 and 5, which begins after 3 s.
    assert spread_over(2, [4.0, 1.0, 2.0, 5.0]) == 8.0
    assert spread_over(4, []) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (40.4, "40 s"),
        (2520, "42 min"),
        (5940, "99 min"),
        (6000, "1 h 40 min"),
        (11400, "3 h 10 min"),
    ],
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_a_run_takes_its_steps_its_validations_and_its_evaluation(write_study: WriteStudy) -> None:
    study = load_study(write_study(common=STEPS))
    assert run_seconds(TRIAL, study.variants["dense"]) == pytest.approx(SECONDS)


def test_variants_that_differ_in_rates_alone_take_equally_long(write_study: WriteStudy) -> None:
    variants = {
        "dense": None,
        "fast": {"optimizer.learning_rate": 0.1, "schedule.warmup_steps": 1},
        "cp": {"model.feed_forward": CP},
        "sgd": {"optimizer.kind": "sgd"},
        "frozen": {"optimizer.groups": [{"match": "blocks.*", "freeze": True}]},
    }
    study = load_study(write_study(variants=variants, common=STEPS))
    times = Times(study, 2)
    times.keep_trial(study.variants["dense"], TRIAL)
    # What is kept is read at the next start, with as many jobs.
    times = Times(study, 2)
    assert times.of_run(study.variants["fast"], {}) == pytest.approx(SECONDS)
    assert [times.needs_trial(v, {}) for v in study.variants.values()] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert Times(study, 1).needs_trial(study.variants["dense"], {})
    # Finished runs know better, unless they had another number of jobs.
    dense = study.variants["dense"]
    assert times.of_run(dense, {("fast", 1): took(30, 2), ("dense", 1): took(20, 2)}) == 25
    assert times.of_run(dense, {("dense", 1): took(20)}) == pytest.approx(SECONDS)
    assert times.of_run(study.variants["sgd"], {("sgd", 1): took(20)}) == 20
    (study.folder / TIMES).write_text('{"trials": [3]')
    assert Times(study, 2).needs_trial(dense, {})


def test_only_what_is_left_is_counted(write_study: WriteStudy) -> None:
    study = load_study(write_study(seeds=[1, 2, 3], common=STEPS))
    times = Times(study, 1)
    results = {("dense", 1): took(20) | {"loss": 3.0}}
    assert estimate_line([estimate(study, {}, times)], 1) == (
        "6 runs to do; how long they take is measured at the start"
    )
    found = estimate(study, results, times)
    assert (found.runs, found.seconds, found.unknown) == (5, 40.0, ("cp",))
    assert estimate_line([found], 1) == (
        "5 runs to do, about 40 s with 1 job (as finished runs took), without cp: no time is known"
    )
    times.keep_trial(study.variants["cp"], TRIAL)
    found = estimate(study, results, times)
    assert found.seconds == pytest.approx(2 * 20 + 3 * SECONDS)
    assert estimate_line([found, found], 1) == (
        "10 runs to do, about 3 min 8 s with 1 job (measured by trial steps, as finished runs took)"
    )
    # A finished run knows better than the trial before it.
    known = estimate(study, results | {("cp", 1): took(30) | {"loss": 3.0}}, times)
    assert known.ways == {"runs"}
    # Of a run that goes on what it has taken is over.
    left = time_left(study, results, times, {("cp", 1): 8.0})
    assert left == pytest.approx(found.seconds - 8)
    every = {(name, seed): took(1) for name in study.variants for seed in (1, 2, 3)}
    assert estimate_line([estimate(study, every, times)], 1) == ""


def test_points_that_are_not_chosen_yet_are_counted(write_study: WriteStudy) -> None:
    grid = {"train.micro_batch_size": [1, 2]}
    study = load_study(write_study(seeds=[1, 2, 3], grid=grid, grid_seeds=1, common=STEPS))
    times = Times(study, 1)
    found = {("dense/micro_batch_size=1", 1): took(10) | {"validation": 1.0}}
    found |= {("dense/micro_batch_size=2", 1): took(20) | {"validation": 2.0}}
    # 2 of dense at the better point, of cp 2 and then 2, of unknown length.
    left = estimate(study, found, times)
    assert (left.runs, left.seconds, left.unknown) == (6, 20.0, ("cp",))


def test_a_dry_run_says_what_is_known_and_starts_nothing(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(common=STEPS)
    assert run(["study", str(path), "--dry-run"]) == 0
    end = "2 runs to do; how long they take is measured at the start\n"
    assert capfd.readouterr().out.endswith(end)
    study = load_study(path)
    assert not study.folder.exists()
    write_record(study, "0")
    for variant in study.variants.values():
        Times(study, 2).keep_trial(variant, TRIAL)
    assert run(["study", str(path), "--dry-run", "--jobs", "2", "--json", "-"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["time"] == "2 runs to do, about 18 s with 2 jobs (measured by trial steps)"
    assert plan["seconds_left"] == pytest.approx(SECONDS)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trial_that_fails_is_said_and_the_others_are_taken(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    study = load_study(write_study(common=STEPS))
    study.folder.mkdir()
    times = Times(study, 1)
    cp = study.variants["cp"]
    broken = replace(cp, overrides=(*cp.overrides, "model.num_heads=5"))  # of a width of 32
    study.variants["cp"] = broken
    take_trials({"": study}, {"": times})
    said = capfd.readouterr().err
    assert "== trial 1 of 2: how long a step of dense takes" in said
    assert "polyad: error: " in said
    assert "the trial of cp failed: how long it takes is not known" in said
    trial = times.trial(study.variants["dense"])
    assert trial is not None
    assert trial["start_seconds"] > 0 < trial["step_seconds"]
    # 23,778 tokens of validation in windows of 32, by 2, as micro-batches are.
    assert trial["validation_passes"] == trial["scoring_passes"] == 372
    assert times.trial(broken) is None
    assert not (study.folder / ".trial.json").exists()
    # Taken once: only the other one is tried again.
    take_trials({"": study}, {"": Times(study, 1)})
    assert "trial 1 of 1: how long a step of cp takes" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["images", "sequences"])
def test_trials_are_taken_of_images_and_sequences(
    tmp_path: Path, write_study: WriteStudy, config: Path, kind: str
) -> None:
    changes: dict[str, Any] = {"data": None, "variants": {"dense": None}, "common": {}}
    if kind == "images":
        data = tmp_path / "digits"
        assert run(["prepare", "--images", "digits", "--output", str(data)]) == 0
        tree = IMAGES | {"data": {"kind": "images", "path": str(data)}}
    else:
        made.byte_tokenizer(tmp_path)
        table = made.folder_of(tmp_path / "table")
        section = {"kind": "sequences", "path": str(table)}
        section["tokenizer"] = str(tmp_path / "tokenizer.json")
        model = SMALL["model"] | {"head": {"kind": "classification"}, "sequence_length": 64}
        tree = SMALL | {"data": section, "model": model}
    config.write_text(yaml.safe_dump(tree | {"run": {"folder": str(tmp_path / "run")}}))
    study = load_study(write_study(**changes))
    study.folder.mkdir()
    times = Times(study, 1)
    take_trials({"": study}, {"": times})
    trial = times.trial(study.variants["dense"])
    assert trial is not None
    assert trial["step_seconds"] > 0 < trial["pass_seconds"]
    # Of 18 images and 21 rows, by 2, as micro-batches are.
    assert trial["scoring_passes"] == {"images": 9, "sequences": 11}[kind]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_signal_ends_a_trial_and_the_same_command_goes_on(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path, data)
    process = start(path)
    wait_for(
        lambda: any("polyad.launch.study.trial" in command(c) for c in children(process.pid)),
        process,
    )
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C in a terminal
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    last = "polyad: error: interrupted; the same command goes on where it stood"
    assert err.splitlines()[-1] == last
    assert run(["study", str(path), "--dry-run"]) == 0


def test_no_trial_begins_after_the_time_is_over(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    study = load_study(write_study(common=STEPS))
    take_trials({"": study}, {"": Times(study, 1)}, until=0.0)
    assert "the time is over: 2 trials left out" in capfd.readouterr().err
    assert not (study.folder / TIMES).exists()


def test_adapters_of_another_variants_run_are_checked_before_that_is_there(
    write_study: WriteStudy,
) -> None:
    path = write_study(
        variants={"dense": None, "lora": {"adapt.lora": {"rank": 2}}},
        from_runs={"lora": {"checkpoint.init_from": "dense"}},
    )
    study = load_study(path)
    assert [run["variant"] for run in planned(study)["runs"]] == ["dense", "lora"]
    words = next(run for run in study.runs(study.variants) if run.sources).checked_overrides
    plan = open_plan(Path(study.config.base), words, 1)
    assert plan.config.adapt.lora is not None
