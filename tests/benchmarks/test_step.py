"""`step.py` on a tiny model: what it compares is the same work, and is reported whole."""

import resource
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyad.model.block import FEED_FORWARDS as LAYERS
from polyad.model.gpt2 import GPT2Config
from tests.benchmarks import step_variants
from tests.benchmarks.profile import KINDS, kind_of, time_by_kind
from tests.benchmarks.script import run
from tests.benchmarks.step import bench_step, step, step_table
from tests.benchmarks.step_variants import (
    FEED_FORWARDS,
    feed_forward_of,
    goal_of,
    make_step,
    model_of,
)
from tests.benchmarks.timed_layer import multiply_adds

TINY = GPT2Config(num_layers=1, hidden_size=32, num_heads=2, sequence_length=16, vocab_size=50)


@pytest.mark.parametrize("name", ["polyad", "transformers"])
def test_a_step_changes_the_weights_of_either_variant(name: str) -> None:
    step = make_step(
        name, TINY, "fp32", device="cpu", batch_size=2, sequence_length=8, compiled=False
    )
    closed_over = {
        cell.cell_contents
        for cell in step.__closure__ or ()
        if isinstance(cell.cell_contents, torch.optim.Optimizer)
    }
    (optimizer,) = closed_over
    weight = optimizer.param_groups[0]["params"][0]
    before = weight.detach().clone()
    step()
    assert not torch.equal(before, weight)


@pytest.mark.slow
def test_the_result_has_both_variants_their_ratio_and_memory() -> None:
    result = bench_step(
        precisions=("fp32",), batch_size=1, sequence_length=8, repeats=1, model=TINY, profiled=True
    )
    rows = result["precisions"]["fp32"]
    for name in ("polyad", "transformers"):
        kinds = rows[name]["seconds_by_kind"]
        assert tuple(kinds) == KINDS
        assert all(kinds[kind] > 0 for kind in KINDS if kind != "exchange")
        assert kinds["exchange"] == 0
    assert "fp32, a step by kind of work\n" in step_table(result)
    assert rows["ratio"] == rows["polyad"]["seconds"] / rows["transformers"]["seconds"]
    assert rows["ratio_interval"] is None  # one turn tells nothing of it
    assert all(rows[name]["peak_memory_bytes"] > 50e6 for name in ("polyad", "transformers"))
    for row in (rows["polyad"], rows["transformers"]):
        start = row["cold_start"]
        assert 0 < start["imports_seconds"] < start["built_seconds"] < start["first_step_seconds"]
        assert row["warm_start"] is None  # nothing was compiled, so nothing was left for it
        assert row["mfu"] is None  # no peak is known of a CPU
    assert "median ratio, polyad / transformers: " in step_table(result)


def event(name: str, parent: Any = None) -> Any:
    return SimpleNamespace(name=name, cpu_parent=parent)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::linear", "aten::addmm"], "products"),
        (["aten::_scaled_dot_product_attention_math", "aten::bmm"], "attention"),
        (["loss", "aten::linear", "aten::mm"], "loss"),
        (["optimizer", "aten::_foreach_mul_"], "optimizer"),
        (["c10d::allreduce_"], "exchange"),
        (["polyad::experts_on_cpu", "aten::mm"], "products"),
        (["aten::native_layer_norm"], "other"),
    ],
)
def test_an_operation_counts_for_what_is_around_it(names: list[str], kind: str) -> None:
    inner = None
    for name in names:
        inner = event(name, inner)
    assert kind_of(inner) == kind


def test_the_time_of_a_step_is_that_of_its_kinds() -> None:
    weight = torch.randn(400, 400)

    def step() -> None:
        torch.mm(weight, weight)
        with torch.profiler.record_function("optimizer"):
            weight.clone()
        time.sleep(0.05)

    seconds = time_by_kind(step, "cpu")
    assert seconds["products"] > 0
    assert seconds["optimizer"] > 0
    assert 0.05 < seconds["gaps"] < 0.1
    assert seconds["attention"] == seconds["loss"] == 0


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_variants_differ_in_the_feed_forward_alone(name: str) -> None:
    config = GPT2Config(vocab_size=50257)
    varied = model_of(name, config)
    assert varied.feed_forward == feed_forward_of(name, 768)
    assert varied.model_copy(update={"feed_forward": config.feed_forward}) == config
    # What makes the comparison fair: a token costs as much as in the dense one, or nearly, and
    # where all experts take part there are as many parameters.
    (feed_forward,) = set(varied.block_feed_forwards())
    weights = 2 * 768 * 3072
    found = multiply_adds(LAYERS[feed_forward.kind], feed_forward, 768)
    assert found == pytest.approx(weights, rel=0.021)
    if name.startswith("mumoe"):
        assert feed_forward.parameters(768) == pytest.approx(4_722_432, rel=0.01)
    if name.startswith("smoe"):
        of_each = 2 * 768 * int(name.removeprefix("smoe-"))  # a router, and output biases
        assert found == weights + of_each


