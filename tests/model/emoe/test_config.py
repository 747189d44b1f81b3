"""Each contradiction in an emergent mixture's section is one line with key, value and what fits."""

import pytest

from train.config.run import parse_config
from train.errors import ConfigError

KEY = "model.feed_forward."


def parse(*overrides):
    text = """
      run: {folder: runs/x}
      model: {num_layers: 4, hidden_size: 32, num_heads: 4, vocab_size: 61,
        feed_forward: {kind: emoe}}
      data: {path: data}
      train: {steps: 1, global_batch_size: 1, micro_batch_size: 1}
    """
    keys = [f"model.feed_forward.{override}" for override in overrides]
    return parse_config(text, keys, origin="run.yaml").model.feed_forward


def test_a_section_without_keys_splits_every_block_in_16_of_which_8_run():
    config = parse()
    assert [config.routes(block) for block in range(4)] == [True] * 4
    assert (config.num_experts, config.used_experts(), config.score) == (16, 8, "avg_k")
    every_second = parse("blocks=2")
    assert [every_second.routes(block) for block in range(4)] == [False, True, False, True]
    assert parse("select=not_top_k", "top_k=5").used_experts() == 11


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["num_experts=1"], "num_experts: 1 is not allowed"),
        (["top_k=17"], f"top_k: 17 is more than {KEY}num_experts: 16"),
        (["top_k=0"], "top_k: 0 is not allowed"),
        (
            ["num_experts=24"],
            f"num_experts: 24 does not divide the inner width 128 ({KEY}hidden_size); nearest that "
            "do: 16, 32",
        ),
        (["num_experts=300"], "num_experts: 300 does not divide the inner width 128"),
        (["hidden_size=2147483647"], "num_experts: 16 does not divide the inner width 2147483647"),
        (["blocks=[1, 4]"], "blocks: [1, 4] is not allowed: the model has blocks 0 to 3"),
        (["blocks=[1, 1]"], "blocks: [1, 1] names a block twice"),
        (["blocks=5"], "blocks: 5 is not allowed: the model has blocks 0 to 3"),
        (["blocks=[]"], "blocks: [] is not allowed"),
        (["blocks=last"], "blocks: 'last' is not allowed: 1 or more, or a list of block numbers"),
        (["score=random"], "score: 'random' is not allowed"),
        (["select=all"], "select: 'all' is not allowed"),
        (
            ["select=not_top_k", "top_k=16"],
            f"top_k: 16 of {KEY}num_experts: 16 leaves no expert with {KEY}select: not_top_k",
        ),
        (
            ["select=bottom_k", "router_noise=1"],
            f"router_noise: 1 is not allowed with {KEY}select: bottom_k; 0 is",
        ),
        (["capacity_factor=1.5"], "capacity_factor: 1.5 drops tokens by what else is in the"),
        (["capacity_order=priority"], f"capacity_order: priority needs {KEY}capacity_factor"),
        (["evaluation_capacity_factor=2"], "evaluation_capacity_factor: 2.0 needs"),
        (["experts=dense"], "experts: 'dense' is not allowed"),
        (["graph=similarity"], f"graph: is not a key of {KEY}kind: emoe"),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        parse(*overrides)
    (line,) = str(caught.value).splitlines()
    assert f"{KEY}{expected}" in line
