"""Studies: what is trained, which point is compared, and the intervals of paired differences.

Most runs are played by `Played`, which writes what `polyad train` and `polyad evaluate` would.
"""

import json
import math
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from filelock import FileLock
from scipy import stats

from polyad.train.config.text import GONE
from polyad.train.errors import ConfigError, RunError, Stopped
from polyad.train.study import (
    Study,
    _has_diverged,
    compare,
    draw,
    finish_runs,
    interval,
    load_study,
    plan_text,
    points_of,
    progress,
    result_text,
    results_of,
    to_json,
)
from tests.helpers.refusals import line_of
from tests.helpers.runs import write_config
from tests.helpers.started import start, steps, wait_for

LR = "optimizer.learning_rate"
Scores = dict[tuple[Any, ...], float | None]


class Played:
    """Plays commands: `losses` has the loss of each run by (variant, [point,] seed), None: the run
    diverges; a validation loss is that less `flattery` of the same key."""

    def __init__(self, losses: Scores, flattery: Scores | None = None, status: int = 0) -> None:
        self.losses, self.flattery, self.status = losses, flattery or {}, status
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> int:
        self.commands.append(words)
        folder = words[1]
        for word in words:
            if word.startswith("run.folder="):
                folder = json.loads(word.partition("=")[2])
        *_, runs, key = folder.partition("/runs/")
        assert runs
        names = tuple(int(n[5:]) if n.startswith("seed-") else n for n in key.split("/"))
        loss = self.losses[names]
        if self.status:
            return self.status
        if words[0] == "train":
            Path(folder).mkdir(parents=True, exist_ok=True)
            record = {"step": 6, "loss": loss, "grad_norm": 1.0, "tokens": 96, "skipped": not loss}
            record |= {"tokens_per_second": 100.0, "routing/entropy": 0.5}
            record["validation_loss"] = loss and loss - (self.flattery.get(names) or 0.0)
            Path(folder, "metrics.jsonl").write_text(json.dumps(record) + "\n")
            return int(loss is None)
        result = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss, "step": 6}
        Path(words[words.index("--json") + 1]).write_text(json.dumps(result | {"tokens_scored": 9}))
        return 0

    @property
    def trained(self) -> list[str]:
        """The runs that were trained, in order."""
        folders = [words[-1] for words in self.commands if words[0] == "train"]
        return [folder.partition("/runs/")[2].rstrip('"') for folder in folders]


@pytest.fixture
def study(tmp_path: Path, prepared_path: Path) -> Any:
    """Writes and reads a study of `dense` and `cp`; keywords replace whole keys."""

    def read(**changes: Any) -> Study:
        base = write_config(tmp_path / "base.yaml", prepared_path)
        tree = {
            "base": str(base), "folder": str(tmp_path / "study"), "seeds": [1, 2, 3],
            "baseline": "dense", "variants": {"dense": None, "cp": {LR: 0.02}},
        } | changes  # fmt: skip
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_study(tmp_path / "study.yaml")

    return read


def finished(study: Study, losses: Scores, flattery: Scores | None = None) -> Any:
    """The results of a study whose runs have these losses."""
    return finish_runs(study, Played(losses, flattery), lambda line: None)


def row(study: Study, frame: Any, variant: str, task: str = "", measure: str = "loss") -> Any:
    """A row of the comparison."""
    table = compare(study, frame).set_index(["task", "measure", "variant"])
    return table.loc[task, measure, variant]


LOSSES: Scores = {
    **{("dense", 1): 5.0, ("dense", 2): 5.5, ("dense", 3): 4.0},
    **{("cp", 1): 5.1, ("cp", 2): 5.7, ("cp", 3): 4.6},
}


