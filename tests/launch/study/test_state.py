"""Which point of a grid a variant is compared with, and the comparison over tasks; by hand."""

import math

import pytest

from polyad.launch.study.folder import check_sources
from polyad.launch.study.result import StudyResult
from polyad.launch.study.results import over_tasks
from polyad.launch.study.state import Results, choose, grids, validation_score
from polyad.launch.study.tables import result_table
from polyad.train.errors import ConfigError, RunError
from polyad.train.results import json_value
from polyad.train.study.reading import load_study
from polyad.train.study.study import Study
from tests.launch.study.conftest import WriteStudy
from tests.launch.study.test_results import SIZE, TEST, finished, plan, result, summarized

RATES = {"optimizer.learning_rate": [0.1, 0.2]}


@pytest.fixture
def study(write_study: WriteStudy) -> Study:
    """Two variants with two points each, both tried with the first two of three seeds."""
    return load_study(write_study(seeds=[1, 2, 3], grid=RATES, grid_seeds=2))


def results_of(**scores: list[float | None]) -> Results:
    """Validation losses of dense at 0.1 and 0.2 and of cp, as `cp_1`, by seed from 1."""
    return {
        (f"{name[:-2]}/learning_rate=0.{name[-1]}", seed): finished(
            "dense", seed, 3.0, validation=score
        )
        for name, found in scores.items()
        for seed, score in enumerate(found, start=1)
    }


def test_a_grid_is_trained_with_its_seeds_and_the_best_point_with_the_others(study: Study) -> None:
    names = [f"{v}/learning_rate={rate}" for v in ("dense", "cp") for rate in (0.1, 0.2)]
    assert list(study.variants) == names
    assert study.num_runs == 2 * 4 + 2
    swept = [(run.variant.name, run.seed) for run in study.runs({})]
    assert swept == [(name, seed) for seed in (1, 2) for name in names]
    chosen = {"dense": study.variants[names[1]], "cp": study.variants[names[2]]}
    rest = [(run.variant.name, run.seed) for run in study.runs(chosen)][8:]
    assert rest == [(names[1], 3), (names[2], 3)]
    folder = next(iter(study.runs({}))).folder
    assert folder == study.folder / "runs/dense/learning_rate=0.1/seed-1"


def test_a_grid_of_one_point_is_not_swept(write_study: WriteStudy) -> None:
    """So a run of it that diverges ends the study, as one without a grid does."""
    study = load_study(write_study(seeds=[1, 2], grid={"optimizer.learning_rate": [0.1]}))
    assert not any(run.is_swept for run in study.runs(study.variants))


def test_a_run_comes_after_the_one_of_its_seed_that_it_begins_with(write_study: WriteStudy) -> None:
    variants = {"again": None, "student": None, "dense": None}
    study = load_study(
        write_study(
            variants=variants,
            seeds=[1, 2],
            from_runs={
                "again": {"checkpoint.init_from": "dense"},
                "student": {"checkpoint.init_from": "again", "distill.teacher": "dense"},
            },
        )
    )
    chosen = choose(study, {})
    runs = [*study.runs(chosen)]
    order = ["dense", "again", "student"]
    assert [(run.variant.name, run.seed) for run in runs] == [(n, s) for s in (1, 2) for n in order]
    assert list(study.groups) == ["again", "student", "dense"]  # as the tables
    of_again, of_student = (run.overrides for run in runs[4:])
    folder = study.folder / "runs"
    assert f'checkpoint.init_from="{folder}/dense/seed-2"' in of_again
    assert f'checkpoint.init_from="{folder}/again/seed-2"' in of_student
    assert f'distill.teacher="{folder}/dense/seed-2"' in of_student
    assert study.variants["again"].defining_keys()["checkpoint.init_from"] == "dense"


def test_a_run_waits_for_the_best_point_of_the_variant_that_it_begins_with(
    write_study: WriteStudy,
) -> None:
    study = load_study(
        write_study(
            seeds=[1, 2, 3],
            grids={"dense": RATES},
            grid_seeds=2,
            from_runs={"cp": {"checkpoint.init_from": "dense"}},
        )
    )
    assert study.num_runs == 2 * 2 + 1 + 3
    assert {run.variant.group for run in study.runs(choose(study, {}))} == {"dense"}
    found = results_of(dense_1=[1.0, 4.0], dense_2=[2.4, 2.4])
    runs = [run for run in study.runs(choose(study, found)) if run.variant.name == "cp"]
    assert [run.seed for run in runs] == [1, 2, 3]
    best = "dense/learning_rate=0.2"
    assert [run.source_names for run in runs] == [{"checkpoint.init_from": best}] * 3
    assert runs[2].overrides[-1].endswith(f'/{best}/seed-3"')
    # Another point may become the best one, and then the run is no longer what its name says.
    check_sources(runs[0], finished("cp", 1, 3.0, from_runs={"checkpoint.init_from": best}))
    with pytest.raises(ConfigError, match=rf"the best point is {best}, and .*cp/seed-1 is from x"):
        check_sources(runs[0], finished("cp", 1, 3.0, from_runs={"checkpoint.init_from": "x"}))


def test_the_best_mean_of_the_sweep_is_chosen_of_a_loss_the_lowest(study: Study) -> None:
    # dense: means 2.5 and 2.4; cp: the sweep is not finished.
    found = results_of(dense_1=[1.0, 4.0], dense_2=[2.4, 2.4], cp_1=[1.0, 1.0], cp_2=[2.0])
    assert {group: v.point for group, v in choose(study, found).items()} == {
        "dense": "learning_rate=0.2"
    }
    assert grids(study, found)["dense"] == {"learning_rate=0.1": 2.5, "learning_rate=0.2": 2.4}
    assert grids(study, found)["cp"]["learning_rate=0.2"] is None


