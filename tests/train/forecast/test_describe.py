"""What a run is said to do and cost, against numbers worked out by hand."""

from typing import Any

import pytest

from polyad.parallel.dims import Dims
from polyad.parallel.plan.devices import DEFAULT_DEVICE, DEVICES
from polyad.train.config.comparison import comparison_rows
from polyad.train.config.run import RunConfig
from polyad.train.forecast.describe import describe, description_table, memory_per_process
from polyad.train.forecast.forecast import Machines, forecast
from tests.helpers.everyday import everyday


def small(**sections: dict[str, Any]) -> RunConfig:
    """2 layers of width 8, sequences of 3 tokens of a vocabulary of 5."""
    tree: dict[str, Any] = {
        "run": {"folder": "nowhere"},
        "data": {},
        "model": {
            "num_layers": 2,
            "hidden_size": 8,
            "num_heads": 2,
            "sequence_length": 3,
            "vocab_size": 5,
            "bias": False,
        },
        "train": {"steps": 10, "global_batch_size": 12, "micro_batch_size": 2},
    }
    for name, changes in sections.items():
        tree[name] = tree.get(name, {}) | changes
    return RunConfig.model_validate(tree)


# A block: LayerNorms 8 + 8, q, k, v 8 x 24, output 8 x 8, feed-forward 2 x 8 x 32 = 784.
# Embeddings: 5 x 8 + 3 x 8 = 64. The last LayerNorm: 8.
BLOCK, EMBEDDINGS = 784, 64
PARAMETERS = 2 * BLOCK + EMBEDDINGS + 8


def test_counts_are_those_worked_out_by_hand() -> None:
    about = describe(small(), Dims(world_size=2), samples_per_epoch=40)
    assert about["model"]["parameters"] == PARAMETERS
    assert about["model"]["embedding_parameters"] == EMBEDDINGS
    assert about["model"]["block_parameters"] == [BLOCK, BLOCK]
    # 6 x (2 blocks x (4 x 64 + 2 x 8 x 32) + head 5 x 8) + 12 x 2 x 8 x 3
    assert about["model"]["flops_per_token"] == 6 * (2 * 768 + 40) + 576
    assert about["training"]["tokens_per_step"] == 36
    assert about["training"]["tokens"] == 360
    assert about["training"]["epochs"] == 10 * 12 / 40
    assert about["training"]["flops"] == 360 * about["model"]["flops_per_token"]
    assert about["layout"]["accumulation_steps"] == 3
    assert about["checkpoint_bytes"] == 3 * 4 * PARAMETERS


