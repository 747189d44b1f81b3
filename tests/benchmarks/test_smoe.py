"""`layer.py` on a tiny layer: the peers do the same work, and it is reported whole."""

import json

import pytest
import torch
from torch import nn

from tests.benchmarks.layer import layer
from tests.benchmarks.script import run
from tests.benchmarks.smoe import bench_smoe, smoe_table
from tests.benchmarks.smoe_peers import (
    make_layers,
    make_tokens,
    orthogonal_router,
    rows_of_experts,
)
from tests.benchmarks.timed_layer import TimedLayer, saved_bytes

SHAPE = {"tokens": 64, "experts": 4, "top_k": 2, "width": 16, "hidden": 24}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
VARIANTS = ["dense", "polyad", "loop", "deepspeed 1.25", "deepspeed no drop"]


def layers_and_tokens(load):
    router_ED = orthogonal_router(SHAPE["experts"], SHAPE["width"])
    tokens_ND = make_tokens(SHAPE["tokens"], router_ED, load).requires_grad_()
    return make_layers(SHAPE, router_ED, tokens_ND), tokens_ND


@pytest.mark.parametrize("load", ["uniform", "skewed"])
def test_peers_that_drop_nothing_have_equal_outputs_and_gradients(load):
    layers, tokens_ND = layers_and_tokens(load)
    results = {}
    for name in ("loop", "polyad", "deepspeed no drop"):
        output_ND = layers[name](tokens_ND)
        (gradient_ND,) = torch.autograd.grad(output_ND.square().sum(), tokens_ND)
        results[name] = output_ND, gradient_ND
    for name in ("polyad", "deepspeed no drop"):
        for ours, expected in zip(results[name], results["loop"], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_skewed_load_gives_one_expert_exactly_half_of_the_tokens():
    layers, tokens_ND = layers_and_tokens("skewed")
    rows_E = rows_of_experts(layers, tokens_ND)
    assert rows_E[0] == SHAPE["tokens"] // 2
    assert sum(rows_E) == SHAPE["tokens"] * SHAPE["top_k"]
    router = layers["polyad"].module.router
    ids_NK = router(tokens_ND.unsqueeze(0)).selected.expert_ids_NK
    assert (ids_NK[:, 0] == 0).tolist() == [True, False] * (SHAPE["tokens"] // 2)


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    # x and its product with the weight are kept, x for both products; 4 x 8 numbers of 4 bytes.
    weight = nn.Parameter(torch.randn(8, 8))

    def call(x):
        return (x @ weight).square() + (x @ weight.t()).sum()

    layer = TimedLayer(nn.Module(), call)
    layer.module.register_parameter("weight", weight)
    assert saved_bytes(layer, torch.randn(4, 8, requires_grad=True)) == 2 * 4 * 8 * 4


def test_result_has_every_variant_and_its_ratios():
    result = bench_smoe(**SHAPE, precisions=("fp32",), loads=("uniform",), repeats=1)
    compared = result["precisions"]["fp32"]["uniform"]
    assert sum(compared["rows_of_experts"]) == 128
    assert list(compared["variants"]) == VARIANTS
    dense = compared["variants"]["dense"]
    for row in compared["variants"].values():
        assert row["seconds_ratio"] == row["seconds"] / dense["seconds"]
        assert row["saved_bytes_ratio"] == row["saved_bytes"] / dense["saved_bytes"]
    # x [64, 16], and the 48 inner units before and after the activation, in 4 bytes each.
    assert dense["saved_bytes"] == 4 * 64 * (16 + 2 * 48)
    assert "goal" not in compared  # which is of another shape
    table = smoe_table(result)
    assert all(f"\n{name} " in table for name in VARIANTS)


def test_command_writes_json_alone_and_progress_to_standard_error(capfd):
    threads = torch.get_num_threads()
    arguments = [*OPTIONS, "--precision=bf16", "--load=skewed", "--repeats=1", "--threads=1"]
    assert run(layer, [*arguments, "--json", "-"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert {name: result[name] for name in SHAPE} == SHAPE
    assert result["threads"] == 1
    assert torch.get_num_threads() == threads
    assert list(result["precisions"]) == ["bf16"]
    assert list(result["precisions"]["bf16"]) == ["skewed"]
    assert "bf16, skewed" in captured.err


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_share_the_experts_and_report_once(capfd):
    arguments = [*OPTIONS, "--expert-parallel=2", "--precision=fp32", "--repeats=1", "--json", "-"]
    assert run(layer, arguments) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["expert_parallel"] == 2
    for load, compared in result["precisions"]["fp32"].items():
        assert list(compared["variants"]) == [*VARIANTS[:2], "every expert here", *VARIANTS[2:]]
        # Of both processes' tokens; ours and DeepSpeed's equal the loop over whole experts, or it
        # would have ended in an error.
        assert sum(compared["rows_of_experts"]) == 2 * 128, load
    assert captured.err.count("fp32, skewed") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-k", "5", "--experts", "4"], "--top-k: 5 is more than --experts: 4"),
        (["--experts", "1", "--top-k", "1"], "--experts: 1"),
        (["--tokens", "1"], "--tokens: 1"),
        (["--expert-parallel", "3"], "--experts: 16 is not divisible by --expert-parallel 3"),
        (["--expert-parallel", "2", "--top-k", "17"], "--top-k: 17 is more than --experts: 16"),
        (["--expert-parallel", "2", "--kind", "mumoe"], "--expert-parallel: is of --kind smoe"),
        (["--repeats", "0"], "--repeats"),
        (["--precision", "fp16"], "--precision"),
        (["--load", "even"], "--load"),
        (["--json", "no/such/folder.json"], "--json: no/such/folder.json"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capfd):
    assert run(layer, arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("polyad: error: ")
    assert words in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capfd):
    assert run(layer, ["--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("polyad: error: --device: cuda: ")
