"""Each contradiction in an emergent mixture's section is one line with key, value and what fits."""

import pytest

from polyad.train.config.rules import validate
from polyad.train.errors import ConfigError
from tests.helpers.sections import KEY, assert_refused, run_of, section_of


def parse(*overrides):
    return section_of("emoe", *overrides).model.feed_forward


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
            f"router_noise: 1 is not allowed with {KEY}select: bottom_k; allowed: 0",
        ),
        (["capacity_factor=1.5"], "capacity_factor: 1.5 drops tokens depending on the rest of the"),
        (["evaluation_capacity_factor=2"], "evaluation_capacity_factor: 2.0 needs"),
        (["experts=dense"], "experts: 'dense' is not allowed"),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(overrides, expected):
    assert_refused("emoe", overrides, expected)


@pytest.mark.parametrize(
    ("overrides", "processes", "expected"),
    [
        (
            ["parallel.expert_parallel_size=3"], 3,
            f"parallel.expert_parallel_size: 3 does not divide {KEY}num_experts: 16",
        ),
        (
            ["parallel.tensor_parallel_size=4", f"{KEY}hidden_size=32", f"{KEY}num_experts=16"], 4,
            f"parallel.tensor_parallel_size: 4 does not divide {KEY}hidden_size / num_experts: 2",
        ),
        (["loss.load=0.1"], 1, "kind: smoe or emoe with router_noise above 0"),
    ],
)  # fmt: skip
def test_a_layout_that_groups_do_not_fit_is_refused(overrides, processes, expected):
    with pytest.raises(ConfigError, match=r"parallel|loss") as caught:
        validate(run_of("emoe", "train.global_batch_size=12", *overrides), processes)
    assert expected in str(caught.value)


def test_what_a_layout_allows():
    both = "parallel.zero_stage=3", "parallel.expert_parallel_size=2"
    assert validate(run_of("emoe", *both), 2).data_parallel_size == 2
    assert validate(run_of("emoe", "loss.load=0.1", f"{KEY}router_noise=1"), 1).world_size == 1
