"""What a run is said to do and cost, against numbers worked out by hand."""

from typing import Any

import pytest

from polyad.parallel.dims import Dims
from polyad.train.config.run import RunConfig
from polyad.train.describe import describe, description_table, memory_per_process
from polyad.train.plan import footprint
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
    planned = footprint(config, dims).memory
    memory = memory_per_process(config, dims)
    snapshot = memory.pop("snapshot", None)
    assert memory.pop("total") == sum(planned.values())
    assert memory == planned
    # Of asynchronous checkpoints a weight and two moments, over 2 processes.
    assert snapshot == (4 * 3 * PARAMETERS // 2 if "checkpoint" in sections else None)


def test_a_moving_average_is_in_a_checkpoint_as_a_moment_is() -> None:
    config = small(train={"ema": 0.999}, parallel={"zero_stage": 1})
    assert describe(config, Dims(world_size=1))["checkpoint_bytes"] == 4 * 4 * PARAMETERS


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
