"""How long a study takes: by hand from what finished runs took."""

import json
import math
from pathlib import Path

import pytest

from polyad.launch.cli import run
from polyad.launch.study.plan import Times, estimate, planned, spread_over, time_left
from polyad.launch.study.progress import estimate_line, spoken
from polyad.launch.study.result import RunResult
from polyad.train.config.plan import open_plan
from polyad.train.study.reading import load_study
from tests.launch.study.conftest import CP, WriteStudy
from tests.launch.study.test_results import finished

STEPS = {"train.steps": 10, "evaluation.every": 4, "log.trackers": []}


def took(seconds: float, jobs: int = 1, validation: float | None = None) -> RunResult:
    """A finished run, as far as times are concerned."""
    return finished("dense", 1, 3.0, seconds=seconds, jobs=jobs, validation=validation)


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
    dense, sgd = study.variants["dense"], study.variants["sgd"]
    assert math.isnan(times.of_run(dense, {("sgd", 1): took(20, 2)}))
    # Those with as many jobs count, and others where there are none.
    assert times.of_run(dense, {("fast", 1): took(30, 2), ("dense", 1): took(20, 2)}) == 25
    assert times.of_run(dense, {("fast", 1): took(30, 2), ("dense", 1): took(20)}) == 30
    assert times.of_run(dense, {("dense", 1): took(20)}) == 20
    assert times.of_run(sgd, {("sgd", 1): took(20)}) == 20


def test_only_what_is_left_is_counted(write_study: WriteStudy) -> None:
    study = load_study(write_study(seeds=[1, 2, 3], common=STEPS))
    times = Times(study, 1)
    results = {("dense", 1): took(20)}
    assert estimate_line([estimate(study, {}, times)], 1) == (
        "6 runs to do; the time is estimated once one of them is finished"
    )
    found = estimate(study, results, times)
    assert (found.runs, found.seconds, found.unknown) == (5, 40.0, ("cp",))
    assert estimate_line([found], 1) == (
        "5 runs to do, about 40 s with 1 job, estimated from the finished ones, not counting cp, "
        "whose time is unknown"
    )
    known = results | {("cp", 1): took(60)}
    found = estimate(study, known, times)
    assert (found.runs, found.seconds, found.unknown) == (4, 2 * 20 + 2 * 60, ())
    assert estimate_line([found, found], 1) == (
        "8 runs to do, about 5 min 20 s with 1 job, estimated from the finished ones"
    )
    # Of a run that goes on what it has taken is over.
    assert time_left(study, known, times, {("cp", 2): 8.0}) == found.seconds - 8
    every = {(name, seed): took(1) for name in study.variants for seed in (1, 2, 3)}
    assert estimate_line([estimate(study, every, times)], 1) == ""


def test_points_that_are_not_chosen_yet_are_counted(write_study: WriteStudy) -> None:
    grid = {"train.micro_batch_size": [1, 2]}
    study = load_study(write_study(seeds=[1, 2, 3], grid=grid, grid_seeds=1, common=STEPS))
    times = Times(study, 1)
    found = {("dense/micro_batch_size=1", 1): took(10, validation=1.0)}
    found |= {("dense/micro_batch_size=2", 1): took(20, validation=2.0)}
    # 2 of dense at the better point, of cp 2 and then 2, of unknown length.
    left = estimate(study, found, times)
    assert (left.runs, left.seconds, left.unknown) == (6, 20.0, ("cp",))


def test_a_dry_run_says_what_is_known_and_starts_nothing(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(common=STEPS)
    assert run(["study", str(path), "--dry-run"]) == 0
    end = "2 runs to do; the time is estimated once one of them is finished\n"
    assert capfd.readouterr().out.endswith(end)
    assert not load_study(path).folder.exists()
    assert run(["study", str(path), "--dry-run", "--jobs", "2", "--json", "-"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["seconds_left"], f"{plan['time']}\n") == (None, end)


def test_adapters_of_another_variants_run_are_checked_before_that_is_there(
    write_study: WriteStudy,
) -> None:
    path = write_study(
        variants={"dense": None, "lora": {"adapt.lora": {"rank": 2}}},
        from_runs={"lora": {"checkpoint.init_from": "dense"}},
    )
    study = load_study(path)
    assert [run.variant for run in planned(study).runs] == ["dense", "lora"]
    words = next(run for run in study.runs(study.variants) if run.sources).checked_overrides
    plan = open_plan(Path(study.config.base), words, 1)
    assert plan.config.adapt.lora is not None


def test_blocks_that_learn_from_another_variants_run_are_checked_before_that_is_there(
    write_study: WriteStudy,
) -> None:
    replaced = {
        "blocks": [0],
        "feed_forward": {"kind": "transcoder", "num_experts": [8], "top_k": 2},
    }
    path = write_study(
        variants={
            "dense": None,
            "learned": {"distill.blocks": "normalized", "model.replaced": replaced},
        },
        from_runs={"learned": {"distill.teacher": "dense"}},
    )
    study = load_study(path)
    assert [run.variant for run in planned(study).runs] == ["dense", "learned"]
    words = next(run for run in study.runs(study.variants) if run.sources).checked_overrides
    plan = open_plan(Path(study.config.base), words, 1)
    assert plan.config.distill.blocks == "normalized"