@pytest.mark.distributed
@pytest.mark.usefixtures("no_process_group")
@everyday(
    "sections",
    [
        {},
        {"model": {"recompute": "block"}, "train": {"precision": "bf16"}},
        {"parallel": {"zero_stage": 3}, "checkpoint": {"asynchronous": True}},
    ],
    keep=[{"model": {"recompute": "block"}, "train": {"precision": "bf16"}}],
)
def test_validate_says_the_memory_that_plan_says(sections: dict[str, Any]) -> None:
    config, dims = small(**sections), Dims(world_size=2)
    machines = Machines(device=DEVICES[DEFAULT_DEVICE], nodes=1, processes_per_node=2)
    planned = forecast(config, dims, machines)["memory_bytes"]
    memory = memory_per_process(config, dims)
    snapshot = memory.pop("snapshot", None)
    assert memory == {kind: size for kind, size in planned.items() if kind != "device"}
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    # Of asynchronous checkpoints a weight and two moments, over 2 processes.
    assert snapshot == (4 * 3 * PARAMETERS // 2 if "checkpoint" in sections else None)


def test_a_moving_average_is_in_a_checkpoint_as_a_moment_is() -> None:
    config = small(train={"ema": 0.999}, parallel={"zero_stage": 1})
    assert describe(config, Dims(world_size=1))["checkpoint_bytes"] == 4 * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("factorization", "rank", "parameters", "matrix_rank"),
    [("cp", 556, 57_029_664, 556), ("tr", 149, 57_399_264, 596)],  # 4 x 149
)
def test_factorized_experts_stand_beside_what_others_cost(
    factorization: str, rank: int, parameters: int, matrix_rank: int
) -> None:
    feed_forward = {
        "kind": "mumoe",
        "factorization": factorization,
        "num_experts": [128, 2],
        "rank": rank,
    }
    # GPT-2 124M without biases.
    model: dict[str, Any] = {
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 12,
        "sequence_length": 1024,
        "vocab_size": 50257,
        "bias": False,
        "feed_forward": feed_forward,
    }
    one_level = model | {"feed_forward": feed_forward | {"num_experts": [256]}}
    about = describe(small(model=one_level), Dims(world_size=1))["model"]
    found = about["factorized_experts"]
    assert (found["rank"], found["num_experts"]) == (rank, [256])
    ours, dense, dense_moe, sparse_moe = found["compared"].values()
    assert ours["feed_forward_parameters"] == parameters
    assert ours["parameters"] == about["parameters"]
    assert ours["flops_per_token"] == about["flops_per_token"]
    assert (ours["experts_per_block"], ours["expert_matrix_rank"]) == (256, matrix_rank)
    assert dense["feed_forward_parameters"] == 12 * 4_718_592
    assert (dense["experts_per_block"], dense["expert_matrix_rank"]) == (1, 768)
    # 256 whole MLPs and a router of 768 x 256: 14.5B.
    assert dense_moe["feed_forward_parameters"] == 12 * (256 * 4_718_592 + 196_608)
    assert sparse_moe["feed_forward_parameters"] == dense_moe["feed_forward_parameters"]
    # Dense: 6 x (12 x 12 x 768^2 + 768 x 50257) + 12 x 12 x 768 x 1024; an expert is 6 x 12 x
    # 4,718,592 of it.
    assert dense["flops_per_token"] == 6 * (12 * 12 * 768**2 + 768 * 50257) + 144 * 768 * 1024
    expert, router = 6 * 12 * 4_718_592, 6 * 12 * 196_608
    assert dense_moe["flops_per_token"] == dense["flops_per_token"] + 255 * expert + router
    assert sparse_moe["flops_per_token"] == dense["flops_per_token"] + expert + router
    # As many experts in two levels.
    levels = describe(small(model=model), Dims(world_size=1))["model"]["factorized_experts"]
    assert levels["compared"]["this run"]["experts_per_block"] == 256
    assert levels["compared"]["dense MoE"] == dense_moe
    assert "level_std is 0" in dict(comparison_rows(levels))["  note"]
    assert "  note" not in dict(comparison_rows(levels | {"level_std": 0.1}))
    assert "  note" not in dict(comparison_rows(found))


def test_active_parameters_are_per_token_in_every_task() -> None:
    experts = {"kind": "smoe", "num_experts": 4, "top_k": 1, "expert_hidden_size": 8}
    config = small(
        data={"kind": "sequences", "path": "rows.csv"},
        model={"feed_forward": experts, "num_layers": 1},
    )
    description = describe(config, Dims(world_size=1))
    memory = {"memory_bytes_per_process": {"weights": 1000, "total": 1000}}
    table = description_table(description | memory)
    assert description["unit"] == "sequence"
    active = description["model"]["active_parameters"]
    assert f"{active:,} parameters per token" in table
    assert "4 in each of 1 block, 1 active per token" in table
    assert "1 process: data parallel 1" in table
    assert "about 1 KB per process when run on GPUs" in table


def test_one_expert_is_compared_with_the_dense_model_alone() -> None:
    feed_forward = {"kind": "mumoe", "num_experts": [1], "rank": 3}
    model = describe(small(model={"feed_forward": feed_forward}), Dims(world_size=1))["model"]
    assert list(model["factorized_experts"]["compared"]) == ["this run", "dense"]
    assert describe(small(), Dims(world_size=1))["model"]["factorized_experts"] is None


def test_a_graph_is_named_with_what_was_chosen_of_it() -> None:
    experts = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 8, "graph": "attention"}
    chosen = experts | {"sigma": 4.0, "head_mean": False}
    for feed_forward, said in (
        (experts, "attention graph"),
        (chosen, "attention graph (sigma 4.0, head_mean False)"),
        (experts | {"graph": "none"}, "no graph"),
    ):
        described = describe(small(model={"feed_forward": feed_forward}), Dims(world_size=1))
        assert f"linear score, {said}\n" in description_table(described) + "\n"


def test_more_experts_than_a_sparse_layer_has_are_compared_with_the_dense_model_alone() -> None:
    feed_forward = {"kind": "mumoe", "num_experts": [256] * 4, "rank": 8}
    model = describe(small(model={"feed_forward": feed_forward}), Dims(world_size=1))["model"]
    assert list(model["factorized_experts"]["compared"]) == ["this run", "dense"]
