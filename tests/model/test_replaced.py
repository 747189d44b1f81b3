"""`model.replaced`: blocks with another feed-forward than the model's own."""

import pytest
import torch

from polyad.model.block import FEED_FORWARDS
from polyad.model.build import build_model, materialize, num_parameters
from polyad.model.decoder import DecoderConfig, GPT2Config
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.train.tasks.random_input import training_flops

MODEL = {
    "num_layers": 3, "hidden_size": 16, "num_heads": 2, "sequence_length": 12, "vocab_size": 50,
}  # fmt: skip
KINDS = {
    "dense": {"kind": "dense", "hidden_size": 24},
    "mumoe": {"kind": "mumoe", "num_experts": [4], "rank": 8},
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 24},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2},
}


def replaced(kind, blocks=(1,), model=GPT2Config, **changes):
    section = {"blocks": list(blocks), "feed_forward": KINDS[kind]}
    return model.model_validate(MODEL | {"replaced": section} | changes).filled()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [GPT2Config, DecoderConfig])
def test_replaced_blocks_have_the_other_feed_forward_and_the_rest_their_own(kind, model):
    config = replaced(kind, (0, 2), model)
    built = build_model(config)
    kinds = [type(block.feed_forward) for block in built.blocks]
    other, own = FEED_FORWARDS[kind].build, FEED_FORWARDS["dense"].build
    assert kinds == [other, own, other]
    assert num_parameters(config) == sum(p.numel() for p in built.parameters())
    assert model.model_validate(config.model_dump(mode="json")) == config
    assert training_flops(config) > 0
    materialize(built, 0)
    names = [stats.name for stats in built.eval()(torch.arange(12)[None]).routing]
    routed = [f"blocks.{block}.feed_forward" for block in (0, 2)]
    assert names == ([] if kind == "dense" else routed)


def test_a_dense_block_in_a_mixture_is_as_wide_as_it_says():
    config = replaced("dense", (1,), DecoderConfig, feed_forward=KINDS["smoe"])
    built = build_model(config)
    assert [each.kind for each in config.block_feed_forwards()] == ["smoe", "dense", "smoe"]
    assert built.blocks[1].feed_forward.up.out_features == 24
    assert config.known_feed_forward().kind == "smoe"


def test_other_libraries_have_no_such_model():
    for model in (GPT2Config, DecoderConfig):
        with pytest.raises(WeightsError, match=r"model\.replaced"):
            family_of_model(replaced("dense", model=model))


def test_tensor_parallelism_cuts_both_feed_forwards():
    keys = [key for choices in replaced("smoe").cut_sizes() for key in choices]
    assert "model.feed_forward.hidden_size" in keys
    assert "model.replaced.feed_forward.expert_hidden_size" in keys