def test_an_interval_is_that_of_student_s_t() -> None:
    # Mean 0.3; deviations -0.2, -0.1 and 0.3: s = sqrt((0.04 + 0.01 + 0.09) / 2) = sqrt(0.07).
    # t(2) at 97.5% is 4.302653: half is 4.302653 sqrt(0.07 / 3) = 0.657242.
    by_hand = {"difference": 0.3, "low": 0.3 - 0.657242, "high": 0.3 + 0.657242, "pairs": 3}
    assert interval([0.1, 0.2, 0.6]) == pytest.approx(by_hand, abs=1e-6)
    for values in ([1.0, 3.0], [0.3, -0.2, 0.1, 0.4, -0.5], [float(i * i) for i in range(12)]):
        theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        result = interval(values)
        assert (result["low"], result["high"]) == pytest.approx((theirs.low, theirs.high))
    # One pair has a difference and no interval, equal pairs one of no length.
    nan = math.nan
    assert list(interval([0.25]).values()) == pytest.approx([0.25, nan, nan, 1], nan_ok=True)
    assert math.isnan(interval([])["difference"])
    assert {interval([0.5, 0.5])[name] for name in ("difference", "low", "high")} == {0.5}


def test_variants_are_compared_in_pairs_of_one_seed(study: Any) -> None:
    known = study()
    frame = finished(known, LOSSES)
    cp, dense = row(known, frame, "cp"), row(known, frame, "dense")
    # The differences are 0.1, 0.2 and 0.6, whatever the seeds did to both.
    assert (cp.difference, cp.high) == pytest.approx((0.3, 0.3 + 0.657242), abs=1e-6)
    losses = [5.1, 5.7, 4.6]
    assert (cp["mean"], cp.deviation) == pytest.approx((sum(losses) / 3, statistics.stdev(losses)))
    assert (cp.runs, cp.pairs, dense.runs, dense.pairs) == (3, 3, 3, 0)
    assert math.isnan(dense.difference)
    assert row(known, frame, "cp", measure="routing/entropy").difference == 0.0
    text = result_text(known, frame)
    assert "0.65724" not in text  # ends, and no halves
    assert "a variant less dense with the same seed" in text
    assert "diverged" not in text


def test_pairs_are_of_the_seeds_that_both_have_finished(study: Any) -> None:
    known = study()
    finished(known, LOSSES)
    files = {(run.variant, run.seed): run.file for run in known.runs}

    def left(*gone: tuple[str, int]) -> Any:
        for each in gone:
            files[each].unlink()
        return row(known, results_of(known), "cp")

    cp = left(("dense", 1), ("cp", 3))
    assert (cp.runs, cp.pairs) == (2, 1)
    assert (cp.difference, cp["mean"]) == pytest.approx((0.2, 5.4))
    assert progress(known, results_of(known)) == (6, 4)
    assert left(("dense", 2), ("dense", 3)).pairs == 0


@pytest.mark.slow
def test_tasks_are_compared_each_and_by_the_mean_of_a_seed(study: Any) -> None:
    known = study(seeds=[1, 2], tasks={"a": {}, "b": {"train.steps": 7}})
    finish_runs(known, play := Played(LOSSES), lambda line: None)
    assert len(play.trained) == 8
    for run in known.runs:  # task b of cp is 1 worse with seed 1, and 2 with seed 2
        if (run.task, run.variant) == ("b", "cp"):
            tree = json.loads(run.file.read_text())
            run.file.write_text(json.dumps(tree | {"loss": tree["loss"] + run.seed}))
    frame = results_of(known)
    assert row(known, frame, "cp", "a").difference == pytest.approx(0.15)
    assert row(known, frame, "cp", "b").difference == pytest.approx(1.65)
    over = row(known, frame, "cp", "mean of tasks")
    # Seed 1: (0.1 + 1.1) / 2 = 0.6, seed 2: (0.2 + 2.2) / 2 = 1.2; t(1) is 12.7062.
    assert (over.difference, over.high) == pytest.approx((0.9, 0.9 + 12.7062 * 0.3), rel=1e-5)
    known.runs[-1].file.unlink()  # task b, cp, seed 2
    assert row(known, results_of(known), "cp", "mean of tasks").pairs == 1


GRID = {LR: [0.01, 0.03]}
A, B = "learning_rate=0.01", "learning_rate=0.03"


