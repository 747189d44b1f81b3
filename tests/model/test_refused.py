"""What a model's section refuses: in one line that names the key and its value."""

import pytest
import yaml

from polyad.model.build import read_model_config
from polyad.train.config.rules import validate
from polyad.train.errors import ConfigError
from tests.helpers.refusals import line_of
from tests.helpers.sections import KEY, run_of
from tests.model.test_contract import PLAIN

# The key that is named, with its value; behind & other changes.
REFUSED = {
    "smoe": [
        "top_k=17", "final_top_k=17", "final_top_k=2 & top_k=3", "top_k=0", "num_experts=1",
        "score=liner", "graph=atention", "tau=0", "expert_dropout=1", "kind=dence",
        "attention_head=0", "attention_head=4 & graph=attention",
        *(f"attention_head={head} & graph=attention" for head in ("-1", "1.0", "low")),
        "head_mean=false & graph=similarity", "capacity_factor=1.25", "capacity_factor=0",
        "evaluation_capacity_factor=4.0", "pool=documents", "pool=document", "pool_least=4",
        "pool_most=4", "pool_least=1 & pool=prefix", "pool_least=3 & pool=prefix & final_top_k=4",
        "pool_most=17 & pool=prefix", "pool_least=8 & pool=prefix & pool_most=4",
        *(f"pool=prefix & {other}=4" for other in ("num_groups", "router_noise")),
        "pool=prefix & score_function=sigmoid", "placement=0", "placement=all",
        "placement=[1, -1]", "placement=5", "placement=[]", "placement=[1, 4]", "placement=[1, 1]",
    ],
    "mumoe": [
        "rank=0", "rank=-3", "rank=2.5", "rank=match_dense", "num_experts=[0]",
        "num_experts=[8, -1]", "num_experts=[]", "num_experts=8", "num_experts=[8.0]",
        "expert_rank=0", "factorization=cpd", "gate=sparsemax", "gate_norm=batch",
        "expert_dropout=-0.1", "factor_scale=0",
        # Gate 32 x 300 = 9,600, rank 1: 2 x 300 + 322 = 922; together more than the dense block.
        "rank=match-dense & num_experts=[300]",
    ],
    "emoe": [
        "num_experts=1", "top_k=17", "num_experts=24", "num_experts=300",
        "num_experts=16 & hidden_size=2147483647", "blocks=[1, 4]", "blocks=[1, 1]", "blocks=5",
        "blocks=[]", "blocks=last", "score=random", "top_k=16 & select=not_top_k",
        "router_noise=1 & select=bottom_k", "capacity_factor=1.5",
        "evaluation_capacity_factor=2.0",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind, rows in REFUSED.items() for change in rows]
)
def test_a_bad_value_is_one_line_with_its_key(kind, change):
    line = line_of(ConfigError, run_of, kind, *(f"{KEY}{each}" for each in change.split(" & ")))
    key, _, value = change.split(" & ")[0].partition("=")
    assert line.startswith(f"run.yaml: {KEY}{key}: ")
    assert value in line.replace("'", "")
    assert line.count(f"{KEY}{key}") == 1


# Kind, processes, the key that is named with its value, and other changes.
MISFITS = [
    ("smoe", 1, "loss.load=0.005"),
    ("mumoe", 2, "parallel.expert_parallel_size=2"),
    *(
        ("mumoe", 2, f"parallel.tensor_parallel_size=2 & {KEY}rank=7{more}")
        for more in ("", f" & {KEY}factorization=tucker", f" & {KEY}factorization=tt")
    ),
    ("mumoe", 2, f"parallel.tensor_parallel_size=2 & {KEY}rank=8 & {KEY}hidden_size=9"),
    (
        *("mumoe", 2),
        f"parallel.tensor_parallel_size=2 & {KEY}factorization=tr & {KEY}rank=7 & "
        f"{KEY}expert_rank=3",
    ),
    ("emoe", 3, "parallel.expert_parallel_size=3"),
    ("emoe", 4, f"parallel.tensor_parallel_size=4 & {KEY}hidden_size=32 & {KEY}num_experts=16"),
    ("emoe", 1, "loss.load=0.1"),
]


@pytest.mark.parametrize(("kind", "processes", "change"), MISFITS)
def test_a_layout_or_a_loss_that_it_does_not_fit_is_one_line(kind, processes, change):
    changes = change.split(" & ")
    config = run_of(kind, "train.global_batch_size=12", *changes)
    line = line_of(ConfigError, validate, config, processes)
    assert line.startswith(changes[0].replace("=", ": "))


