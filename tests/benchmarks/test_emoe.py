"""`layer.py --kind emoe`: groups of units beside the dense MLP that they are."""

import json

import pytest

from tests.benchmarks.layer import layer
from tests.benchmarks.script import run

SMALL = ["--tokens", "24", "--experts", "8", "--top-k", "2", "--width", "16", "--hidden", "64"]


def bench(*options):
    return run(layer, ["--kind", "emoe", *SMALL, "--repeats", "1", *options])


def test_each_way_is_timed_beside_the_dense_layer(capfd):
    assert bench("--json", "-") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["kind"] == "emoe"
    for precision in ("fp32", "bf16"):
        rows = result["precisions"][precision]["variants"]
        assert list(rows) == ["dense", "masked", "grouped", "loop"]
        assert rows["dense"]["seconds_ratio"] == 1
        # 6 FLOPs a weight: both matrices; or a quarter of them, and the scores.
        assert rows["dense"]["flops_per_token"] == 6 * 2 * 16 * 64
        for way in ("masked", "grouped", "loop"):
            inner = 64 if way == "masked" else 16  # masked computes with all units
            assert rows[way]["flops_per_token"] == 6 * (2 * 16 * inner + 16 * 8)
            assert rows[way]["seconds_ratio"] > 0
    assert result["precisions"]["fp32"]["variants"]["masked"]["difference"] < 1e-5


def test_the_table_names_the_groups(capfd):
    assert bench("--precision", "fp32", "--threads", "1") == 0
    out = capfd.readouterr().out
    assert out.startswith("24 tokens, 16-64, 8 groups of units of which 2; ")
    assert "masked" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "7"], "--experts: 7 does not divide --hidden: 64"),
        (["--top-k", "9"], "--top-k: 9 is more than --experts: 8"),
        (["--experts", "1", "--top-k", "1"], "--experts: 1 is less than 2"),
        (["--experts", "2", "4"], "--experts: 2 4: --kind emoe takes one number"),
        (["--load", "uniform"], "--load: is of --kind smoe, this is emoe"),
    ],
)
def test_bad_shapes_are_one_line(options, message, capfd):
    assert bench(*options) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