@pytest.mark.slow
def test_the_point_that_is_best_on_validation_is_scored_on_test(study: Any) -> None:
    known = study(seeds=[1, 2], split="test", grid=GRID, variants={"dense": None, "cp": None})
    # On the test split the second point is better, on validation the first.
    losses: Scores = {(v, p, s): (4.0 if p == B else 4.5) for v in ("dense", "cp")
                      for p in (A, B) for s in (1, 2)}  # fmt: skip
    losses["cp", A, 1] = 4.3
    play = Played(losses, {key: 1.0 for key in losses if key[1] == A})
    frame = finish_runs(known, play, lambda line: None)
    points = points_of(known, frame).set_index(["variant", "point"])
    assert points.compared.to_dict() == {(v, p): p == A for v in ("dense", "cp") for p in (A, B)}
    assert points.validation["cp", A] == pytest.approx(((4.3 - 1.0) + (4.5 - 1.0)) / 2)
    cp = row(known, frame, "cp")
    assert (cp["mean"], cp.difference) == pytest.approx((4.4, -0.1))
    assert {words[3] for words in play.commands if words[0] == "evaluate"} == {"test"}


@pytest.mark.parametrize(("validations", "best"), [
    ({A: [4.0, 5.0], B: [4.4, 4.4]}, B),  # by the mean over the seeds that choose
    ({A: [4.4, 4.4], B: [4.4, 4.4]}, A),  # the first of equal ones
    ({A: [None, 1.0], B: [9.0, 9.0]}, B),  # one that diverged is worse than any
])  # fmt: skip
def test_a_grid_s_best_point_alone_is_trained_with_later_seeds(
    study: Any, validations: dict[str, list[float | None]], best: str
) -> None:
    known = study(seeds=[1, 2, 3], grid_seeds=2, variants={"dense": None}, grid=GRID)
    losses: Scores = {
        ("dense", p, s + 1): each[s] for p, each in validations.items() for s in (0, 1)
    }
    play = Played(losses | {("dense", best, 3): 4.0})
    lines: list[str] = []
    frame = finish_runs(known, play, lines.append)
    swept = [f"dense/{point}/seed-{seed}" for seed in (1, 2) for point in (A, B)]
    assert play.trained == [*swept, f"dense/{best}/seed-3"]
    assert progress(known, frame) == (5, 5)
    assert row(known, frame, "dense").runs == 3
    assert "run 5 of 5: dense at" in lines[-1]
    text = result_text(known, frame)
    assert ("diverged: dense at learning_rate=0.01, seed 1" in text) == (None in validations[A])


def test_of_a_grid_that_is_not_finished_nothing_is_compared(study: Any, monkeypatch: Any) -> None:
    one = {"seeds": [1], "variants": {"dense": None}, "grid": GRID}
    known, losses = study(**one), {("dense", A, 1): 4.0, ("dense", B, 1): 5.0}
    monkeypatch.setattr(known.task, "higher_is_better", True)  # then the highest point is best
    assert finished(known, losses).compared.tolist() == [False, True]
    known.runs[0].file.unlink()
    frame = results_of(known)
    assert not frame.compared.any()
    assert compare(known, frame).empty
    assert result_text(known, frame) == "no variant can be compared yet"
    other = study(folder=f"{known.config.folder}-2", **one)
    with pytest.raises(RunError, match="dense: no point has a finite validation score"):
        finished(other, dict.fromkeys(losses))


def test_a_finished_run_is_not_started_again(study: Any) -> None:
    finished(study(), LOSSES)
    more = study(seeds=[1, 2, 3, 4])
    play = Played(LOSSES | {("dense", 4): 5.0, ("cp", 4): 5.1})
    finish_runs(more, play, lambda line: None)
    assert play.trained == ["dense/seed-4", "cp/seed-4"]
    results = json.loads(Path(more.config.folder, "results.json").read_text())
    assert results == json.loads(json.dumps(to_json(more, results_of(more))))
    assert len(results["runs"]) == 8


