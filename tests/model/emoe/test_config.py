"""Each contradiction in an emergent mixture's section is one line with key, value and what fits."""

from polyad.train.config.rules import validate
from tests.helpers.sections import KEY, run_of, section_of


def parse(*overrides):
    return section_of("emoe", *overrides).model.feed_forward


def test_a_section_without_keys_splits_every_block_in_16_of_which_8_run():
    config = parse()
    assert [config.routes(block) for block in range(4)] == [True] * 4
    assert (config.num_experts, config.used_experts(), config.score) == (16, 8, "avg_k")
    every_second = parse("blocks=2")
    assert [every_second.routes(block) for block in range(4)] == [False, True, False, True]
    assert parse("select=not_top_k", "top_k=5").used_experts() == 11


def test_what_a_layout_allows():
    both = "parallel.zero_stage=3", "parallel.expert_parallel_size=2"
    assert validate(run_of("emoe", *both), 2).data_parallel_size == 2
    assert validate(run_of("emoe", "loss.load=0.1", f"{KEY}router_noise=1"), 1).world_size == 1
