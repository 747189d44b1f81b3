"""Values of `polyad convert`'s options that make no sense: one line, and nothing is written."""

import pytest

from polyad.launch.cli import run as polyad
from tests.helpers.dense import write_weights

DENSE = {
    "kind": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("dense") / "plain", DENSE)


UPCYCLE = [
    ("top_k=2", ["num_experts is missing, as in num_experts=8,top_k=2"]),
    ("num_experts=8,top_j=2", ["unknown key 'top_j'; the nearest is top_k"]),
    ("num_experts=8,zzz=2", ["unknown key 'zzz'; there are noise, seed, section, num_experts, "]),
    ("num_experts=8,kind=smoe", ["unknown key 'kind'"]),
    ("num_experts=8,top_k", ["'top_k' is not key=value, as in num_experts=8,top_k=2"]),
    ("", ["'' is not key=value"]),
    ("num_experts=8,num_experts=9", ["num_experts is given twice"]),
    ("num_experts=8,noise=1,noise=1", ["noise is given twice"]),
    ("num_experts=8,placement=[1", ["placement=[1: is not YAML"]),
    (
        "num_experts=8,top_k=9",
        ["model.feed_forward.top_k: 9 is more than model.feed_forward.num_experts: 8"],
    ),
    ("num_experts=1", ["model.feed_forward.num_experts: 1 is not allowed"]),
    ("num_experts=eight", ["model.feed_forward.num_experts: 'eight' is not allowed"]),
    ("num_experts=8,top_k=", ["model.feed_forward.top_k: None is not allowed"]),
    ("num_experts=8,top_k=1.5", ["model.feed_forward.top_k: 1.5 is not allowed"]),
    ("num_experts=8,score=dot", ["model.feed_forward.score: 'dot'", "'linear'"]),
    ("num_experts=8,placement=[1,4]", ["placement: [1, 4] is not allowed", "blocks 0 to 3"]),
    ("num_experts=8,placement=5", ["placement: 5 is not allowed", "at least one needs experts"]),
    (
        "num_experts=8,expert_hidden_size=64",
        ["model.feed_forward.expert_hidden_size: 64 does not fit", "plain have 128 inner units"],
    ),
    (
        "num_experts=8,placement=2,dense_hidden_size=127",
        ["model.feed_forward.dense_hidden_size: 127 does not fit", "128 inner units"],
    ),
    ("num_experts=8,expert_hidden_size=wide", ["expert_hidden_size: 'wide' is not allowed"]),
    ("num_experts=8,capacity_factor=1.0", ["allowed: null"]),
    ("num_experts=8,noise=-0.1", ["noise: -0.1 is not allowed", "greater than or equal to 0"]),
    ("num_experts=8,noise=.nan", ["noise: nan is not allowed", "finite number"]),
    ("num_experts=8,noise=nan", ["noise: 'nan' is not allowed", "valid number"]),
    ("num_experts=8,noise=.inf", ["noise: inf is not allowed", "finite number"]),
    ("num_experts=8,noise=some", ["noise: 'some' is not allowed", "valid number"]),
    ("num_experts=8,noise=true", ["noise: True is not allowed", "valid number"]),
    ("num_experts=8,noise=", ["noise: None is not allowed"]),
    ("num_experts=8,seed=-1", ["seed: -1 is not allowed"]),
    ("num_experts=8,seed=1.5", ["seed: 1.5 is not allowed"]),
    ("num_experts=9000000000000000000", ["asks for more elements than a tensor can have"]),
    (
        "num_experts=100000000000",
        ["makes a model of 13,416,000,000,125,184", " bytes; ", "has room for"],
    ),
]
SPLIT = [
    ("top_k=2", ["num_experts is missing, as in num_experts=64,top_k=16,blocks=[8,10]"]),
    ("num_experts=8,blcks=2", ["unknown key 'blcks'; the nearest is blocks"]),
    ("num_experts=8,by=kmeans", ["by: 'kmeans' is not allowed", "clustering", "random"]),
    ("num_experts=4,by=copies", ["--upcycle num_experts=4,top_k=2,score=cosine"]),
    (
        "num_experts=7,top_k=2",
        ["model.feed_forward.num_experts: 7 does not divide the inner width 128", "4, 8"],
    ),
    ("num_experts=8,blocks=[1,4]", ["model.feed_forward.blocks: [1, 4] is not", "blocks 0 to 3"]),
    ("num_experts=8,blocks=9", ["model.feed_forward.blocks: 9 is not", "blocks 0 to 3"]),
    ("num_experts=8,top_k=9", ["model.feed_forward.top_k: 9 is more than"]),
    ("num_experts=8,hidden_size=64", ["model.feed_forward.hidden_size: 64", "128 inner units"]),
    ("num_experts=8,seed=-1", ["seed: -1 is not allowed"]),
    (
        "num_experts=8,section=mlp",
        ["section: 'mlp' is not allowed: model.kind: gpt2 has feed_forward"],
    ),
    ("num_experts=8,capacity_factor=1.5", ["allowed: null"]),
]


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        (option, *case)
        for option, cases in (
            ("--upcycle", UPCYCLE),
            ("--split", SPLIT),
        )
        for case in cases
    ],
)
def test_what_does_not_make_sense_is_one_line_and_leaves_nothing(
    source, tmp_path, capfd, option, text, words
):
    command = ["convert", str(source), str(tmp_path / "new"), "--to", "polyad"]
    assert polyad([*command, f"{option}={text}"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert all(word in line for word in [f"{option} {text}: ", *words]), line
    assert list(tmp_path.iterdir()) == []
