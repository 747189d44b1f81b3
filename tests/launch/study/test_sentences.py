"""What is said of a study: better, worse or neither by the intervals, and no word without one."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from polyad.launch.study.result import About, StudyResult
from polyad.launch.study.results import over_tasks
from polyad.launch.study.sentences import amount, answers
from polyad.launch.study.tables import MOST_STEPS, result_table
from tests.launch.study.test_results import RUNS, SUMMARY, TEST, plan, result, summarized

END = 100 * 2**20
STEPS = range(1, 9)
Runs = dict[int, dict[str, Any]]


def lines(ends: list[float], slopes: list[float]) -> tuple[Runs, Runs]:
    """Runs whose differences to the baseline lie on these lines over ln(tokens), and the baseline;
    eight validations, evenly over `END` tokens."""
    runs: Runs = {}
    baseline: Runs = {}
    for seed, (height, slope) in enumerate(zip(ends, slopes, strict=True), start=1):
        ours, theirs = [], []
        for step in STEPS:
            tokens = END * step // STEPS[-1]
            score = 5 - math.log(step)
            d = height + slope * math.log(tokens / END)
            ours.append({"step": step, "tokens": tokens, "score": score + d})
            theirs.append({"step": step, "tokens": tokens, "score": score})
        runs[seed], baseline[seed] = {"validations": ours}, {"validations": theirs}
    return runs, baseline


def compared(differences: Sequence[float], **more: Any) -> StudyResult:
    """A study of cp beside dense with these differences, one a seed."""
    runs = [result("dense", seed, 4.0 + seed) for seed in range(1, len(differences) + 1)]
    runs += [
        result("cp", seed, 4.0 + seed + difference)
        for seed, difference in enumerate(differences, start=1)
    ]
    return summarized(plan("dense", "cp").model_copy(update=more), runs).model_copy(update=TEST)


WORSE = (
    "cp is worse than dense: loss {}0.2000 nats per token, 95% interval {}0.{} to {}0.{}, 3 pairs"
)


def test_a_difference_whose_interval_leaves_zero_out_is_better_or_worse() -> None:
    # +- 0.0248, as in test_results.py.
    worse = WORSE.format("+", "+", "1752", "+", "2248")
    assert answers(compared([0.21, 0.19, 0.20])) == [worse]
    better = WORSE.replace("worse", "better").format("-", "-", "2248", "-", "1752")
    assert answers(compared([-0.21, -0.19, -0.20])) == [better]
    # Of an accuracy, more is better: the same numbers, the other word.
    higher = {"higher_is_better": True}
    assert answers(compared([0.21, 0.19, 0.20], **higher)) == [worse.replace("worse", "better")]
    assert answers(compared([-0.21, -0.19, -0.20], **higher)) == [better.replace("better", "worse")]


def test_an_interval_with_zero_inside_shows_no_difference() -> None:
    [said] = answers(compared([0.3, -0.1, 0.1]))
    # 0.1 +- 4.303 x 0.2 / sqrt 3
    assert said == (
        "no significant difference between cp and dense: loss +0.1000 nats per token, 95% interval "
        "-0.3968 to +0.5968, 3 pairs"
    )
    [said] = answers(compared([0.0, 0.0]))
    assert said.startswith("no significant difference between cp and dense")


def test_one_pair_and_none_have_no_interval_and_no_claim() -> None:
    [said] = answers(compared([0.2]))
    assert said == (
        "cp compared with dense: one pair of runs, so there is no interval: loss +0.2000 nats per "
        "token"
    )
    alone = summarized(plan("dense", "cp"), [RUNS[0], RUNS[3]])
    assert answers(alone) == ["cp: not yet compared with dense, no pair of runs is finished"]
    assert answers(summarized(plan("dense"), RUNS[:1])) == []


def test_a_variant_whose_tokens_see_later_ones_is_not_judged_by_that_alone() -> None:
    reported, masked, prefix = answers(SUMMARY)
    assert reported.startswith("leaky, in which tokens see later tokens, is better than plain: ")
    # 0.02 +- 4.303 x 0.01 / sqrt 3, and 0.1 without spread.
    assert masked.startswith("no significant difference between leaky with the mask and plain: ")
    assert "-0.0048 to +0.0448" in masked
    assert prefix.startswith("leaky from the prefix is worse than plain: ")
    about = {"about": About(leaking=["cp"])}
    known = compared([-0.21, -0.19, -0.20]).model_copy(update=about)
    assert answers(known)[0].startswith(
        "cp, in which tokens see later tokens, is better than dense"
    )


def test_tasks_are_answered_by_their_mean() -> None:
    one, other = compared([0.1, 0.2, 0.3]), compared([0.3, 0.2, 0.1])
    found = over_tasks({"one": one, "other": other}, ["one", "other"])
    assert answers(found)[0].startswith(
        "cp is worse than dense: mean loss over tasks +0.2000 nats per token, 95% interval +0.2000"
    )
    table = result_table(found)
    assert answers(found)[0] in table.splitlines()


def fitted(ends: list[float], slopes: list[float]) -> StudyResult:
    """A study of three seeds with these lines."""
    of_cp, of_dense = lines(ends, slopes)
    runs = [
        result(name, seed, 4.0) | of[seed]
        for name, of in (("dense", of_dense), ("cp", of_cp))
        for seed in of
    ]
    return summarized(plan("dense", "cp"), runs).model_copy(update=TEST)


def test_tables_have_the_course_of_differences() -> None:
    found = fitted([0.02] * 3, [-0.01] * 3)
    parts = {part.split("  ")[0]: part for part in result_table(found).split("\n\n")}
    head, dense, cp = parts["after tokens"].splitlines()
    assert head.split()[2:] == [
        "13.1M",
        "26.2M",
        "39.3M",
        "52.4M",
        "65.5M",
        "78.6M",
        "91.8M",
        "105M",
    ]
    assert dense.split()[1] == "5.0000"
    # 0.02 + 0.01 ln 8 at the first of eight.
    assert cp.split()[:4] == ["cp", "-", "dense", "+0.0408"]
    assert "after tokens" not in result_table(SUMMARY)


def test_a_table_has_few_of_many_steps_spread_evenly() -> None:
    runs = [
        result(name, 1, 4.0)
        | {
            "validations": [
                {"step": step, "tokens": 1000 * step, "score": 5.0} for step in range(1, 101)
            ]
        }
        for name in ("dense", "cp")
    ]
    found = summarized(plan("dense", "cp"), runs).model_copy(update=TEST)
    head, *_ = (
        line for line in result_table(found).splitlines() if line.startswith("after tokens ")
    )
    shown = head.split()[2:]
    assert len(shown) == MOST_STEPS
    assert (shown[0], shown[-1]) == ("1,000", "100k")
    numbers = [float(each.replace("k", "000").replace(",", "")) for each in shown]
    gaps = [b - a for a, b in pairwise(numbers)]
    assert max(gaps) <= min(gaps) + 1000


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((7, "7"), (9999, "9,999"), (10_000, "10k"), (409_600, "410k"), (999_999, "1M")),
        *((2_621_440, "2.62M"), (1.5e9, "1.5B"), (3e14, "300T"), (2e15, "more than 1e15")),
    ],
)
def test_amounts_are_short(value: float, said: str) -> None:
    assert amount(value) == said
