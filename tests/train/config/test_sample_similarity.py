"""Which losses of sample similarity a configuration may have."""

import pytest

from polyad.train.config.rules import validate
from polyad.train.config.run import parse_config
from polyad.train.errors import ConfigError

TEXT = """
run: {folder: runs/x}
model:
  {kind: gpt2, num_layers: 2, hidden_size: 32, num_heads: 4, sequence_length: 16,
   feed_forward: {kind: smoe, num_experts: 4}}
data: {path: data/x}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
loss: {sample_similarity: {same: 1.0e-6, different: 0.01, of: layer_input}}
"""
IMAGES = """
run: {folder: runs/x}
model:
  {kind: vit, num_layers: 2, hidden_size: 32, num_heads: 4, image_size: 8, patch_size: 4,
   num_classes: 3, feed_forward: {kind: smoe, num_experts: 4}}
data: {kind: images, path: data/x}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
loss: {sample_similarity: {same: 1.0e-6, different: 0.01}}
"""
HEAD = "model.head={kind: mumoe, num_experts: [4], rank: 4}"
KEY = "loss.sample_similarity"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (TEXT, []),
        (TEXT, ["parallel.tensor_parallel_size=2"]),
        (TEXT, [f"{KEY}=null", "train.micro_batch_size=1"]),
        (TEXT, ["model.feed_forward={kind: mumoe, num_experts: [4], rank: 4}"]),
        (IMAGES, []),
        (IMAGES, [f"{KEY}.of=layer_input", f"{KEY}.distance=batch_maximum"]),
        (IMAGES, ["model.feed_forward={kind: dense}", HEAD]),
    ],
)
def test_what_fits_is_allowed(text, overrides):
    assert validate(parse_config(text, overrides, origin="run.yaml"), 2).world_size == 2


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (TEXT, [f"{KEY}.same=0"], f"{KEY}.same: 0 is not allowed"),
        (TEXT, [f"{KEY}.same=-1e-6"], f"{KEY}.same: -1e-06 is not allowed"),
        (IMAGES, [f"{KEY}.different=0"], f"{KEY}.different: 0 is not allowed"),
        (IMAGES, [f"{KEY}.different=-0.5"], f"{KEY}.different: -0.5 is not allowed"),
        (IMAGES, [f"{KEY}={{same: 1}}"], f"{KEY}.different"),
        (IMAGES, [f"{KEY}.distance=cosine"], f"{KEY}.distance: 'cosine' is not allowed"),
        (
            TEXT,
            [f"{KEY}.of=input"],
            "model.kind: gpt2 is not allowed with loss.sample_similarity.of: input",
        ),
        (TEXT, ["train.micro_batch_size=1"], "train.micro_batch_size: 1 is not allowed with loss"),
        (TEXT, ["model.feed_forward={kind: dense}"], "it needs experts"),
        (IMAGES, ["model.feed_forward={kind: dense}"], "it needs experts"),
        (
            TEXT,
            [
                "model.feed_forward={kind: mumoe, num_experts: [4], rank: 4}",
                "parallel.tensor_parallel_size=2",
            ],
            "parallel.tensor_parallel_size: 2 is not allowed with loss.sample_similarity",
        ),
        (TEXT, ["loss.importance_form=cubed"], "loss.importance_form: 'cubed' is not allowed"),
    ],
)
def test_what_does_not_fit_is_one_line(text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        validate(parse_config(text, overrides, origin="run.yaml"), 2)
    assert caught.value.exit_status == 2
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