def test_a_run_s_seed_stands_in_its_values_and_the_best_checkpoint_is_scored(study: Any) -> None:
    start = {"checkpoint.init_from": "runs/x/runs/dense/seed-{seed}"}
    known = study(variants={"dense": {"checkpoint.keep_best": True}, "cp": start}, seeds=[7])
    finish_runs(known, play := Played({("dense", 7): 5.0, ("cp", 7): 4.0}), lambda line: None)
    dense, of_dense, cp, of_cp = play.commands
    assert ("--best" in of_dense, "--best" in of_cp) == (True, False)
    assert "seed=7" in dense
    assert 'checkpoint.init_from="runs/x/runs/dense/seed-7"' in cp


def test_a_run_that_fails_ends_the_study_with_a_line(study: Any) -> None:
    def ended(error: Any, status: int) -> Any:
        with pytest.raises(error) as caught:
            finish_runs(study(), Played(LOSSES, status=status), lambda line: None)
        return caught.value

    said = "dense, seed 1: `polyad train` ended with status 137"
    assert said in str(ended(RunError, 137))
    assert ended(Stopped, 143).exit_status == 143
    ended(KeyboardInterrupt, 130)
    assert "1 to continue, 5 to start" in plan_text(study(), results_of(study()))


def test_a_run_that_another_start_has_begun_is_left_to_it(study: Any) -> None:
    known, play, message = study(), Played(LOSSES), list[str]()
    folder = known.runs[0].folder
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        finish_runs(known, play, message.append)
    assert len(play.trained) == 5
    assert "dense, seed 1: is left to another start of this study, which has begun it" in message
    finish_runs(known, play, message.append)
    assert play.trained[-1] == "dense/seed-1"


