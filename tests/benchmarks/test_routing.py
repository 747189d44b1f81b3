"""`routing.py` on tiny shapes: variants do the same work, and it is reported whole."""

import json

import psutil
import pytest
import torch

from polyad.train.errors import RunError
from tests.benchmarks import routing
from tests.benchmarks.routing import bench_routing
from tests.benchmarks.routing_peers import (
    MaterializedGraph,
    difference,
    make_plain,
    make_variants,
)
from tests.benchmarks.routing_table import graph_flops, model_config, plain_flops, routing_table
from tests.benchmarks.script import run

SHAPE = {
    "width": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "hidden": 8,
    "layers": 2,
    "vocab_size": 11,
}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
GRAPHS = ["similarity", "cosine", "attention"]
OURS = ["plain", *GRAPHS]
VARIANTS = [*OURS, *(f"T x T {name}" for name in GRAPHS)]


@pytest.fixture(scope="module")
def plain():
    return make_plain(model_config(SHAPE, "model", 200), "fp32", torch.device("cpu"))


@pytest.fixture(scope="module")
def result():
    return bench_routing(
        **SHAPE, tokens=(24, 200), model_tokens=(24,), precisions=("fp32",), repeats=1
    )


def test_variants_share_memory_and_have_the_same_experts(plain):
    variants = make_variants(plain, 200, "fp32", materialized=True)
    assert list(variants) == VARIANTS
    ids_BT = torch.arange(200)[None] % 11
    chosen = {}
    for name, model in variants.items():
        for parameter, ours in zip(plain.parameters(), model.parameters(), strict=True):
            assert parameter.data_ptr() == ours.data_ptr()
        with torch.no_grad():
            chosen[name] = model(ids_BT)
    for name in GRAPHS:
        torch.testing.assert_close(chosen[name].logits, chosen[f"T x T {name}"].logits)
        assert not torch.allclose(chosen[name].logits, chosen["plain"].logits, atol=1e-6)
        for stats, other in zip(chosen[name].routing, chosen["plain"].routing, strict=True):
            torch.testing.assert_close(stats.load_E, other.load_E)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_their_definitions_and_a_leak_would_be_seen(plain, name, monkeypatch):
    block = make_variants(plain, 200, "fp32", materialized=False)[name].blocks[0]
    x_BTD = torch.randn(1, 200, 16)
    assert difference(block, x_BTD) < 1e-4  # as the bench itself asks of fp32
    monkeypatch.setattr(MaterializedGraph, "_masked", lambda self, logits: logits)
    assert difference(block, x_BTD) > 1e-2


def test_a_graph_that_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(MaterializedGraph, "_masked", lambda self, logits: logits)
    with pytest.raises(RunError, match=r"similarity in fp32 is .* away .* 1e-04 is allowed"):
        bench_routing(**SHAPE | {"layers": 0}, tokens=(24,), precisions=("fp32",), repeats=1)


def test_result_has_every_variant_its_ratios_and_bound(result):
    places = result["precisions"]["fp32"]
    assert [one["tokens"] for one in places["block"]] == [24, 200]
    assert [one["tokens"] for one in places["model"]] == [24]
    for place, compared in places.items():
        for one in compared:
            rows = one["variants"]
            assert list(rows) == (VARIANTS if place == "block" else OURS)
            assert one["left_out"] == {}
            assert "goal" not in one  # which is of another shape
            for row in rows.values():
                assert row["seconds_ratio"] == row["seconds"] / rows["plain"]["seconds"]
                assert row["seconds"] > 0
            assert rows["plain"]["least_ratio"] == 1 < rows["cosine"]["least_ratio"]
    assert places["block"][0]["difference"].keys() == set(GRAPHS)
    table = routing_table(result)
    assert all(table.count(f"\n{name} ") == 3 for name in OURS)
    assert "\nfp32, model of 2 blocks, 24 tokens\n" in table


def test_what_graphs_keep_for_backward_is_the_same_for_each_token_unlike_the_matrix(result):
    short, long = (one["variants"] for one in result["precisions"]["fp32"]["block"])
    for name in GRAPHS:
        kept = [rows[name]["graph_saved_bytes_per_token"] for rows in (short, long)]
        assert kept[1] <= 1.2 * kept[0]  # the short one stores S, which is smaller there
        matrix = [rows[f"T x T {name}"]["graph_saved_bytes_per_token"] for rows in (short, long)]
        assert matrix[1] > 3 * matrix[0]
    # Of similarity: scores and mixture of 4 experts, padded to u's 16, and one sum of each row; the
    # score keeps u already.
    assert long["similarity"]["graph_saved_bytes_per_token"] == 4 * (16 + 16 + 1)


