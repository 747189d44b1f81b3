"""Runs on the GPU: the engine, checkpoints, and the commands."""

import json
from pathlib import Path

import pytest
import torch

from polyad.model.build import read_model_config
from polyad.model.smoe.config import SparseMoEConfig
from polyad.train.guard.stopping import SMALLER
from polyad.train.loop.losses import LossConfig
from tests.helpers.disk import read_tree
from tests.helpers.gpu import NEEDS_CUDA, run_expecting_memory_error, wait_nowhere, world
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import records, run, write_config
from tests.helpers.small_decoders import small_decoder
from tests.helpers.snapshots import save_both_ways
from tests.helpers.training import (
    MODEL,
    Case,
    moe_model,
    mumoe_model,
    resave,
    table_model,
    train,
)

pytestmark = [*NEEDS_CUDA, pytest.mark.distributed]


def test_a_world_of_one_talks_over_nccl(on_gpu) -> None:
    sums = {"sum": [1.0, 1.0, 1.0], "everyone": ["here"]}
    assert on_gpu(world) == {"backend": "nccl", "device": "cuda:0"} | sums


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_training_is_that_of_a_cpu_in_fp32_but_for_rounding(
    on_gpu, workers, stage, precision, tolerance
) -> None:
    case = Case(stage=stage, precision=precision, optimizer="sgd", learning_rate=0.1)
    ours = on_gpu(train, case)
    (theirs,) = workers(1).run(train, case.but(precision="fp32"))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=2 * tolerance)
    assert ours["applied"] == [True] * 4


MODELS = {
    "dense": MODEL,
    "sparse": moe_model(balancing_rate=0.01),
    "similarity": moe_model(graph="similarity"),
    "attention": moe_model(graph="attention"),
    "cp": mumoe_model(),
    "ring": mumoe_model(factorization="tr", expert_rank=2),
    "decoders": table_model(),
    "transcoder": table_model(kind="transcoder", num_experts=48, top_k=5),
    "gated": small_decoder("norm over heads"),
    "latent": small_decoder("latent"),
    "sinks": small_decoder("sinks"),
    "units": small_decoder("grouped units"),
    "factorized": small_decoder("factorized"),
}
LOSSES = LossConfig(load_balance=0.01, router_z=0.001)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_every_feed_forward_trains_as_on_a_cpu(
    on_gpu, workers, name, precision, tolerance, compiled
) -> None:
    case = Case(stage=1, optimizer="sgd", learning_rate=0.1, model=MODELS[name])
    changed = MODELS[name].model_copy(update={"compile": compiled})
    ours = on_gpu(train, case.but(precision=precision, model=changed))
    (theirs,) = workers(1).run(train, case)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert ours["applied"] == [True] * 4


