"""What a run is said to do and cost, against numbers worked out by hand."""

from typing import Any

import pytest

from parallel.dims import Dims
from train.config import RunConfig
from train.describe import activation_bytes, describe, memory_per_process, schedule_line


def small(**sections: dict[str, Any]) -> RunConfig:
    """2 layers of width 8, sequences of 3 tokens of a vocabulary of 5."""
    tree: dict[str, Any] = {
        "run": {"folder": "nowhere"},
        "data": {},
        "model": {
            **{"num_layers": 2, "hidden_size": 8, "num_heads": 2, "sequence_length": 3},
            **{"vocab_size": 5, "bias": False},
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


@pytest.mark.parametrize(
    ("stage", "precision", "weights", "gradients", "optimizer"),
    [
        # Bytes a parameter, over 4 processes.
        (0, "fp32", 4, 4, 8),
        (1, "fp32", 4, 4, 12 / 4),
        (2, "fp32", 4, 4 / 4, 12 / 4),
        (3, "fp32", 4 / 4, 4 / 4, 12 / 4),
        (0, "bf16", 2, 4, 12),
        (1, "bf16", 2, 4, 12 / 4),
        (3, "bf16", 2 / 4, 4 / 4, 12 / 4),
    ],
)
def test_memory_follows_the_zero_stage(
    stage: int, precision: str, weights: float, gradients: float, optimizer: float
) -> None:
    config = small(parallel={"zero_stage": stage}, train={"precision": precision})
    memory = memory_per_process(config, Dims(world_size=4), PARAMETERS)
    wanted = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    assert {name: memory[name] for name in wanted} == {
        name: int(share * PARAMETERS) for name, share in wanted.items()
    }
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")


def test_activations_are_those_of_the_formula_and_recomputation_keeps_less() -> None:
    # A token: 2 blocks x (8 x 8 + 2 x 32) numbers of 4 bytes, and 5 logits x 12 bytes.
    assert activation_bytes(small().model, 2, 4) == 2 * 3 * (2 * 128 * 4 + 60)
    recomputing = small(model={"recompute": "block"}).model
    assert activation_bytes(recomputing, 2, 4) == 2 * 3 * ((2 * 8 + 128) * 4 + 60)


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({}, "cosine from 0.0006 to 6e-05 at step 10"),
        (
            {"warmup_steps": 2, "decay_steps": 8, "final_ratio": 0.5},
            "up to 0.0006 in 2 steps, cosine from 0.0006 to 0.0003 at step 8",
        ),
        ({"kind": "constant"}, "constant 0.0006"),
        ({"kind": "constant", "warmup_steps": 3}, "up to 0.0006 in 3 steps, then constant"),
    ],
)
def test_the_schedule_is_a_line(schedule: dict[str, Any], line: str) -> None:
    assert schedule_line(small(schedule=schedule)) == line
