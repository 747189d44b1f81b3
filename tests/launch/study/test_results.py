"""What results of runs come to, and how it is shown; the numbers by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from polyad.launch.study.result import (
    Attack,
    MeasuresTaken,
    RunResult,
    Score,
    StudyPlan,
    StudyResult,
    VariantSize,
)
from polyad.launch.study.results import LEAST, curve, rank_correlation, relations, summarize
from polyad.launch.study.tables import result_table
from polyad.train.errors import RunError
from polyad.train.tasks.language import LanguageModelling

TEST = {"split": "test"}


def result(variant: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    """What a finished run leaves."""
    values = {"perplexity": 2.0, "bits_per_byte": 1.0, "tokens_scored": 50, "training_loss": 1.0}
    return {
        **{"variant": variant, "point": "", "seed": seed, "loss": loss, "tokens_per_second": 10.0},
        **{"routing": {}, "seconds": 1.0, "step": 4, "validation": 2.0, **values, **more},
    }


def finished(variant: str, seed: int, loss: float, **more: Any) -> RunResult:
    """What a finished run came to."""
    tree, scores = result(variant, seed, loss, **more), LanguageModelling.scores
    return RunResult.from_json(tree, "token", [score.name for score in scores])


def summarized(
    plan_of_study: StudyPlan, runs: Sequence[dict[str, Any]], chosen: dict[str, str] | None = None
) -> StudyResult:
    """What `summarize` makes of runs as their files have them."""
    scores = [score.name for score in plan_of_study.scores]
    results = [RunResult.from_json(run, plan_of_study.unit, scores) for run in runs]
    return summarize(plan_of_study, results, chosen)


SIZE = VariantSize(parameters=1000, active_parameters=900, flops=6000)


def plan(*names: str, seeds: tuple[int, ...] = (1, 2, 3)) -> StudyPlan:
    """The plan of a study of these variants."""
    return StudyPlan(
        study="s.yaml",
        folder="s",
        baseline=names[0],
        unit="token",
        scores=[Score(**score._asdict()) for score in LanguageModelling.scores],
        validation_score=LanguageModelling.validation_score,
        higher_is_better=LanguageModelling.higher_is_better,
        seeds=list(seeds),
        swept_seeds=list(seeds),
        groups={name: [name] for name in names},
        from_runs={},
        variants=dict.fromkeys(names, SIZE),
        num_runs=len(names) * len(seeds),
        runs=[],
        measures=MeasuresTaken(wanted=0, taken=0),
    )


# Differences -0.21, -0.19 and -0.20, as in test_paired.py: +- 0.0248. Losses of one
# variant have mean 5 and deviation 1.
RUNS = [
    *(result("dense", 1, 4.0), result("cp", 1, 3.79, routing={"unused": 0.5})),
    *(result("dense", 2, 5.0), result("cp", 2, 4.81, routing={"unused": 0.7})),
    *(result("dense", 3, 6.0), result("cp", 3, 5.80, routing={"unused": 0.6})),
]


def test_differences_are_of_pairs_and_spread_is_theirs() -> None:
    found = summarized(plan("dense", "cp"), RUNS).to_json()
    assert found["finished"]
    dense, cp = found["variants"]["dense"], found["variants"]["cp"]
    assert dense["loss"] == {"mean": 5.0, "deviation": 1.0, "runs": 3}
    assert dense["difference"] is None
    assert cp["difference"]["differences"] == pytest.approx([-0.21, -0.19, -0.20])
    assert cp["difference"]["deviation"] == pytest.approx(0.01)
    assert cp["difference"]["excludes_zero"]
    assert cp["routing"]["unused"]["mean"] == pytest.approx(0.6)


def test_pairs_are_matched_by_seed_and_not_by_place() -> None:
    shuffled = [RUNS[4], RUNS[1], RUNS[2], RUNS[5], RUNS[0], RUNS[3]]
    one, other = (summarized(plan("dense", "cp"), runs).to_json() for runs in (RUNS, shuffled))
    wanted = one["variants"]["cp"]["difference"]
    found = other["variants"]["cp"]["difference"]
    assert found["mean"] == pytest.approx(wanted["mean"])
    assert found["deviation"] == pytest.approx(wanted["deviation"])


def test_a_seed_that_only_one_has_finished_is_no_pair() -> None:
    found = summarized(plan("dense", "cp"), RUNS[:5]).to_json()
    assert not found["finished"]
    assert found["variants"]["dense"]["seeds"] == [1, 2, 3]
    assert found["variants"]["cp"]["difference"]["seeds"] == [1, 2]
    alone = summarized(plan("dense", "cp"), RUNS[:1])
    assert list(alone.variants) == ["dense"]


def test_runs_scored_on_different_tokens_are_not_compared() -> None:
    with pytest.raises(RunError, match=r"\[50, 51\]"):
        summarized(plan("dense", "cp"), [RUNS[0], RUNS[1] | {"tokens_scored": 51}])


def test_the_table_is_aligned_and_marks_what_leaves_zero_out() -> None:
    found = summarized(plan("dense", "cp"), RUNS).model_copy(update=TEST)
    table = result_table(found)
    head, dense, cp, *rest = table.splitlines()
    assert len(head) == len(cp)
    assert dense.split() == ["dense", "5.0000", "±", "1.0000", "2.00", "±", "0.00"]
    assert "-0.2000 ± 0.0100" in cp
    assert "-0.2248 to -0.1752 *" in cp
    assert cp.endswith("    3")
    assert "over 3 seeds; loss in nats per token on the 50 tokens of the test split" in table
    assert "cp       0.600 ± 0.100" in rest


def test_markdown_has_as_many_columns_in_every_row() -> None:
    found = summarized(plan("dense", "cp"), RUNS).model_copy(update=TEST)
    losses = result_table(found, markdown=True).split("\n\n")[0].splitlines()
    assert [line.count("|") for line in losses] == [7, 7, 7, 7]
    assert losses[1] == "|---|---:|---:|---:|---:|---:|"


def leak(reported: float, masked: float, prefix: float) -> dict[str, Any]:
    """What `polyad evaluate --leak` leaves of one step."""
    return {
        **{"loss": reported, "masked_loss": masked, "prefix_difference": prefix - reported},
        **{"prefix_tokens": 100, "prefix_standard_error": 0.003},
    }


# As RUNS, with measures: attacked losses 1 more, and of cp another 0.1, 0.2 and 0.3 more; leaks.
MEASURED = [
    *(
        result(
            *("plain", seed, 4.0 + seed),
            step=8,
            attack={"loss": 5.0 + seed, "perplexity": 9.0},
            routing={"entropy": 0.5},
            fluctuation={"top1": 0.2, "set": 0.3, "steps": 4},
        )
        for seed in (1, 2, 3)
    ),
    *(
        result(
            *("leaky", seed, 3.9 + seed),
            step=8,
            attack={"loss": 5.0 + seed + seed / 10, "perplexity": 8.0 + seed},
            routing={"entropy": 0.4 + seed / 10, "effective_neighbours": 7.0},
            head_changes=2.0 + seed,
            fluctuation={"top1": 0.2, "set": 0.4, "steps": 4},
            leak={
                "4": leak(4.0 + seed, 4.0 + seed, 4.0 + seed),
                "8": leak(3.9 + seed, 4.0 + seed + seed / 100, 4.1 + seed),
            },
        )
        for seed in (1, 2, 3)
    ),
]
SUMMARY = summarized(plan("plain", "leaky"), MEASURED).model_copy(
    update={"split": "validation", "attack": Attack(rate=0.1, seed=0)}
)


def test_every_measure_is_compared_in_pairs() -> None:
    plain, leaky = (SUMMARY.to_json()["variants"][name] for name in ("plain", "leaky"))
    assert plain["differences"] == {}
    beside = leaky["differences"]
    assert beside["loss"]["differences"] == pytest.approx([-0.1] * 3)
    assert beside["loss"] == leaky["difference"]
    assert beside["attacked_loss"]["differences"] == pytest.approx([0.1, 0.2, 0.3])
    assert not beside["attacked_loss"]["excludes_zero"]  # 0.2 +- 4.30 x 0.1 / sqrt 3 = 0.25
    assert beside["entropy"]["mean"] == pytest.approx(0.1)
    assert beside["changed_set"]["mean"] == pytest.approx(0.1)
    assert "effective_neighbours" not in beside  # plain has none
    assert leaky["measures"]["effective_neighbours"]["mean"] == 7.0
    assert leaky["measures"]["head_changes"]["mean"] == 4.0
    assert "head_changes" not in plain["measures"]
    assert leaky["measures"]["attacked_perplexity"]["mean"] == 10.0


def test_a_leak_is_what_a_loss_gains_by_it_and_hides_beside_the_baseline() -> None:
    variants = SUMMARY.to_json()["variants"]
    leaks = variants["leaky"]["leak"]
    assert variants["plain"]["leak"] == {}
    assert list(leaks) == ["4", "8"]
    last = leaks["8"]
    assert last["masked_leak"]["differences"] == pytest.approx([0.11, 0.12, 0.13])
    assert last["prefix_leak"]["differences"] == pytest.approx([0.2, 0.2, 0.2])
    assert last["prefix"]["mean"] == pytest.approx(6.1)
    assert last["prefix_standard_error"] == pytest.approx(0.003)
    # As reported 0.1 better than plain; without what leaks, worse.
    assert last["masked_beside_baseline"]["differences"] == pytest.approx([0.01, 0.02, 0.03])
    assert last["prefix_beside_baseline"]["mean"] == pytest.approx(0.1)
    assert leaks["4"]["prefix_beside_baseline"] is None  # plain was not scored there


def test_tables_have_what_was_measured() -> None:
    found = result_table(SUMMARY).split("\n\n")
    order = ("variant", "attacked", "variant", "routing", "routing", "leak", "without")
    order += ("leaky,", "mean")
    assert tuple(part.split()[0] for part in found) == order
    parts = {part.split()[0]: part for part in found}
    assert "+0.2000 ± 0.1000  -0.0484 to +0.4484" in parts["attacked"]
    step_8 = parts["leak"].splitlines()[2]
    assert step_8.startswith("leaky     8  5.9000 ± 1.0000")
    assert "+0.1200 ± 0.0100 *" in step_8
    row = parts["without"].splitlines()[1]
    assert row.split("  ")[0] == "leaky"
    assert "+0.0200 ± 0.0100" in row
    assert "-0.1000 ± 0.0000" in row
    notes = parts["mean"]
    assert "at a rate of 0.1 (seed 0)" in notes
    assert "than 4 steps before the end" in notes
    assert "a sample of 100 tokens per run, with a standard error of at most 0.0030" in notes
    markdown = result_table(SUMMARY, markdown=True)
    for part in markdown.split("\n\n")[:-2]:
        assert len({line.count("|") for line in part.splitlines()}) == 1


def test_beside_a_leaking_baseline_both_are_without_what_leaks() -> None:
    """With the mask both have the same loss: the leak of neither counts as a gain."""
    names = ("leaky", "other", "unmeasured")
    runs = [
        result(name, seed, reported + seed, step=8, leaks=True)
        | ({} if name == "unmeasured" else {"leak": {"8": leak(reported + seed, 5.0, 5.5)}})
        for seed in (1, 2, 3)
        for name, reported in (("leaky", 3.0), ("other", 2.0), ("unmeasured", 1.0))
    ]
    found = summarized(plan(*names), runs).to_json()["variants"]["other"]["leak"]["8"]
    assert found["masked_beside_baseline"]["differences"] == [0.0] * 3
    assert found["prefix_beside_baseline"]["differences"] == [0.0] * 3
    turned = summarized(plan("unmeasured", "leaky"), runs).variants["leaky"].leak["8"]
    assert turned.masked_beside_baseline is None


def test_a_score_that_is_not_finite_is_an_empty_cell_and_no_difference() -> None:
    runs = [each | {"perplexity": None, "training_loss": None} for each in RUNS]
    runs[0] = runs[0] | {"routing": {"unused": None}}
    found = summarized(plan("dense", "cp"), runs).model_copy(update=TEST)
    difference = found.variants["cp"].difference
    assert difference is not None
    assert difference.pairs == 3
    lines = result_table(found).splitlines()
    cells = next(line.split() for line in lines if line.startswith("dense"))
    assert cells == ["dense", "5.0000", "±", "1.0000"]
    assert "nan" not in result_table(found).lower()


def runs_of(**scores: list[float | None]) -> dict[int, RunResult]:
    """By seed, as `s1=[...]`: the scores of steps 1, 2, ..., of 10 tokens each; None: none."""
    found = {}
    for name, of_seed in scores.items():
        validations = [
            {"step": step, "tokens": 10 * step, "score": score}
            for step, score in enumerate(of_seed, start=1)
            if score is not None
        ]
        found[int(name[1:])] = finished("dense", int(name[1:]), 4.0, validations=validations)
    return found


def test_differences_are_of_pairs_at_steps_that_both_have() -> None:
    runs = runs_of(s1=[5.0, 4.0, 3.0], s2=[5.2, None, 3.4], s3=[9.0, 9.0, 9.0])
    baseline = runs_of(s1=[4.0, 3.5, None], s2=[4.4, 3.0, 3.0], s4=[1.0, 1.0, 1.0])
    first, second, third = [each.model_dump() for each in curve(runs, baseline)]
    assert [each["step"] for each in (first, second, third)] == [1, 2, 3]
    assert [each["seen"] for each in (first, second, third)] == [10, 20, 30]
    assert first["score"] == {"mean": 5.1, "deviation": pytest.approx(0.02**0.5), "runs": 2}
    # 1.0 and 0.8: their mean is 0.9, its half interval t(1) x 0.1414 / sqrt 2 = 12.706 x 0.1.
    assert first["difference"]["differences"] == pytest.approx([1.0, 0.8])
    assert first["difference"]["low"] == pytest.approx(0.9 - 1.2706, abs=1e-4)
    assert not first["difference"]["excludes_zero"]
    assert (second["difference"]["seeds"], second["difference"]["mean"]) == ([1], 0.5)
    assert (third["difference"]["seeds"], third["difference"]["pairs"]) == ([2], 1)
    of_baseline = [each.model_dump() for each in curve(baseline, None)]
    assert [each["score"]["runs"] for each in of_baseline] == [3, 3, 2]
    assert [each["difference"] for each in of_baseline] == [None] * 3


def test_runs_that_were_validated_once_have_no_curve() -> None:
    once = runs_of(s1=[None, None, 3.0])
    assert curve(once, None) == []
    assert curve(once, runs_of(s1=[4.0, 3.5, 3.0])) == []
    never = {1: finished("dense", 1, 4.0)}
    assert curve(never, never) == []


def with_entropy(*runs: tuple[int, list[tuple[float, float]]]) -> dict[int, dict[str, Any]]:
    """By seed and variant loss and entropy, of pairs of them for each seed."""
    return {
        seed: {f"v{i}": {"loss": loss, "entropy": x} for i, (loss, x) in enumerate(pairs)}
        for seed, pairs in runs
    }


def test_rank_correlations_by_hand() -> None:
    # One pair of five is swapped: 1 - 6 x 2 / (5 x 24).
    assert rank_correlation([1, 2, 3, 4, 5], [10, 30, 20, 40, 50]) == pytest.approx(0.9)
    assert rank_correlation([1, 2, 3], [3.0, 2.0, -7.0]) == pytest.approx(-1)
    # Two equal ones share the rank 1.5: Pearson's of (1.5, 1.5, 3) and (1, 2, 3).
    assert rank_correlation([4, 4, 9], [1, 2, 3]) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)


def test_correlations_are_within_seeds_and_their_interval_is_over_seeds() -> None:
    # A seed that is worse as a whole, with more of the measure, must not count.
    falling = [(5.0 - 0.1 * i, float(i)) for i in range(5)]
    worse = [(9.0 - 0.1 * i, 100.0 + i) for i in range(5)]
    swapped = [(5.0 - 0.1 * (0, 2, 1, 3, 4)[i], float(i)) for i in range(5)]
    found = relations(with_entropy((1, falling), (2, worse), (3, swapped)), "loss")["entropy"]
    assert found.values == pytest.approx([-1, -1, -0.9])
    assert found.seeds == [1, 2, 3]
    assert found.mean == pytest.approx(-2.9 / 3)
    half = 4.30265 * 0.0577350 / 3**0.5  # t of two degrees of freedom
    assert (found.low, found.high) == pytest.approx((-1, -2.9 / 3 + half))  # cut at -1
    assert found.excludes_zero


def test_nothing_is_said_of_few_variants_of_one_number_and_of_half_a_seed() -> None:
    falling = [(5.0 - 0.1 * i, float(i)) for i in range(LEAST)]
    few = with_entropy((1, falling[1:]))
    few[1]["dense"] = {"loss": 4.0}
    assert relations(few, "loss") == {}
    assert relations(with_entropy((1, [(loss, 0.0) for loss, _ in falling])), "loss") == {}
    found = relations(with_entropy((1, falling), (2, falling[:1])), "loss")
    assert found["entropy"].seeds == [1]
    assert not found["entropy"].excludes_zero
