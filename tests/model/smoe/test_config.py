"""What a configuration may say, and the message if it says something else."""

from functools import partial

import pytest
from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.decoder_config import GPT2Config
from polyad.model.smoe.config import SparseMoEConfig
from polyad.train.config.run import RunConfig, parse_config
from tests.helpers.sections import section_of

parse = partial(section_of, "smoe")


def test_a_model_that_predicts_no_next_token_may_drop():
    SparseMoEConfig(capacity_factor=1.25).check_model(num_layers=4, num_heads=4, causal=False)


def test_a_capacity_may_be_another_one_in_evaluation():
    config = SparseMoEConfig(capacity_factor=1.05, evaluation_capacity_factor=4.0)
    assert (config.capacity(True), config.capacity(False)) == (1.05, 4.0)
    config = SparseMoEConfig(capacity_factor=1.05)
    assert (config.capacity(True), config.capacity(False)) == (1.05, 1.05)
    assert SparseMoEConfig().capacity(True) is None


def test_pools_are_of_the_prefix_in_a_language_model_and_of_documents_elsewhere():
    assert parse("pool=prefix").model.feed_forward.pool_bounds() == (2, 16)
    assert parse("pool=prefix", "pool_least=4").model.feed_forward.pool_bounds() == (4, 16)
    SparseMoEConfig(pool="document").check_model(num_layers=4, num_heads=4, causal=False)
    with pytest.raises(ValueError, match=r"pool: prefix is not allowed in a model whose tokens se"):
        SparseMoEConfig(pool="prefix").check_model(num_layers=4, num_heads=4, causal=False)


def test_a_model_with_pools_has_to_know_where_documents_end():
    pooled = GPT2Config(vocab_size=100, feed_forward={"kind": "smoe", "pool": "prefix"})
    assert pooled.left_to_data() == "model.end_of_text_id"
    with pytest.raises(ValueError, match=r"^model\.end_of_text_id is not set: give a number, or"):
        build_model(pooled)
    assert pooled.model_copy(update={"end_of_text_id": 3}).left_to_data() is None
    # A sequence that is scored as a whole is one document.
    head = {"kind": "classification", "num_classes": 3}
    fields = {"vocab_size": 100, "head": head, "feed_forward": {"kind": "smoe", "pool": "prefix"}}
    assert GPT2Config.model_validate(fields).left_to_data() is None


def test_the_attention_graph_needs_attention():
    config = SparseMoEConfig(graph="attention")
    config.check_model(num_layers=4, num_heads=4, causal=True)
    with pytest.raises(ValueError, match=r"graph: attention is not allowed in a model without"):
        config.check_model(num_layers=4, num_heads=None, causal=False)
    SparseMoEConfig(graph="similarity").check_model(num_layers=4, num_heads=None, causal=False)


def test_defaults_drop_and_mix_nothing():
    config = parse().model.feed_forward
    assert config == SparseMoEConfig()
    assert (config.capacity_factor, config.graph) == (None, "none")
    assert (config.attention_head, config.head_mean) == ("lowest_entropy", True)
    assert (config.router_bias, config.router_noise, config.expert_dropout) == (True, 0.0, 0.0)
    assert config.evaluation_capacity_factor is None
    assert (config.balancing_rate, config.final_top_k, config.placement) == (0.0, None, 1)


def test_a_resolved_config_reads_back_as_itself():
    keys = ("attention_head=3", "head_mean=false")
    config = parse("graph=attention", "placement=[0, 3]", "sigma=2.0", "final_top_k=16", *keys)
    assert config.model.feed_forward.attention_head == 3
    assert parse_config(config.to_yaml(), origin="again") == config
    assert isinstance(config, RunConfig)


def test_the_rules_hold_without_a_run_too():
    with pytest.raises(ValidationError, match=r"placement: 3 is not allowed: the model has"):
        GPT2Config(num_layers=2, feed_forward={"kind": "smoe", "placement": 3})


def test_placement_two_is_glam_and_the_default_is_every_block():
    assert [SparseMoEConfig().routes(block) for block in range(4)] == [True] * 4
    assert [SparseMoEConfig(placement=2).routes(block) for block in range(4)] == [False, True] * 2
    dense = SparseMoEConfig(placement=2, dense_hidden_size=20).of_block(0)
    assert (dense.kind, dense.inner_size(32)) == ("dense", 20)
