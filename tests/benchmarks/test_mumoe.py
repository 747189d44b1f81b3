"""`layer.py --kind mumoe` on tiny layers: peers do the same work, reported whole."""

import json

import pytest
import torch

from polyad.model.mumoe.layer import MuMoE
from polyad.train.errors import RunError
from tests.benchmarks import mumoe, mumoe_peers
from tests.benchmarks.layer import layer
from tests.benchmarks.mumoe import bench_mumoe, mumoe_table
from tests.benchmarks.mumoe_peers import (
    FACTORIZATIONS,
    DenseMoE,
    Einsum,
    config_of,
    dense_moe_bytes,
    make_ours,
    package_entmax,
)
from tests.benchmarks.script import run
from tests.benchmarks.timed_layer import TimedLayer, measure
from tests.benchmarks.turns import SLOW

SHAPE = {"tokens": 32, "width": 16, "hidden": 64}
OPTIONS = ["--kind=mumoe", *(f"--{name}={value}" for name, value in SHAPE.items()), "--experts=8"]
GOAL_ROWS = {
    f"polyad {name} 256": {"seconds_ratio": seconds, "saved_bytes_ratio": 1.2}
    for name, seconds in (("cp", 1.09), ("tr", 1.11))
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_the_textbook_form_has_our_outputs_and_gradients(name):
    tokens_ND = torch.randn(32, 16, dtype=torch.float64, requires_grad=True)
    ours = make_ours(config_of(name, 8, SHAPE), 16, tokens_ND)
    theirs = Einsum(ours, package_entmax())
    outputs = ours(tokens_ND[None], tokens_ND[None])[0][0], theirs(tokens_ND)
    gradients = [torch.autograd.grad(y.square().sum(), tokens_ND)[0] for y in outputs]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)
    assert gradients[0].abs().max() > 1e-6
    counts = [sum(p.numel() for p in module.parameters()) for module in (ours, theirs)]
    assert counts[0] == counts[1]


def test_whole_experts_at_once_are_what_they_are_one_by_one():
    tokens_ND = torch.randn(32, 16, dtype=torch.float64)
    module = DenseMoE(torch.randn(4, 16, dtype=torch.float64), hidden=24)
    expected_ND = module.one_by_one(tokens_ND)
    torch.testing.assert_close(module(tokens_ND), expected_ND, atol=1e-12, rtol=1e-10)
    a_NE = module.coefficients(tokens_ND)
    assert a_NE.gt(0).sum() > 32  # more than one expert of a token counts


@pytest.fixture(scope="module")
def result():
    return bench_mumoe(**SHAPE, experts=(4, 8), precisions=("fp32",), repeats=1)


def test_the_result_has_every_variant_with_ratios_and_counts(result):
    compared = result["precisions"]["fp32"]
    names = [
        f"{who} {number}"
        for number in (4, 8)
        for who in ("polyad cp", "einsum cp", "polyad tr", "einsum tr", "dense moe")
    ]
    rows = compared["variants"]
    assert list(rows) == ["dense", *names]
    for name, row in rows.items():
        assert row["seconds_ratio"] == row["seconds"] / rows["dense"]["seconds"]
        assert row["saved_bytes_ratio"] == row["saved_bytes"] / rows["dense"]["saved_bytes"]
        assert name == "dense" or row["difference"] < 1e-4
    assert rows["dense"]["parameters"] == 2 * 16 * 64 + 64 + 16 == 2128
    assert rows["dense"]["flops_per_token"] == 6 * 2 * 16 * 64
    assert rows["dense moe 8"]["parameters"] == 8 * (2128 + 16)
    # Every expert's products, the gate, and the mixing of biases.
    assert rows["dense moe 8"]["flops_per_token"] == 6 * 8 * (2 * 16 * 64 + 2 * 16)
    # CP: R (8 + 17 + 64) + R (8 + 65 + 16) + 8 x 16 is nearest to 2128 with R = 11.
    assert rows["polyad cp 8"]["parameters"] == 11 * 178 + 128
    assert rows["polyad cp 8"]["flops_per_token"] == 6 * (11 * 176 + 128)
    assert rows["einsum cp 8"]["flops_per_token"] == rows["polyad cp 8"]["flops_per_token"]
    assert compared["left_out"] == {}
    assert compared["goals"] == []  # which are of another shape


def test_ours_keeps_less_than_the_textbook_form(result):
    rows = result["precisions"]["fp32"]["variants"]
    for name in ("cp 4", "tr 4", "cp 8", "tr 8"):
        assert rows[f"polyad {name}"]["saved_bytes"] < 0.8 * rows[f"einsum {name}"]["saved_bytes"]


def test_the_table_has_a_line_for_every_variant(result):
    table = mumoe_table(result)
    rows = result["precisions"]["fp32"]["variants"]
    assert all(f"\n{name} " in table for name in rows)
    assert "32 tokens, 16-64; " in table


def comparison(monkeypatch, shape, precision, has_instructions=True):
    monkeypatch.setattr(mumoe, "has_bf16_products", lambda: has_instructions)
    return mumoe._Comparison(shape, precision, torch.device("cpu"))


def test_goals_are_of_both_factorizations_with_256_experts(monkeypatch):
    compared = comparison(monkeypatch, {"tokens": 1024, "width": 768, "hidden": 3072}, "bf16")
    goals = compared._goals(GOAL_ROWS, compiled=False)
    reached = {(goal["variant"], goal["of"]): goal["reached"] for goal in goals}
    assert reached == {
        ("polyad cp 256", "saved_bytes_ratio"): True,
        ("polyad cp 256", "seconds_ratio"): True,
        ("polyad tr 256", "saved_bytes_ratio"): True,
        ("polyad tr 256", "seconds_ratio"): False,
    }
    assert {goal["goal"] for goal in goals} == {1.10, 1.3}


