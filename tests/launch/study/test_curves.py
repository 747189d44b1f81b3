"""Validation over training: differences at each step, and lines through them; by other means."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from polyad.launch.records import validations
from polyad.launch.study.curves import closing, curve
from polyad.train.records import read_records

END = 100 * 2**20
STEPS = range(1, 9)
Runs = dict[int, dict[str, Any]]


def runs_of(**scores: list[float | None]) -> Runs:
    """By seed, as `s1=[...]`: the scores of steps 1, 2, ..., of 10 tokens each; None: none."""
    return {
        int(name[1:]): {
            "validations": [
                {"step": step, "tokens": 10 * step, "score": score}
                for step, score in enumerate(found, start=1)
                if score is not None
            ]
        }
        for name, found in scores.items()
    }


def lines(ends: list[float], slopes: list[float], noise: float = 0.0) -> tuple[Runs, Runs]:
    """Runs whose differences to the baseline lie on these lines over ln(tokens), but for noise, and
    the baseline; eight validations, evenly over `END` tokens."""
    generator = np.random.default_rng(3)
    runs: Runs = {}
    baseline: Runs = {}
    for seed, (height, slope) in enumerate(zip(ends, slopes, strict=True), start=1):
        ours, theirs = [], []
        for step in STEPS:
            tokens = END * step // STEPS[-1]
            score = 5 - math.log(step)
            d = height + slope * math.log(tokens / END) + noise * generator.standard_normal()
            ours.append({"step": step, "tokens": tokens, "score": score + d})
            theirs.append({"step": step, "tokens": tokens, "score": score})
        runs[seed], baseline[seed] = {"validations": ours}, {"validations": theirs}
    return runs, baseline


def test_differences_are_of_pairs_at_steps_that_both_have() -> None:
    runs = runs_of(s1=[5.0, 4.0, 3.0], s2=[5.2, None, 3.4], s3=[9.0, 9.0, 9.0])
    baseline = runs_of(s1=[4.0, 3.5, None], s2=[4.4, 3.0, 3.0], s4=[1.0, 1.0, 1.0])
    first, second, third = curve(runs, baseline, "tokens")
    assert [each["step"] for each in (first, second, third)] == [1, 2, 3]
    assert [each["tokens"] for each in (first, second, third)] == [10, 20, 30]
    assert first["score"] == {"mean": 5.1, "deviation": pytest.approx(0.02**0.5), "runs": 2}
    # 1.0 and 0.8: their mean is 0.9, its half interval t(1) x 0.1414 / sqrt 2 = 12.706 x 0.1.
    assert first["difference"]["differences"] == pytest.approx([1.0, 0.8])
    assert first["difference"]["low"] == pytest.approx(0.9 - 1.2706, abs=1e-4)
    assert not first["difference"]["excludes_zero"]
    assert (second["difference"]["seeds"], second["difference"]["mean"]) == ([1], 0.5)
    assert (third["difference"]["seeds"], third["difference"]["pairs"]) == ([2], 1)
    of_baseline = curve(baseline, None, "tokens")
    assert [each["score"]["runs"] for each in of_baseline] == [3, 3, 2]
    assert [each["difference"] for each in of_baseline] == [None] * 3


def test_runs_that_were_validated_once_have_no_curve() -> None:
    once = runs_of(s1=[None, None, 3.0])
    assert curve(once, None, "tokens") == []
    assert curve(once, runs_of(s1=[4.0, 3.5, 3.0]), "tokens") == []
    assert curve({1: {}}, {1: {}}, "tokens") == []
    assert closing(once, once, "tokens") is None


def test_lines_are_found_with_their_slopes_and_where_they_cross_zero() -> None:
    # 0.02 at the end, 0.01 less for each e-fold: zero after e^2 times the training.
    found = closing(*lines([0.02] * 3, [-0.01] * 3), "tokens")
    assert found is not None
    assert (found["seeds"], found["to_tokens"]) == ([1, 2, 3], END)
    assert found["from_tokens"] == END * 3 // 8  # a quarter is not after the first quarter
    assert found["slope"]["slopes"] == pytest.approx([-0.01] * 3)
    assert found["at_end"]["mean"] == pytest.approx(0.02)
    for name in ("units", "low", "high"):  # without spread there is no doubt
        assert found["crossing"][name] == pytest.approx(END * math.e**2)
    from_below = closing(*lines([-0.02] * 3, [0.01] * 3), "tokens")
    assert from_below is not None
    assert from_below["crossing"]["units"] == pytest.approx(END * math.e**2)


def test_slopes_and_intervals_are_those_of_other_libraries() -> None:
    ends, slopes = [0.040, 0.044, 0.038, 0.042], [-0.020, -0.024, -0.019, -0.021]
    runs, baseline = lines(ends, slopes, noise=1e-4)
    found = closing(runs, baseline, "tokens")
    assert found is not None
    fitted = []
    for seed in runs:
        pairs = zip(runs[seed]["validations"], baseline[seed]["validations"], strict=True)
        late = [(a["tokens"], a["score"] - b["score"]) for a, b in pairs if a["tokens"] > END / 4]
        x, y = np.log([tokens / END for tokens, _ in late]), [d for _, d in late]
        fitted.append(np.polyfit(x, y, 1))  # slope, height at the end
    slopes_S, heights_S = np.array(fitted).T
    assert found["slope"]["slopes"] == pytest.approx(slopes_S)
    for name, values in (("slope", slopes_S), ("at_end", heights_S)):
        low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        assert (found[name]["low"], found[name]["high"]) == pytest.approx((low, high))

    # The crossing's interval ends where the interval of the lines' heights begins to leave 0 out.
    def nearest_to_zero(x: float) -> float:
        low, high = stats.t.interval(
            0.95, 3, np.mean(heights_S + slopes_S * x), stats.sem(heights_S + slopes_S * x)
        )
        return float(low if np.mean(heights_S + slopes_S * x) > 0 else -high)

    middle = -np.mean(heights_S) / np.mean(slopes_S)
    first = optimize.brentq(nearest_to_zero, 0.0, middle - 1e-9)
    last = optimize.brentq(nearest_to_zero, middle + 1e-9, 20.0)
    wanted = (END * np.exp(x) for x in (middle, first, last))
    crossing = found["crossing"]
    assert (crossing["units"], crossing["low"], crossing["high"]) == pytest.approx(
        tuple(wanted), rel=1e-6
    )
    assert END < crossing["low"] < crossing["units"] < crossing["high"]


@pytest.mark.parametrize(
    ("ends", "slopes"),
    [
        ([0.02, 0.02, 0.02], [0.01, 0.01, 0.01]),  # it grows
        ([0.02, 0.02, 0.02], [-0.01, 0.01, -0.02]),  # seeds disagree on the slope
        ([0.02, -0.02, 0.01], [-0.01, -0.01, -0.01]),  # and on the side
    ],
)
def test_no_crossing_is_given_that_seeds_do_not_bear_out(
    ends: list[float], slopes: list[float]
) -> None:
    found = closing(*lines(ends, slopes), "tokens")
    assert found is not None
    assert found["crossing"] is None


def test_too_few_seeds_or_steps_are_not_fitted() -> None:
    runs, baseline = lines([0.02, 0.03], [-0.01, -0.01])
    assert closing(runs, baseline, "tokens") is not None
    assert closing({1: runs[1]}, baseline, "tokens") is None
    few = {seed: {"validations": run["validations"][:-2]} for seed, run in runs.items()}
    assert closing(few, baseline, "tokens") is not None  # 3, 4, 5 and 6 of 6
    fewer = {seed: {"validations": run["validations"][4:7]} for seed, run in runs.items()}
    assert closing(fewer, baseline, "tokens") is None


def test_a_crossing_too_far_for_a_number_is_infinite() -> None:
    found = closing(*lines([1.0, 1.0], [-0.001, -0.001]), "tokens")
    assert found is not None
    assert found["crossing"]["units"] == math.inf


def test_validations_are_the_records_with_a_finite_score(tmp_path: Path) -> None:
    records = [
        {"step": 1, "tokens": 8, "loss": 3.0},
        {"step": 2, "tokens": 16, "loss": 2.0, "validation_loss": 2.5},
        {"step": 3, "tokens": 24, "loss": 2.0, "validation_loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = validations(read_records(tmp_path), "validation_loss", "tokens")
    assert found == [{"step": 2, "tokens": 16, "score": 2.5}]
