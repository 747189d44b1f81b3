"""What `validate` passes, `train` can do: the outermost values of every key with a number.

A run may end in words, as one whose loss is NaN does, but not with a traceback.
"""

from pathlib import Path

import pytest

from polyad.model.config import flatten
from polyad.train.config.run import load_config
from polyad.train.describe import describe_run
from tests.helpers.runs import train_each, write_config

ELSEWHERE = (
    # Sizes that only memory limits, and what leaves nothing to train.
    "model.num_layers", "model.hidden_size", "model.num_heads", "model.sequence_length",
    "model.vocab_size", "train.global_batch_size", "train.micro_batch_size", "train.steps",
    "model.feed_forward.hidden_size", "model.feed_forward.num_experts", "data.num_workers",
    "model.feed_forward.expert_hidden_size", "model.feed_forward.dense_hidden_size",
    "model.feed_forward.score_width", "data.mixture",
    # A time after which the process is ended.
    "monitor.grace_seconds", "parallel.timeout_minutes",
)  # fmt: skip
OUTERMOST = ("0", "1e-30", "1e-6", "1", "1e6", str(2**31 - 1), str(2**63 - 1), "1e30")


def extremes(config: Path) -> list[str]:
    """`key=value` of every number, or what may be one, as far out as `validate` lets it be."""
    found = []
    for key, value in flatten(load_config(config).model_dump(mode="json")).items():
        if key in ELSEWHERE or not (value is None or type(value) in (int, float)):
            continue
        valid = [number for number in OUTERMOST if is_valid(config, f"{key}={number}")]
        found += [f"{key}={number}" for number in {*valid[:1], *valid[-1:]}]
    return found


def is_valid(config: Path, override: str) -> bool:
    try:
        load_config(config, [override])
        describe_run(config, [override], 1)
    except ValueError as error:
        if getattr(error, "exit_status", None) != 2:
            raise
        return False
    return True


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dense", "smoe"])
def test_no_number_that_is_valid_ends_a_run_with_a_traceback(
    kind, tmp_path, prepared_path, workers
):
    feed_forward = {
        "dense": {"kind": "dense"},
        "smoe": {"kind": "smoe", "num_experts": 4, "graph": "attention"},
    }[kind]
    config = write_config(tmp_path / "c.yaml", prepared_path, model__feed_forward=feed_forward)
    words = extremes(config)
    if kind != "dense":
        words = [word for word in words if word.startswith(("model.feed_forward", "loss"))]
    assert len(words) > 10
    (wrong,) = workers(1).run(train_each, config, words, timeout=600)
    assert wrong == {}
