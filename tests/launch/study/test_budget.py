"""What fits into a time, and in which order: by hand; and a study that is given some."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.cli import run
from polyad.launch.study.budget import Goal, RunKey, Standing, fitting, rank, standing
from polyad.launch.study.choice import Results
from polyad.launch.study.folder import write_record
from polyad.launch.study.state import key
from polyad.launch.study.times import Times
from polyad.launch.study.within import Within, choice_lines, shares
from polyad.train.study.reading import load_studies, load_study
from polyad.train.study.study import Study
from tests.launch.study.conftest import CP, WriteStudy
from tests.launch.study.test_checks import refused
from tests.launch.study.test_run import QUICK, start, write
from tests.launch.study.test_times import TRIAL


def pair(variant: str, seed: int) -> Goal:
    """A variant's run and the baseline's."""
    return Goal((("base", seed), (variant, seed)), variant)


def hours(*variants: str, seeds: int = 3, **seconds: float) -> dict[RunKey, float]:
    """Runs of these variants take an hour each, or as long as is said."""
    return {(name, s): seconds.get(name, 1.0) for s in range(1, seeds + 1) for name in variants}


NEW = Standing(0)


def test_the_standing_of_a_variant_is_how_near_zero_is_to_its_interval() -> None:
    assert standing([], []) == (0, 0.0)
    assert standing([3.0], [4.0]) == (1, 0.0)
    # Differences 1 and 3: mean 2, deviation sqrt(2), half width 12.706 x sqrt(2) / sqrt(2).
    found = standing([2.0, 5.0], [1.0, 2.0])
    assert found.nearness == pytest.approx(2 / 12.7062, rel=1e-5)
    # -0.21, -0.19 and -0.20: mean -0.2, half width 4.303 x 0.01 / sqrt(3) = 0.0248.
    assert standing([0.79, 0.81, 0.8], [1.0] * 3).nearness == pytest.approx(0.2 / 0.02484, rel=1e-3)
    # All pairs alike: decided, or equal.
    assert standing([2.0, 3.0], [1.0, 2.0]).nearness == math.inf
    assert standing([1.0, 2.0], [1.0, 2.0]).nearness == 0.0


def test_fewest_pairs_come_first_and_then_what_is_nearest_to_being_decided() -> None:
    order = [
        *(Standing(0), Standing(1), Standing(2, 0.9), Standing(7, 0.3), Standing(2, 0.1)),
        *(Standing(2, 8.0), Standing(3, 1.5)),
    ]
    ranks = [rank(each) for each in order]
    # Of those that are decided, those by the largest margin come first.
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_every_variant_gets_a_pair_before_one_gets_a_second() -> None:
    goals = [pair(name, seed) for seed in (1, 2, 3) for name in ("a", "b")]
    chosen = fitting(goals, {"a": NEW, "b": NEW}, hours("base", "a", "b"), 6.0)
    assert chosen == [
        *(("base", 1), ("a", 1), ("b", 1)),
        *(("base", 2), ("a", 2), ("b", 2)),
    ]
    # The one with a pair waits for the other, whatever the order of the file.
    known = {"a": Standing(1), "b": NEW}
    assert fitting(goals, known, hours("base", "a", "b"), 2.0) == [("base", 1), ("b", 1)]
    assert fitting(goals, known, hours("base", "a", "b"), 1.9) == []


def test_from_two_pairs_on_the_undecided_comes_before_the_decided() -> None:
    goals = [pair(name, seed) for seed in (3, 4) for name in ("a", "b", "c")]
    known = {"a": Standing(2, 5.0), "b": Standing(2, 0.2), "c": Standing(2, 0.8)}
    chosen = fitting(goals, known, hours("base", "a", "b", "c", seeds=4), 100.0)
    first = [run for run in chosen if run[0] != "base"]
    assert first == [("c", 3), ("c", 4), ("b", 3), ("b", 4), ("a", 3), ("a", 4)]


def test_a_pair_counts_the_baseline_only_where_that_is_to_be_trained() -> None:
    goals = [pair("a", seed) for seed in (1, 2)]
    seconds = hours("base", "a", seeds=2)
    del seconds["base", 2]  # it is finished
    assert fitting(goals, {"a": NEW}, seconds, 1.0) == [("a", 2)]
    # Or goes on for another half hour, on the only job.
    assert fitting(goals, {"a": NEW}, seconds, 1.0, going=[0.5]) == []
    assert fitting(goals, {"a": NEW}, seconds, 1.0, jobs=2, going=[0.5]) == [("a", 2)]


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    goals = [pair(name, 1) for name in ("long", "unknown", "short")]
    known = {"long": NEW, "unknown": NEW, "short": NEW}
    seconds = hours("base", "long", "unknown", "short", long=9.0, unknown=math.nan)
    assert fitting(goals, known, seconds, 5.0) == [("base", 1), ("short", 1)]
    assert fitting(goals, known, seconds, 11.0) == [("base", 1), ("long", 1), ("short", 1)]


def test_what_a_grid_needs_comes_before_all_pairs() -> None:
    swept = [Goal((("base/1", 1),)), Goal((("base/2", 1),))]
    goals = [pair("a", 1), *swept]
    seconds = hours("base", "base/1", "base/2", "a", seeds=1)
    assert fitting(goals, {"a": NEW}, seconds, 3.0) == [("base/1", 1), ("base/2", 1)]
    chosen = fitting(goals, {"a": NEW}, seconds, 4.0)
    assert chosen == [("base/1", 1), ("base/2", 1), ("base", 1), ("a", 1)]


def test_several_jobs_do_more_in_the_same_time() -> None:
    goals = [pair(name, 1) for name in ("a", "b", "c")]
    known = {"a": NEW, "b": NEW, "c": NEW}
    assert len(fitting(goals, known, hours("base", "a", "b", "c"), 2.0)) == 2
    assert len(fitting(goals, known, hours("base", "a", "b", "c"), 2.0, jobs=2)) == 4


@pytest.mark.parametrize("wrong", ["0", "3", "3d", "h", "", "0m", "-3h", "1m30h", "1.5h", "3 h"])
def test_a_time_that_is_none_is_one_line(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str], wrong: str
) -> None:
    line = refused(write_study(), capfd, f"--budget={wrong}")
    assert f"--budget: '{wrong}' is not a time above 0, as 3h, 90m, 45s or 1h30m" in line


def chosen(study: Study, budget: float, results: Results | None = None) -> list[str]:
    """What fits, of runs that each take as long as `TRIAL` says."""
    times = Times(study, 1)
    for variant in study.variants.values():
        if times.trial(variant) is None:
            times.keep_trial(variant, TRIAL | {"start_seconds": 0.0})
    within = Within(study=study, times=times, until=time.monotonic() + budget)
    return [f"{name} {seed}" for name, seed in map(key, within.chosen(results or {}))]


def result(loss: float, **more: Any) -> dict[str, Any]:
    """A finished run that took no time of its own."""
    return {"loss": loss, "seconds": None, "from_runs": {}, "validation": loss, **more}


EACH = {"train.steps": 100, "log.trackers": []}
SECONDS = 100 * 0.5 + (7 + 9) * 0.1
"""Of a run, which validates once: 51.6 s."""


def test_a_study_trains_pairs_with_what_they_begin_with(write_study: WriteStudy) -> None:
    variants = {"again": {"optimizer.learning_rate": 0.1}, "dense": None, "cp": None, "b": None}
    sources = {"again": {"checkpoint.init_from": "cp"}}
    study = load_study(write_study(variants=variants, from_runs=sources, seeds=[1, 2], common=EACH))
    # `again` is first in the file, and needs cp; then b has no pair, and cp has one by the way.
    assert chosen(study, 3.5 * SECONDS) == ["dense 1", "cp 1", "again 1"]
    first = ["dense 1", "cp 1", "again 1", "b 1"]
    assert chosen(study, 4.5 * SECONDS) == first
    assert chosen(study, 100 * SECONDS)[4:] == ["dense 2", "cp 2", "again 2", "b 2"]
    # Of b the mean is 0.6 half widths, of `again` 0.08, of cp 0: b has its third pair first.
    found = {(name, seed): result(3.0) for name in ("dense", "cp", "again", "b") for seed in (1, 2)}
    found |= {("b", 1): result(2.0), ("b", 2): result(1.7), ("again", 1): result(2.0)}
    study.config.seeds.append(3)
    found["again", 1]["from_runs"] = found["again", 2]["from_runs"] = {"checkpoint.init_from": "cp"}
    assert chosen(study, 2.5 * SECONDS, found) == ["dense 3", "b 3"]


def test_a_grid_is_swept_before_anything_is_compared(write_study: WriteStudy) -> None:
    changes = {"grid": {"optimizer.learning_rate": [0.1, 0.2]}, "grid_seeds": 1, "seeds": [1, 2]}
    study = load_study(write_study(common={"log.trackers": [], "train.steps": 100}, **changes))
    names = [f"{name}/learning_rate={rate}" for name in ("dense", "cp") for rate in (0.1, 0.2)]
    assert chosen(study, 3.5 * SECONDS) == [f"{name} 1" for name in names[:3]]
    found = {(name, 1): result(loss) for name, loss in zip(names, (2, 1, 3, 4), strict=True)}
    # The best points are 0.2 of dense and 0.1 of cp; they have a pair, and get another.
    assert chosen(study, 9 * SECONDS, found) == [f"{names[1]} 2", f"{names[2]} 2"]


def test_measures_have_their_time_reserved(write_study: WriteStudy) -> None:
    study = load_study(write_study(attack={"rate": 0.1}, common=EACH))
    times = Times(study, 1)
    times.keep_measure("attack", 20.0)
    assert chosen(study, 2 * SECONDS + 39) == []
    assert chosen(study, 2 * SECONDS + 41) == ["dense 1", "cp 1"]
    # Of a run that is finished, too.
    assert chosen(study, SECONDS + 39, {("dense", 1): result(3.0)}) == []
    assert chosen(study, SECONDS + 41, {("dense", 1): result(3.0)}) == ["cp 1"]


def test_tasks_share_a_time_by_what_is_left_of_each(write_study: WriteStudy, data: Path) -> None:
    tasks = {
        "a": {"data.path": str(data), "train.steps": 100},
        "b": {"data.path": str(data), "train.steps": 300},
    }
    common = {"log.trackers": []}
    studies = load_studies(write_study(data=None, tasks=tasks, common=common, seeds=[1, 2, 3]))
    for study in studies.values():
        chosen(study, 1.0)  # its trials
    times = {name: Times(study, 1) for name, study in studies.items()}
    # a: 6 runs of 51.6 s, b: 6 of 151.6 s; of half the time each gets half, which is a pair.
    whole = 6 * (51.6 + 151.6)
    found = shares(studies, {"a": {}, "b": {}}, times, time.monotonic() + whole / 2)
    assert [len(each.chosen({})) for each in found.values()] == [2, 2]
    said = choice_lines(found, {"a": {}, "b": {}}, whole / 2).splitlines()
    assert said[0].startswith("4 of 12 runs fit into 10 min, and take about 6 min 46 s with 1 job")
    assert said[1:3] == [
        "a: to train: dense, seed 1; cp, seed 1",
        "a: left for another day: dense, seeds 2, 3; cp, seeds 2, 3",
    ]


def test_a_dry_run_says_what_would_fit(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(common=EACH, seeds=[1, 2])
    study = load_study(path)
    write_record(study, "0")
    chosen(study, 1.0)
    assert run(["study", str(path), "--dry-run", "--budget", "1m44s"]) == 0
    said = capfd.readouterr().out.splitlines()[-3:]
    head = "2 of 4 runs fit into 1 min 44 s, and take about 1 min 43 s with 1 job; "
    assert said == [
        f"{head}it is decided anew after each",
        "to train: dense, seed 1; cp, seed 1",
        "left for another day: dense, seed 2; cp, seed 2",
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_study_trains_what_fits_and_says_what_is_left(tmp_path: Path, data: Path) -> None:
    variants = {"cp": {"model.feed_forward": CP}, "dense": None, "wide": {"model.num_heads": 4}}
    path = write(tmp_path, data, variants=variants, common=QUICK, attack={"rate": 0.1})
    study = load_study(path)
    write_record(study, "0")
    times = Times(study, 1)
    for name, seconds in (("dense", 1.0), ("wide", 1.0), ("cp", 4000.0)):
        times.keep_trial(study.variants[name], TRIAL | {"start_seconds": seconds})
    process = start(path, "--json", "-", "--budget", "1h")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    lines = err.splitlines()
    assert "to train: dense, seed 1; wide, seed 1" in lines
    assert "left for another day: cp, seed 1" in lines
    assert "== trial" not in err
    assert lines[-1] == "1 run left for another day: the same command goes on"
    found = json.loads(out)
    assert not found["finished"]
    assert [(each["variant"], "attack" in each) for each in found["runs"]] == [
        ("dense", True), ("wide", True),
    ]  # fmt: skip
    # Nothing fits into a second: nothing is trained, and nothing is lost.
    process = start(path, "--json", "-", "--budget", "1s")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "0 of 1 runs fit into 1 s" in err
    assert json.loads(out)["runs"] == found["runs"]