@pytest.mark.parametrize(("name", "stage"), [*((name, 1) for name in MODELS), ("dense", 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_of_any_feed_forward_loads_on_a_cpu_bit_for_bit(
    on_gpu, workers, tmp_path, name, stage, precision
) -> None:
    case = Case(stage=stage, precision=precision, model=MODELS[name])
    on_gpu(train, case.but(save_to=str(tmp_path / "gpu")))
    (saved,) = (tmp_path / "gpu").glob("step-*")
    again = case.but(resume=str(saved), save_to=str(tmp_path / "cpu"), first_step=4)
    workers(2).run(resave, again)
    (resaved,) = (tmp_path / "cpu").glob("step-*")
    assert_equal_state(resaved, saved)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_no_forward_or_backward_pass_waits_for_the_gpu(on_gpu, name, compiled) -> None:
    if torch.cuda.get_device_capability() < (9, 0) and isinstance(
        MODELS[name].feed_forward, SparseMoEConfig
    ):
        pytest.skip("before 9.0 grouped products read their sizes")
    # Rows of whole 16 bytes: others go through one expert after the other, for which it waits.
    section = MODELS[name].model_dump() | {"hidden_size": 32, "compile": compiled}
    if section["feed_forward"]["kind"] == "emoe":
        section["feed_forward"]["hidden_size"] = 40  # 8 in each of 4 groups, and 8 that are shared
    model = read_model_config(section)
    case = Case(stage=1, precision="bf16", model=model, losses=LOSSES)
    assert on_gpu(wait_nowhere, case) == [True] * 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "stage"), [("dense", 1), ("dense", 2), ("cp", 1), ("ring", 1)])
def test_graphs_of_blocks_compute_what_blocks_do(on_gpu, name, stage, compiled) -> None:
    model = MODELS[name].model_copy(update={"compile": compiled})
    case = Case(stage=stage, precision="bf16", optimizer="sgd", learning_rate=0.1, model=model)
    plain, graphed = on_gpu(train, case), on_gpu(train, case.but(cuda_graph=True))
    # Some kernels add in any order, which bf16 then rounds.
    assert graphed["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert graphed["norms"] == pytest.approx(plain["norms"], rel=2e-2)
    assert graphed["applied"] == [True] * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing(on_gpu, stage) -> None:
    case = Case(stage=stage, precision="bf16", poison="loss", poison_step=2)
    poisoned = on_gpu(train, case)
    assert poisoned["applied"] == [True, True, False, True]
    skipped = on_gpu(train, case.but(skip_data=True))
    assert poisoned["losses"][3] == pytest.approx(skipped["losses"][2], rel=1e-3)  # and no NaN


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_snapshot_is_the_checkpoint_of_its_moment_though_the_next_step_begins(
    on_gpu, tmp_path, stage, precision
) -> None:
    assert on_gpu(save_both_ways, Case(stage=stage, precision=precision), str(tmp_path))
    trees = [read_tree(tmp_path / way) for way in ("synchronous", "snapshot")]
    assert len(trees[0]) >= 7
    assert trees[0] == trees[1]


@pytest.mark.parametrize("graphed", [False, True], ids=["kernels", "graphs"])
def test_going_on_drops_the_units_that_would_have_been_dropped(on_gpu, tmp_path, graphed) -> None:
    case = Case(stage=1, dropout=0.1, precision="bf16" if graphed else "fp32", cuda_graph=graphed)
    whole = on_gpu(train, case.but(last_step=6))
    on_gpu(train, case.but(last_step=3, save_to=str(tmp_path)))
    (saved,) = tmp_path.glob("step-*")
    rest = on_gpu(train, case.but(first_step=3, last_step=6, resume=str(saved)))
    # Some kernels add in any order; other random numbers change a thousandth.
    assert rest["losses"] == pytest.approx(whole["losses"][3:], rel=3e-4 if graphed else 1e-4)


@pytest.fixture
def config(tmp_path: Path, prepared_path: Path) -> Path:
    return write_config(tmp_path / "config.yaml", prepared_path, train__precision="bf16")


@pytest.mark.parametrize("keys", [[], ["train.cuda_graph=true", "log.every=2"]])
def test_a_whole_run_reports_what_it_took_of_the_gpu(on_gpu, config, tmp_path, keys) -> None:
    assert on_gpu(run, config, "data.num_workers=2", "train.tf32=true", *keys) == 6
    lines = records(tmp_path / "run")
    assert all(line["memory_bytes"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["device"] == torch.cuda.get_device_name(0)


def test_a_run_that_does_not_fit_says_which_keys_to_lower(on_gpu, config) -> None:
    # A token leaves at least 16 D numbers of 2 bytes in a block: twice what the GPU has.
    micro = 2 * torch.cuda.get_device_properties(0).total_memory // (32 * 16 * 4096 * 2)
    micro -= micro % 2
    keys = (f"train.micro_batch_size={micro}", f"train.global_batch_size={micro}")
    kind, text, status = on_gpu(run_expecting_memory_error, config, *keys, "model.hidden_size=4096")
    assert (kind, status) == ("RunError", 1)
    assert text.startswith("out of memory in step 1, on rank 0 of 1: ")
    assert text.endswith(SMALLER)