def test_flops_equal_those_worked_out_by_hand():
    config = model_config(SHAPE, "block", 3)
    # Keys that a token sees: (1 + 2 + 3) / 3 = 2. A multiply-add is 2 FLOPs, backward twice that.
    # Weights of all experts times their output biases are a product too.
    score, experts, biases, attention = 16 * 4, 2 * 2 * 16 * 8, 4 * 16, 4 * 16 * 16
    assert plain_flops(config) == 6 * (score + experts + biases + attention) + 6 * 2 * 16 * 2
    assert graph_flops(config, "none") == 0
    assert graph_flops(config, "similarity") == 6 * (16 + 4) * 2
    assert graph_flops(config, "attention") == 6 * ((17 + 4) * 2 + 8 * 16 + 8 * 8)
    model = model_config(SHAPE, "model", 3)
    assert plain_flops(model) == 2 * plain_flops(config) + 6 * 16 * 11
    assert graph_flops(model, "similarity") == 2 * graph_flops(config, "similarity")


def test_a_matrix_that_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(routing, "free_bytes", lambda device: 300_000)
    shape = SHAPE | {"layers": 0}
    one = bench_routing(**shape, tokens=(100,), precisions=("fp32",), repeats=1)
    (one,) = one["precisions"]["fp32"]["block"]
    assert list(one["left_out"]) == ["T x T attention"]  # 9 x 40,000 bytes; the others take 5
    assert list(one["variants"]) == VARIANTS[:-1]


def test_goals_are_of_the_slowest_graph(result, monkeypatch):
    monkeypatch.setattr(routing, "GOAL_SHAPE", SHAPE)
    monkeypatch.setattr(routing, "GOAL_TOKENS", 24)
    monkeypatch.setattr(routing, "GOALS", {"block": 1e9, "model": 1e-9})
    again = bench_routing(**SHAPE, tokens=(24,), model_tokens=(24,), repeats=1)
    for places in again["precisions"].values():
        assert places["block"][0]["reached"] is True
        assert places["model"][0]["reached"] is False
    table = routing_table(again)
    assert table.count("the goal is at most 1e-09: missed") == 2
    assert table.count("the goal is at most 1000000000.0: met") == 2


@pytest.mark.slow
def test_command_writes_json_alone_and_progress_to_standard_error(capfd):
    threads = torch.get_num_threads()
    arguments = ["--tokens", "8", "20", "--model-tokens", "8", "--precision=bf16", "--threads=1"]
    assert run(routing.routing, [*OPTIONS, *arguments, "--repeats=1", "--json", "-"]) == 0
    captured = capfd.readouterr()
    written = json.loads(captured.out)
    assert {name: written[name] for name in SHAPE} == SHAPE
    assert written["threads"] == 1
    assert torch.get_num_threads() == threads
    assert [one["tokens"] for one in written["precisions"]["bf16"]["block"]] == [8, 20]
    assert "bf16, block, 20 tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens: '0' is not a whole number of at least 1"),
        (["--tokens", "512", "many"], "--tokens: 'many' is not a whole number of at least 1"),
        (["--precision", "fp16"], "--precision"),
        (["--top-k", "5", "--experts", "4"], "--top-k: 5 is more than --experts: 4"),
        (["--experts", "1", "--top-k", "1"], "--experts: 1 is less than 2"),
        (["--width", "10", "--heads", "4"], "--width: 10 is not a multiple of --heads: 4"),
        (["--layers", "-1"], "--layers"),
        (["--json", "no/such/folder.json"], "--json: no/such/folder.json"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capfd):
    assert run(routing.routing, arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("polyad: error: ")
    assert words in line


def test_a_model_that_does_not_fit_is_one_line_before_anything_is_made(capfd, monkeypatch):
    few = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: few)
    assert run(routing.routing, []) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--layers: 12: the model in fp32 takes 7." in line
    assert "GiB with its gradients, 1.0 are free" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capfd):
    assert run(routing.routing, ["--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("polyad: error: --device: cuda: ")
