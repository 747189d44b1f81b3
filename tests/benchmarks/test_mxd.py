"""`layer.py --kind mxd`: both gates beside the dense MLP that an MxD contains."""

import json

from tests.benchmarks.layer import layer
from tests.benchmarks.script import run

SMALL = ["--tokens", "24", "--experts", "14", "--top-k", "2", "--width", "16", "--hidden", "64"]


def bench(*options):
    return run(layer, ["--kind", "mxd", *SMALL, "--repeats", "1", *options])


def test_each_gate_is_timed_beside_the_dense_layer(capfd):
    assert bench("--json", "-", "--precision", "bf16") == 0
    rows = json.loads(capfd.readouterr().out)["precisions"]["bf16"]["variants"]
    assert list(rows) == [
        "dense",
        *("mxd, scores 14", "transcoder, scores 14"),
        *("mxd, keys 4 x 4", "transcoder, keys 4 x 4"),
    ]
    dense = 2 * 16 * 64
    assert rows["dense"]["flops_per_token"] == 6 * dense
    for name, gate in (("scores 14", 14), ("keys 4 x 4", 8)):  # a row of the table is looked up
        assert rows[f"mxd, {name}"]["flops_per_token"] == 6 * (dense + 16 * gate)
        assert rows[f"transcoder, {name}"]["flops_per_token"] == 6 * 16 * gate
        assert rows[f"mxd, {name}"]["seconds_ratio"] > 0


def test_the_table_names_the_gates_and_bad_shapes_are_one_line(capfd):
    assert bench("--precision", "fp32", "--threads", "1") == 0
    assert "mxd, keys 4 x 4" in capfd.readouterr().out
    assert bench("--top-k", "15") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--top-k: 15 is more than --experts: 14" in line
