"""What a run is said to do and cost, against numbers worked out by hand."""

from typing import Any

from polyad.parallel.config import Dims
from polyad.train.config.run import RunConfig
from polyad.train.describe import describe, description_table, exports_to


def small(**sections: dict[str, Any]) -> RunConfig:
    """2 layers of width 8, sequences of 3 tokens of a vocabulary of 5."""
    tree: dict[str, Any] = {
        "run": {"folder": "nowhere"}, "data": {},
        "model": {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "sequence_length": 3,
                  "vocab_size": 5, "bias": False},
        "train": {"steps": 10, "global_batch_size": 12, "micro_batch_size": 2},
    }  # fmt: skip
    for name, changes in sections.items():
        tree[name] |= changes
    return RunConfig.model_validate(tree)


# A block: LayerNorms 8 + 8, q, k, v 8 x 24, output 8 x 8, feed-forward 2 x 8 x 32 = 784.
# Embeddings: 5 x 8 + 3 x 8 = 64. The last LayerNorm: 8.
BLOCK, EMBEDDINGS = 784, 64
PARAMETERS = 2 * BLOCK + EMBEDDINGS + 8


def test_counts_are_those_worked_out_by_hand() -> None:
    about = describe(small(), Dims(world_size=2), samples_per_epoch=40)
    assert about["model"]["parameters"] == PARAMETERS
    # 6 x (2 blocks x (4 x 64 + 2 x 8 x 32) + head 5 x 8) + 12 x 2 x 8 x 3
    assert about["model"]["flops_per_token"] == 6 * (2 * 768 + 40) + 576
    assert about["training"]["tokens_per_step"] == 36
    assert about["training"]["tokens"] == 360
    assert about["training"]["epochs"] == 10 * 12 / 40
    assert about["training"]["flops"] == 360 * about["model"]["flops_per_token"]
    assert about["layout"]["accumulation_steps"] == 3


def test_active_parameters_are_per_token_in_every_task() -> None:
    experts = {"kind": "smoe", "num_experts": 4, "top_k": 1, "expert_hidden_size": 8}
    config = small(
        data={"kind": "sequences", "path": "rows.csv"},
        model={"feed_forward": experts, "num_layers": 1},
    )
    description = describe(config, Dims(world_size=1))
    memory = {"weights": 1000, "total": 1000}
    run = {"memory_bytes_per_process": memory, "goes_on_from_step": 0, "exports_to": "nothing"}
    table = description_table(description | run)
    assert description["unit"] == "sequence"
    active = description["model"]["active_parameters"]
    assert description["model"]["parameters"] - active == 3 * 2 * 8 * 8  # of three experts
    assert f"{active:,} parameters per token" in table
    assert "4 in each of 1 layer, 1 active per token" in table
    assert "processes 1, data parallel size 1" in table
    assert "about 1 KB per process when run on GPUs" in table


def test_what_a_model_is_exported_to_is_said_before_it_is_trained() -> None:
    experts = {"kind": "smoe", "num_experts": 4, "top_k": 1, "expert_hidden_size": 8}
    with_bias = small(model={"bias": True})
    assert exports_to(with_bias) == "Hugging Face's GPT-2"
    sparse = exports_to(small(model={"bias": True, "feed_forward": experts}))
    assert sparse.startswith("safetensors under Polyad's names alone: Hugging Face's GPT-2 has no ")
    assert "model.feed_forward.kind: 'smoe'" in sparse
    run = {"memory_bytes_per_process": {"total": 1000}, "goes_on_from_step": 0}
    description = describe(with_bias, Dims(world_size=1)) | run | {"exports_to": sparse}
    assert f"exports to  {sparse}" in description_table(description)