def test_goals_are_of_factorized_experts_and_of_sparse_ones_on_a_gpu() -> None:
    assert [goal_of(name, "cpu") for name in FEED_FORWARDS] == [None, 1.10, 1.10, None, None]
    assert [goal_of(name, "cuda") for name in FEED_FORWARDS] == [None, 1.15, 1.15, 1.25, 1.25]


def test_routers_of_sparse_experts_learn_from_their_losses(monkeypatch) -> None:
    weighed = []

    def routing_loss(routing, config):
        loss = real(routing, config)
        weighed.append((len(routing), config, loss))
        return loss

    real = step_variants.routing_loss
    monkeypatch.setattr(step_variants, "routing_loss", routing_loss)
    shape = {"device": "cpu", "batch_size": 2, "sequence_length": 8, "compiled": False}
    make_step("smoe-16", model_of("smoe-16", TINY), "fp32", **shape)()
    make_step("dense", model_of("dense", TINY), "fp32", **shape)()
    (layers, config, loss), (no_layers, _, nothing) = weighed
    assert (layers, no_layers, nothing) == (1, 0, None)
    assert (config.load_balance, config.router_z) == (0.01, 0.001)
    assert loss.item() > 0.01  # even load: 0.01 x 1
    assert loss.requires_grad


@pytest.mark.slow
def test_sparse_experts_are_compared_without_a_goal_on_a_cpu() -> None:
    result = bench_step(
        **{"precisions": ("fp32",), "batch_size": 1, "sequence_length": 8, "repeats": 1},
        feed_forward="smoe-16",
        model=TINY,
    )
    assert result["variants"] == ["smoe-16", "dense"]
    assert "goal" not in result["precisions"]["fp32"]
    assert "median ratio, smoe-16 / dense: " in step_table(result)
    assert "goal" not in step_table(result)


@pytest.mark.slow
def test_factorized_experts_are_compared_with_our_dense_step() -> None:
    model = TINY.model_copy(update={"hidden_size": 64})  # 256 experts do not fit into 32's
    result = bench_step(
        **{"precisions": ("fp32",), "batch_size": 1, "sequence_length": 8, "repeats": 1},
        feed_forward="mumoe-cp",
        model=model,
    )
    assert result["variants"] == ["mumoe-cp", "dense"]
    rows = result["precisions"]["fp32"]
    assert rows["ratio"] == rows["mumoe-cp"]["seconds"] / rows["dense"]["seconds"]
    assert rows["goal"] == 1.10
    assert rows["reached"] == (rows["ratio"] <= 1.10)
    table = step_table(result)
    assert "median ratio, mumoe-cp / dense: " in table
    assert "the goal is at most 1.10" in table


def test_a_feed_forward_that_is_not_known_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(step, ["--feed-forward", "mumoe-tucker"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("polyad: error: ")
    assert "--feed-forward" in line
    assert "mumoe-tr" in line


@pytest.mark.slow
def test_a_warm_start_finds_what_the_cold_one_compiled() -> None:
    result = bench_step(
        **{"precisions": ("fp32",), "batch_size": 1, "sequence_length": 8, "repeats": 1},
        model=TINY,
        compiled=True,
    )
    rows = result["precisions"]["fp32"]
    for name in ("polyad", "transformers"):
        cold, warm = rows[name]["cold_start"], rows[name]["warm_start"]
        assert cold["compiled_graphs_found"] == 0
        assert warm["compiled_graphs_found"] > 0
        assert warm["first_step_seconds"] < cold["first_step_seconds"]


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The process that measures a start inherits it, and 5,000 x 1,024 embeddings take 15.7e9 bytes.
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, hard))
    try:
        status = run(step, ["--batch-size", "5000", "--sequence-length", "1024"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert status == 1
    assert capfd.readouterr().err.endswith(
        "step: polyad with --batch-size 5000 and --sequence-length 1024: out of memory; "
        "lower one of them\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(step, ["--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("polyad: error: --device: cuda: ")