def test_a_router_with_noise_has_a_load_loss():
    validate(run_of("smoe", "loss.load=0.005", f"{KEY}router_noise=1.0"), 1)


# Kind of model, what is changed of it, and what is named.
SECTIONS = [
    ("gpt2", "{hidden_size: 770, num_heads: 12}", "model.hidden_size: 770"),
    *(
        ("gpt2", f"{{{key}: {value}}}", key)
        for key, value in (
            *(("hiden_size", 768), ("num_layers", 0), ("num_layers", "'12'"), ("dropout", 1.0)),
            *(("num_layers", "true"), ("sequence_length", -1), ("recompute", "all")),
            *(("compile", "'yes'"), ("feed_forward", "{kind: nothing}")),
            *(("feed_forward", "{hidden_size: 0}"), ("feed_forward", "{width: 10}")),
            *(("replaced", f"{{blocks: {blocks}}}") for blocks in ("[3]", "[1, 1]", "[]")),
        )
    ),
    ("gpt2", "{replaced: {blocks: [1], feed_forward: {kind: smoe, placement: 2}}}", "placement"),
    ("gpt2", "{replaced: {blocks: [1], feed_forward: {kind: mumoe, gate_norm: batch}}}", "batch"),
    *(
        ("gpt2", f"{{feed_forward: {{kind: mxd, {section}}}}}", key)
        for section, key in (
            ("num_experts: 8, top_k: 9", "top_k: 9"),
            ("num_experts: 4096, hidden_size: match-dense", "match-dense"),
            *(("num_experts: [8]", "num_experts"), ("hidden_size: dense", "hidden_size")),
        )
    ),
    ("bert", "{head: {kind: class}}", "'class'"),
    ("bert", "{head: {kind: language, masked_share: 1.0}}", "masked_share"),
    ("bert", "{sequence_length: 2}", "sequence_length"),
    *(
        ("decoder", f"{{feed_forward: {{kind: smoe, num_experts: 6, {section}}}}}", key)
        for section, key in (
            *(("num_groups: 4", "num_groups: 4"), ("num_groups: 3, top_groups: 4", "top_groups")),
            *(("num_groups: 6", "top_k: 2"), ("shared_gate: true", "shared_gate: true")),
            *(("swiglu_limit: 3.0", "swiglu_limit: 3"),),
            *(("score: cosine, router_dtype: model", "router_dtype: model"),),
        )
    ),
    ("decoder", "{num_key_value_heads: 3}", "num_key_value_heads"),
    ("decoder", "{head_size: 7}", "head_size: 7"),
    ("decoder", "{num_key_value_heads: 2, latent_attention: {key_value_rank: 8, plain_size: 4, "
                "rotated_size: 4, value_size: 5}}", "num_key_value_heads: 2"),
    ("decoder", "{head_bias: true, tied_embeddings: true}", "head_bias: true"),
    ("decoder", "{sliding_window: 3, sliding_window_blocks: [2]}", "sliding_window_blocks"),
    ("decoder", "{pad_id: 61}", "pad_id: 61"),
    ("decoder", "{attention_sinks: true, feed_forward: {kind: smoe, graph: attention}}", "graph"),
    ("vit", "{patch_size: 3}", "model.patch_size: 3"),
    ("vit", "{num_heads: 7}", "model.hidden_size: 32"),
    ("vit", "{feed_forward: {kind: smoe, placement: [8]}}", "model.feed_forward.placement: [8]"),
    *(
        ("mixer", f"{{{part}: {{kind: smoe, graph: attention}}}}", f"model.{part}.graph: attention")
        for part in ("channel_feed_forward", "token_feed_forward")
    ),
    ("mixture", "{num_experts: 1}", "num_experts"),
    ("mixture", "{top_k: 4}", "model.top_k: 4"),
    ("mixture", "{expert: {batch_norm: [0]}}", "model.expert.batch_norm"),
    ("mixture", "{expert: {convolutions: [4, 4, 4, 4]}}", "model.expert.convolutions"),
    ("mixture", "{expert: {kind: vit}}", "expert.kind"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "named"), SECTIONS)
def test_a_section_that_does_not_fit_names_its_key(kind, change, named):
    section = PLAIN[kind] | {"kind": kind} | yaml.safe_load(change)
    with pytest.raises(ValueError, match=r".") as caught:
        read_model_config(section)
    assert named in str(caught.value)
