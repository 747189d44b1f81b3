"""What a configuration may say, and the message if it says something else."""

from functools import partial

import pytest
from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.gpt2 import GPT2Config
from polyad.model.smoe.config import SparseMoEConfig
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, parse_config
from polyad.train.errors import ConfigError
from tests.helpers.sections import KEY, assert_refused, run_of, section_of

parse = partial(section_of, "smoe")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["top_k=17"], "top_k: 17 is more than model.feed_forward.num_experts: 16"),
        (["final_top_k=17"], "final_top_k: 17 is more than model.feed_forward.num_experts: 16"),
        (["top_k=3", "final_top_k=2"], "final_top_k: 2 is less than model.feed_forward.top_k: 3;"),
        (["top_k=0"], "top_k: 0 is not allowed: input should be greater than or equal to 1"),
        (["num_experts=1"], "num_experts: 1 is not allowed: input should be greater than or equal"),
        (["score=liner"], "score: 'liner' is not allowed: input should be 'linear', 'cosine' or"),
        (["expert_keys=learned"], "expert_keys: went with attentive scores of sparse experts; "),
        (["allow_leak=false"], "allow_leak: went with runs that see later tokens; "),
        (["capacity_order=arrival"], "capacity_order: went with priority; a capacity keeps the fi"),
        (["graph_from=0.0"], "graph_from: went with graphs that start late; "),
        (["graph=atention"], "graph: 'atention' is not allowed: input should be 'none', 'simil"),
        (["similarity=l2"], "similarity: 'l2' is not allowed: input should be 'dot' or 'cosine'"),
        (["tau=0"], "tau: 0 is not allowed: input should be greater than or equal to 0.000001"),
        (
            ["sigma=-1"],
            "sigma: -1 is not allowed: input should be greater than or equal to 0.000001",
        ),
        (["balancing_rate=-1"], "balancing_rate: -1 is not allowed: input should be greater than"),
        (["attention_head=0"], "attention_head: 0 needs model.feed_forward.graph: attention, not"),
        (
            ["attention_head=4", "graph=attention"],
            "attention_head: 4 is not allowed: the model has heads 0 to 3",
        ),
        *(
            (
                [f"attention_head={head}", "graph=attention"],
                f"attention_head: {shown} is not allowed: lowest_entropy, or the number of a head "
                "from 0",
            )
            for head, shown in (("-1", "-1"), ("1.0", "1.0"), ("true", "True"), ("low", "'low'"))
        ),
        (
            ["head_mean=false", "graph=similarity"],
            "head_mean: false needs model.feed_forward.graph: attention, not similarity",
        ),
        (["experts=fast"], "experts: 'fast' is not allowed: input should be 'grouped' or 'loop'"),
        (
            ["capacity_factor=1.25"],
            "capacity_factor: 1.25 drops tokens depending on the rest of the",
        ),
        (["capacity_factor=0"], "capacity_factor: 0 is not allowed: input"),
        (["evaluation_capacity_factor=4"], "evaluation_capacity_factor: 4.0 needs model.feed_f"),
        (["router_noise=-1"], "router_noise: -1 is not allowed: input should be greater than or"),
        (["expert_dropout=1"], "expert_dropout: 1 is not allowed: input should be less than 1"),
        (
            ["pool=documents"],
            "pool: 'documents' is not allowed: input should be 'none', 'document'",
        ),
        (["pool_least=4"], "pool_least: 4 needs model.feed_forward.pool, which is none"),
        (["pool_most=4"], "pool_most: 4 needs model.feed_forward.pool, which is none"),
        (["pool=prefix", "pool_least=1"], "pool_least: 1 is less than the 2 experts that a token"),
        (
            ["pool=prefix", "pool_least=3", "final_top_k=4"],
            "pool_least: 3 is less than the 4 experts that a token uses",
        ),
        (["pool=prefix", "pool_most=17"], "pool_most: 17 is more than model.feed_forward.num_exp"),
        (
            ["pool=prefix", "pool_least=8", "pool_most=4"],
            "pool_least: 8 is more than model.feed_forward.pool_most: 4",
        ),
        (
            ["pool=prefix", "score_function=sigmoid"],
            "pool: prefix is not allowed with model.feed_forward.score_function: sigmoid: a mean",
        ),
        (
            ["pool=prefix", "num_groups=4"],
            "pool: prefix is not allowed with model.feed_forward.num_groups: 4: the best groups",
        ),
        (
            ["pool=prefix", "router_noise=1"],
            "pool: prefix is not allowed with model.feed_forward.router_noise: 1.0: the load that",
        ),
        (
            ["pool=document"],
            "pool: document makes routing in training depend on the tokens to be predicted, "
            "which is not allowed in a language model; allowed: none, prefix",
        ),
        (["placement=0"], "placement: 0 is not allowed: 1 or more, or a list of block numbers"),
        (["placement=all"], "placement: 'all' is not allowed: 1 or more, or a list of block num"),
        (["placement=[1, -1]"], "placement: [1, -1] is not allowed: 1 or more, or a list of bl"),
        (["placement=5"], "placement: 5 is not allowed: the model has blocks 0 to 3, and at"),
        (["placement=[]"], "placement: [] is not allowed: the model has blocks 0 to 3, and at"),
        (["placement=[1, 4]"], "placement: [1, 4] is not allowed: the model has blocks 0 to 3"),
        (["placement=[1, 1]"], "placement: [1, 1] names a block twice"),
        (
            ["kind=dence"],
            "kind: 'dence' is not allowed: dense, mumoe, smoe, emoe, mxd or transcoder",
        ),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_allowed(overrides, expected):
    assert_refused("smoe", overrides, expected)


def test_a_model_that_predicts_no_next_token_may_drop():
    SparseMoEConfig(capacity_factor=1.25).check_model(num_layers=4, num_heads=4, causal=False)


def test_a_capacity_may_be_another_one_in_evaluation():
    config = SparseMoEConfig(capacity_factor=1.05, evaluation_capacity_factor=4.0)
    assert (config.capacity(True), config.capacity(False)) == (1.05, 4.0)
    config = SparseMoEConfig(capacity_factor=1.05)
    assert (config.capacity(True), config.capacity(False)) == (1.05, 1.05)
    assert SparseMoEConfig().capacity(True) is None


@pytest.mark.parametrize("noise", ["0.0", "1.0"])
def test_the_load_loss_needs_a_router_with_noise(noise):
    config = run_of("smoe", "loss.load=0.005", f"{KEY}router_noise={noise}")
    if noise == "1.0":
        validate(config, 1)
    else:
        with pytest.raises(ConfigError, match=r"^loss\.load: 0\.005 depends on .* router_noise"):
            validate(config, 1)


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
