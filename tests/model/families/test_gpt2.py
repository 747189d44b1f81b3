"""Names and config.json of Hugging Face's GPT-2, against transformers itself."""

import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from polyad.model.decoder import GPT2Config
from polyad.model.families.decoders import GPT2
from polyad.model.families.family import Known
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_files

SIZES = {
    "124m": (12, 768, 12, 124_439_808),
    "355m": (24, 1024, 16, 354_823_168),
    "774m": (36, 1280, 20, 774_030_080),
    "1558m": (48, 1600, 25, 1_557_611_200),
}


def stored_shapes(config):
    """Names and shapes that a file of transformers would have."""
    pieces = [
        piece
        for name, shape in GPT2.parameter_shapes(config).items()
        for piece in GPT2.pieces(name, shape)
    ]
    return {GPT2.stored_name(piece.name, config): piece.shape for piece in pieces}


def read(tree, origin="x"):
    return family_of_files(tree, origin).read_config(tree, lambda name: None, origin)


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_equal_transformers_at_every_size(size):
    num_layers, hidden_size, num_heads, count = SIZES[size]
    config = GPT2Config(
        num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, vocab_size=50257
    )
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(
            TheirConfig(**GPT2.write_config(config, Known(end_of_text_id=50256)))
        )
    expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert stored_shapes(config) == expected
    assert sum(p.numel() for p in theirs.parameters()) == count


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "sequence_length": 20},
        {"dropout": 0.1, "layer_norm_epsilon": 1e-6, "initializer_range": 0.01},
        {"feed_forward": {"hidden_size": 40}},
        {"tied_embeddings": False},
    ],
)
def test_a_configuration_comes_back_as_it_was(overrides):
    config = GPT2Config.model_validate({"vocab_size": 61} | overrides)
    written = GPT2.write_config(config, Known(end_of_text_id=3))
    assert read(written) == config
    # And through their own class, which writes its defaults, aliases and version beside.
    theirs = TheirConfig(**written).to_dict()
    assert read(theirs) == config
    assert (theirs["bos_token_id"], theirs["eos_token_id"]) == (3, 3)


def test_what_is_not_said_is_what_transformers_takes():
    ours = read({"model_type": "gpt2"})
    theirs = TheirConfig()
    assert ours == read(theirs.to_dict())
    assert (ours.vocab_size, ours.dropout) == (50257, 0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, ["model_type", "'t5'", "gpt2, bert, vit"]),
        ({"model_type": None}, ["model_type", "None", "gpt2, bert, vit"]),
        ({"activation_function": "relu"}, ["activation_function", "'relu'", "'gelu_new'"]),
        ({"scale_attn_by_inverse_layer_idx": True}, ["by_inverse_layer_idx", "True", "False"]),
        ({"reorder_and_upcast_attn": True}, ["reorder_and_upcast_attn", "True", "False"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights", "False", "True"]),
        ({"add_cross_attention": True}, ["add_cross_attention", "True", "False"]),
        ({"tie_word_embeddings": "loosely"}, ["tie_word_embeddings", "'loosely'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"n_head": 5}, ["n_embd: 768", "n_head: 5"]),
        ({"n_layer": "12"}, ["n_layer", "'12'"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"n_inner": -1}, ["n_inner", "-1"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({f"{kind}_pdrop": [1] for kind in ("resid", "embd", "attn")}, ["resid_pdrop", "[1]"]),
    ],
)
def test_another_architecture_is_refused_by_name_and_value(change, words):
    with pytest.raises(WeightsError) as caught:
        read({"model_type": "gpt2"} | change, "somewhere/config.json")
    text = str(caught.value)
    assert text.startswith("somewhere/config.json: ")
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert not any(ours in text for ours in ("model.", "num_heads", "hidden_size")), text
    assert caught.value.exit_status == 2