def test_a_run_without_a_finite_validation_is_worse_than_any(study: Study) -> None:
    found = results_of(dense_1=[1.0, None], dense_2=[90.0, 90.0])
    assert choose(study, found)["dense"].point == "learning_rate=0.2"
    assert grids(study, found)["dense"]["learning_rate=0.1"] == math.inf
    none_is_finite = results_of(dense_1=[1.0, None], dense_2=[None, 1.0])
    with pytest.raises(RunError, match="no point of dense has a finite validation"):
        choose(study, none_is_finite)


def test_the_validation_is_the_last_one_or_the_best_that_was_kept(write_study: WriteStudy) -> None:
    records = [{"validation_loss": 3.0}, {}, {"validation_loss": 2.0}, {"validation_loss": 2.5}]
    variants = {"dense": None, "kept": {"checkpoint.keep_best": True}}
    study = load_study(write_study(variants=variants))
    last, best = study.runs(study.variants)
    assert validation_score(last, records) == 2.5
    assert validation_score(best, records) == 2.0
    assert validation_score(best, [{}]) is None


def test_points_that_were_not_chosen_are_left_out_of_the_comparison() -> None:
    runs = [
        *(
            result("dense", 1, 4.0),
            result("cp", 1, 3.0, point="k=1"),
            result("cp", 1, 9.0, point="k=2"),
        ),
        *(result("dense", 2, 5.0), result("cp", 2, 4.0, point="k=1")),
    ]
    of_study = plan("dense", "cp", seeds=(1, 2))
    sizes = {f"cp/k={k}": SIZE for k in (1, 2)}
    of_study = of_study.model_copy(update={"variants": of_study.variants | sizes})
    found = summarized(of_study, runs, {"dense": "", "cp": "k=1"})
    cp = found.to_json()["variants"]["cp"]
    assert cp["point"] == "k=1"
    assert cp["loss"]["mean"] == 3.5
    assert cp["difference"]["differences"] == [-1.0, -1.0]
    assert [run.scores["loss"] for run in found.swept] == [9.0]
    # A column for each point, empty where a variant has not been scored at it.
    points = {"dense": {"k=2": None}, "cp": {"k=1": 2.0, "k=2": 2.5}}
    table = result_table(found.model_copy(update=TEST | {"grids": points}), markdown=True)
    assert "| grid, validation | k=2 | k=1 |" in table
    assert "| dense |  |  |" in table
    assert "| cp | 2.5000 | 2.0000 best |" in table
    assert (
        "grid: the best point, chosen by the mean score on the validation split over seeds 1, 2"
        in table
    )
    # Of a point that diverged a kept result has null, as of one that is not finished.
    swept = [found.swept[0].model_copy(update={"validation": None})]
    grid = {"cp": {"k=1": 2.0, "k=2": math.inf}}
    diverged = found.model_copy(update=TEST | {"swept": swept, "grids": grid})
    kept = StudyResult.from_json(json_value(diverged))
    assert "| cp | 2.0000 best | not finite |" in result_table(kept, markdown=True)


def test_variants_are_compared_by_their_mean_over_tasks() -> None:
    tasks = {}
    for task, losses in {"one": (4.0, 5.0, 3.0, 4.5), "two": (2.0, 2.0, 1.5, 1.0)}.items():
        dense, cp = losses[:2], losses[2:]
        runs = [result("dense", s, loss) for s, loss in zip((1, 2), dense, strict=True)]
        runs += [result("cp", s, loss) for s, loss in zip((1, 2), cp, strict=True)]
        found = summarized(plan("dense", "cp", seeds=(1, 2)), runs)
        tasks[task] = found.model_copy(update=TEST)
    over = over_tasks(tasks, ["one", "two"])
    found = over.to_json()
    # Means over tasks: dense 3 and 3.5, cp 2.25 and 2.75; differences -0.75 and -0.75.
    assert found["finished"]
    assert found["variants"]["dense"]["mean"]["values"] == [3.0, 3.5]
    assert found["variants"]["cp"]["mean"]["mean"] == 2.5
    assert found["variants"]["cp"]["difference"]["differences"] == [-0.75, -0.75]
    head, dense_row, cp_row = result_table(over).splitlines()[:3]
    assert head.split()[:4] == ["variant", "one", "two", "mean"]
    assert dense_row.split()[:2] == ["dense", "4.5000"]
    assert "-0.7500 ± 0.0000" in cp_row


def test_a_task_that_is_not_finished_leaves_no_mean() -> None:
    found = summarized(plan("dense", "cp"), [result("dense", 1, 4.0)])
    over = over_tasks({"one": found.model_copy(update=TEST)}, ["one", "two"])
    assert (over.finished, over.variants) == (False, {})
    assert "4.0000" in result_table(over)


def test_a_seed_that_the_baseline_has_not_finished_on_all_tasks_is_in_no_pair() -> None:
    runs = [result(name, seed, 4.0 + seed) for name in ("dense", "cp") for seed in (1, 2)]
    one = summarized(plan("dense", "cp", seeds=(1, 2)), runs)
    other = summarized(plan("dense", "cp", seeds=(1, 2)), [runs[0], *runs[2:]])
    cp = over_tasks({"one": one, "other": other}, ["one", "other"]).variants["cp"]
    assert cp.mean.runs == 2
    assert cp.difference is not None
    assert cp.difference.seeds == [1]


def test_before_any_point_is_the_best_one_nothing_is_compared(study: Study) -> None:
    found = summarized(plan("dense", "cp"), [result("dense", 1, 4.0, point="x")], {})
    known = found.model_copy(update={"grids": grids(study, {}), "split": "validation"})
    assert result_table(known).startswith("nothing is compared yet")