@pytest.mark.parametrize(("precision", "told"), [("fp32", True), ("bf16", None)])
def test_the_time_in_bf16_tells_nothing_without_its_instructions(monkeypatch, precision, told):
    shape = {"tokens": 1024, "width": 768, "hidden": 3072}
    goals = comparison(monkeypatch, shape, precision, False)._goals(GOAL_ROWS, compiled=False)
    (time,) = (g for g in goals if (g["variant"], g["of"]) == ("polyad cp 256", "seconds_ratio"))
    assert time["reached"] is told


@pytest.mark.parametrize("change", [{"tokens": 512}, {"hidden": 1024}])
def test_other_shapes_have_no_goals(monkeypatch, change):
    shape = {"tokens": 1024, "width": 768, "hidden": 3072} | change
    assert comparison(monkeypatch, shape, "fp32")._goals(GOAL_ROWS, compiled=False) == []


def test_whole_experts_are_left_out_where_they_do_not_fit(monkeypatch):
    needed = dense_moe_bytes(4, SHAPE, torch.float32)
    # Weights and gradients, and five times all inner units.
    assert needed == 4 * 4 * (2 * 2128 + 5 * 32 * 64)
    monkeypatch.setattr(mumoe, "free_bytes", lambda device: needed)
    result = bench_mumoe(**SHAPE, experts=(4, 8), precisions=("fp32",), repeats=1)
    compared = result["precisions"]["fp32"]
    assert "dense moe 4" in compared["variants"]
    assert "dense moe 8" not in compared["variants"]
    assert "GiB" in compared["left_out"]["dense moe 8"]
    assert "dense moe 8: left out: takes 0.0 GiB" in mumoe_table(result)


def test_without_the_package_its_form_is_left_out_and_ours_still_checked(monkeypatch):
    monkeypatch.setattr(mumoe_peers.importlib.util, "find_spec", lambda name: None)
    result = bench_mumoe(**SHAPE, experts=(4,), precisions=("fp32",), repeats=1)
    compared = result["precisions"]["fp32"]
    assert result["entmax"] is None
    assert compared["left_out"] == dict.fromkeys(
        ("einsum cp 4", "einsum tr 4"), "the entmax package is not installed"
    )
    assert compared["variants"]["polyad cp 4"]["difference"] < 1e-4


def test_a_variant_that_computes_something_else_is_refused(monkeypatch):
    right = MuMoE.forward
    monkeypatch.setattr(MuMoE, "forward", lambda *views: (1.01 * right(*views)[0], None))
    with pytest.raises(RunError, match=r"polyad cp 4 in fp32 is .*e-0\d away from the textbook"):
        bench_mumoe(**SHAPE, experts=(4,), precisions=("fp32",), repeats=1)


def test_what_is_slow_is_timed_once():
    work = torch.randn(400, 400)

    def slow(x_ND):
        for _ in range(100):
            work @ work
        return x_ND.square()

    layers = {
        "dense": TimedLayer(torch.nn.Module(), lambda x_ND: x_ND.square()),
        "slow": TimedLayer(torch.nn.Module(), slow),
    }
    rows = measure(layers, torch.randn(2, 2, requires_grad=True), repeats=4)
    assert rows["slow"]["seconds_ratio"] > SLOW
    assert (rows["dense"]["timed"], rows["slow"]["timed"]) == (4, 1)


@pytest.mark.slow
def test_command_writes_json_alone_and_progress_to_standard_error(capfd):
    arguments = [*OPTIONS, "--precision=bf16", "--repeats=1", "--threads=1", "--json=-"]
    assert run(layer, arguments) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["kind"] == "mumoe"
    assert {name: result[name] for name in SHAPE} == SHAPE
    assert (result["experts"], result["threads"], result["compiled"]) == ([8], 1, False)
    assert list(result["precisions"]) == ["bf16"]
    assert "1 of 1" in captured.err


@pytest.mark.slow
def test_compiled_variants_compute_the_same():
    result = bench_mumoe(**SHAPE, experts=(4,), precisions=("fp32",), repeats=1, compiled=True)
    rows = result["precisions"]["fp32"]["variants"]
    assert len(rows) == 6
    assert all(row["seconds"] > 0 and row["saved_bytes"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "dense"], "--kind"),
        (["--kind", "mumoe", "--experts", "0"], "--experts"),
        (["--kind", "mumoe", "--tokens", "0"], "--tokens"),
        (["--kind", "mumoe", "--experts", "64", "900000"], "--experts: 900000 is not allowed: no"),
        (["--kind", "mumoe", "--width", "4"], "--experts: 256 is not allowed: no rank of tr"),
        (["--kind", "mumoe", "--top-k", "2"], "--top-k: is of --kind smoe"),
        (["--kind", "mumoe", "--load", "uniform"], "--load: is of --kind smoe"),
        (["--compile"], "--compile: is of --kind mumoe"),
        (["--experts", "4", "8"], "--experts: 4 8: --kind smoe takes one number"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capfd):
    assert run(layer, arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("polyad: error: ")
    assert words in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capfd):
    assert run(layer, ["--kind", "mumoe", "--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("polyad: error: --device: cuda: ")
