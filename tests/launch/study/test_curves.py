"""Validation over training: differences at each step, by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.study.curves import curve
from polyad.train.records import read_records, validations

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


def test_validations_are_the_records_with_a_finite_score(tmp_path: Path) -> None:
    records = [
        {"step": 1, "tokens": 8, "loss": 3.0},
        {"step": 2, "tokens": 16, "loss": 2.0, "validation_loss": 2.5},
        {"step": 3, "tokens": 24, "loss": 2.0, "validation_loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = validations(read_records(tmp_path), "validation_loss", "tokens")
    assert found == [{"step": 2, "tokens": 16, "score": 2.5}]
