"""Values of `polyad convert`'s options that make no sense: one line, and nothing is written."""

import pytest

from tests.helpers.dense import TEXT, write_weights


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("dense") / "plain", TEXT)


UPCYCLE = [
    ("top_k=2", "num_experts "),
    ("num_experts=8,top_j=2", "model.feed_forward.top_j; the nearest is model.feed_forward.top_k"),
    ("num_experts=8,kind=smoe", "kind "),
    ("num_experts=8,top_k", "top_k: "),
    ("", "key=value"),
    ("num_experts=8,num_experts=9", "num_experts "),
    ("num_experts=8,placement=[1", "placement=[1: "),
    ("num_experts=8,top_k=9", "model.feed_forward.top_k: 9 "),
    ("num_experts=1", "model.feed_forward.num_experts: 1 "),
    ("num_experts=8,placement=[1,4]", "placement: [1, 4] "),
    ("num_experts=8,expert_hidden_size=64", "model.feed_forward.expert_hidden_size: 64 "),
    ("num_experts=8,placement=2,dense_hidden_size=127", "feed_forward.dense_hidden_size: 127 "),
    ("num_experts=8,capacity_factor=1.0", "allowed: null"),
    ("num_experts=8,noise=-0.1", "noise: -0.1 "),
    ("num_experts=8,noise=.nan", "noise: nan "),
    ("num_experts=8,seed=1.5", "seed: 1.5 "),
    ("num_experts=9000000000000000000", "more elements than a tensor can have"),
    ("num_experts=100000000000", " bytes, "),
]
SPLIT = [
    ("top_k=2", "num_experts "),
    ("num_experts=8,blcks=2", "model.feed_forward.blcks; the nearest is model.feed_forward.blocks"),
    ("num_experts=8,by=kmeans", "by: 'kmeans' "),
    ("num_experts=7,top_k=2", "model.feed_forward.num_experts: 7 "),
    ("num_experts=8,blocks=[1,4]", "model.feed_forward.blocks: [1, 4] "),
    ("num_experts=8,hidden_size=64", "model.feed_forward.hidden_size: 64"),
    ("num_experts=8,seed=-1", "seed: -1 "),
    ("num_experts=8,section=mlp", "section: 'mlp' "),
    ("num_experts=8,capacity_factor=1.5", "allowed: null"),
]
CASES = [("--upcycle", *case) for case in UPCYCLE] + [("--split", *case) for case in SPLIT]


@pytest.mark.parametrize(("option", "text", "key"), CASES)
def test_what_does_not_make_sense_is_one_line_and_leaves_nothing(
    source, tmp_path, refused, option, text, key
):
    line = refused("convert", source, tmp_path / "new", "--to", "polyad", f"{option}={text}")
    assert f"{option} {text}: " in line
    assert key in line
    assert list(tmp_path.iterdir()) == []