def test_what_changes_results_may_not_change(study: Any) -> None:
    finished(study(seeds=[1]), LOSSES)
    results_of(study(common={"log.every": 3, "checkpoint.every": 1}))
    for change, line in (
        ({"variants": {"dense": None, "cp": {LR: 0.03}}}, f"cp: {LR}: 0.02 there, 0.03 here"),
        ({"split": "test"}, "variants.dense: split: 'validation' there, 'test' here"),
    ):
        with pytest.raises(ConfigError, match=line):
            results_of(study(**change))
    file = study().runs[0].file
    for content, line in (
        (
            json.dumps(json.loads(file.read_text()) | {"data": "another"}),
            "dense, seed 2: has other",
        ),
        ("[]", r"seed-1\.json: was not written by a study"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=line):
            finished(study(), LOSSES)


GOOD = {"loss": 1.0, "grad_norm": 1.0, "skipped": False}
BAD = {"loss": None, "grad_norm": 1.0, "skipped": True}


@pytest.mark.parametrize(("records", "diverged"), [
    ([GOOD, BAD, BAD], True),
    ([BAD, BAD, GOOD], False),
    ([BAD], False),
    ([GOOD, GOOD | {"validation_loss": None}], True),
    ([GOOD | {"validation_loss": None}, GOOD], False),
])  # fmt: skip
def test_a_run_has_diverged_by_its_last_steps_or_its_last_validation(
    study: Any, records: list[dict[str, Any]], diverged: bool
) -> None:
    known = study(common={"train.max_skipped_steps": 2})
    known.runs[0].folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, **each}) for step, each in enumerate(records, start=1)]
    (known.runs[0].folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    assert _has_diverged(known, known.runs[0]) == diverged


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seeds": []}, "seeds"),
    ({"seeds": [1, 1]}, "seeds: one appears twice"),
    ({"baseline": "d"}, "baseline: 'd' is not a variant; variants: dense, cp"),
    ({"variants": {}}, "baseline: 'dense' is not a variant; variants: none"),
    *(({"variants": variants}, line) for variants, line in (
        ({"dense": None, "../x": None}, "'../x' is not allowed"),
        ({"dense": {"train.steps": 7}, "cp": None}, "cp: train.steps: 6 differs"),
        ({"dense": {"data.path": "x"}, "cp": None}, "variants.cp: data.path"),
        ({"dense": {"seed": 3}}, "variants.dense: seed: is not allowed"),
        ({"dense": {"model.num_heads": 5}}, "variants.dense: "),
        ({"dense": {"a b": 5}}, "variants.dense: 'a b' is not a dotted key"),
    )),
    ({"common": {"run.folder": "x"}}, "common: run.folder: is not allowed"),
    ({"common": {"optimizer.kind": "sgd?"}}, "common: "),
    ({"tasks": {"a": {}, "b": {"data.kind": "images"}}}, "data.kind: images and text differ"),
    ({"grid": {LR: []}}, f"grid.{LR}"),
    ({"grid": {LR: [0.1]}}, f"variants.cp: {LR}: is not allowed, because a grid sets it too"),
    ({"grid": {"train.ema": [0.9, 0.9]}}, "grid: ema=0.9 is given twice"),
    ({"grids": {"d": {}}}, "grids: 'd' is not a variant"),
    ({"grid_seeds": 4}, "grid_seeds: 4: there are 3 seeds"),
    ({"base": "none.yaml"}, "base: none.yaml: there is no such file"),
    ({"split": "train"}, "split"),
    *(({key.removeprefix("study."): None}, f"{key.removeprefix('study.')}: went with {what}")
      for key, what in GONE.items() if key.startswith("study.")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line"), WRONG)
def test_a_study_that_is_wrong_is_one_line(study: Any, change: dict[str, Any], line: str) -> None:
    assert line in line_of(ConfigError, study, **change)


def test_the_command_refuses_with_one_line(study: Any, tmp_path: Path, refused: Any) -> None:
    study()
    words = ("study", tmp_path / "study.yaml")
    assert ".pdf or .svg or .png is needed" in refused(*words, "--figure", "f.txt")
    (tmp_path / "base.yaml").unlink()
    assert "base: " in refused(*words)


@pytest.mark.slow
def test_a_figure_is_drawn_in_each_format(study: Any, tmp_path: Path) -> None:
    known = study(tasks={"a": {}, "b": {}})
    frame = finished(known, LOSSES)
    for name, begins in (("f.pdf", b"%PDF"), ("f.svg", b"<?xml"), ("f.png", b"\x89PNG")):
        draw(known, frame, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    draw(known, results_of(study(folder=str(tmp_path / "empty"))), tmp_path / "empty.svg")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_study_that_is_stopped_goes_on_where_it_was(
    study: Any, tmp_path: Path, number: signal.Signals
) -> None:
    common = {"train.steps": 40, "checkpoint.every": 0, "evaluation.every": 0}
    known = study(common=common | {"log.trackers": []}, seeds=[1])
    words = [sys.executable, "-m", "polyad.launch", "study", str(tmp_path / "study.yaml")]
    first = known.runs[0].folder
    process = start(words, start_new_session=True)
    wait_for(lambda: steps(first), process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, ""), err
    assert "Traceback" not in err
    assert "dense, seed 1: run the same command again to continue this run" in err
    assert not psutil.wait_procs(family, timeout=20)[1]  # nothing is alive
    stopped = steps(first)[-1]
    assert stopped < 40
    process = start([*words, "--json", "-", "--figure", str(tmp_path / "f.svg")])
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "0 finished, 1 to continue, 1 to start" in err
    assert f"continues from step {stopped} of 40" in err
    assert steps(first) == list(range(1, 41))
    result = json.loads(out)
    runs = [(each["variant"], each["step"]) for each in result["runs"]]
    assert runs == [("dense", 40), ("cp", 40)]
    one, other = (each["loss"] for each in result["runs"])
    (cp,) = (e for e in result["comparison"] if (e["variant"], e["measure"]) == ("cp", "loss"))
    assert cp["difference"] == pytest.approx(other - one)
    # The end of training scored the same split.
    last = json.loads((first / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["runs"][0]["validation"] == last["validation_loss"]
