"""GPT-2 against transformers, and what every decoder owes. Other decoders of transformers are in
`tests/parallel/families`."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.model.attention import KeyValueCache
from polyad.model.build import num_parameters
from polyad.model.decoder import Decoder, GPT2Config
from polyad.train.tasks.random_input import flops_of_unit
from tests.helpers.random_model import built
from tests.helpers.reference import reference_of
from tests.helpers.small_decoders import small_decoder


@pytest.mark.parametrize(
    ("overrides", "batch", "length"),
    [
        ({}, 2, 16),
        ({"num_layers": 1, "num_heads": 1}, 1, 1),
        ({"hidden_size": 48, "num_heads": 3, "vocab_size": 130}, 3, 9),
        ({"feed_forward": {"kind": "dense", "hidden_size": 40}}, 2, 5),
        ({"tied_embeddings": False}, 2, 7),
    ],
)
def test_logits_and_gradients_equal_transformers_on_the_same_weights(
    small_model, random_ids, overrides, batch, length
):
    model = small_model(**overrides)
    with torch.no_grad():  # far from the initial values: biases count, attention is not uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    reference, renamed = reference_of(model)
    ids = random_ids(batch, length)
    logits = model(ids).logits
    expected = reference(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    targets = ids.flip(0).flatten()
    cross_entropy(logits.flatten(0, 1), targets).backward()
    cross_entropy(expected.flatten(0, 1), targets).backward()
    for name, parameter in model.named_parameters():
        theirs, transposed = renamed[name]
        gradient = theirs.grad.T if transposed else theirs.grad
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4)


def test_input_longer_than_the_positions_is_refused(small_model, random_ids):
    model, cache = small_model().eval(), KeyValueCache(3, 16)
    with torch.no_grad():
        model(random_ids(1, 15), cache)
    for given in ((random_ids(1, 17),), (random_ids(1, 2), cache)):
        with pytest.raises(ValueError, match=r"17 tokens; model\.sequence_length"):
            model(*given)


def test_a_padding_token_gets_no_gradient_and_starts_at_zero():
    model = built(small_decoder("grouped"))  # whose `pad_id` is 3
    model(torch.tensor([[3, 5, 3, 6]])).logits.sum().backward()
    embedding = model.token_embedding.weight
    assert not embedding[3].any()
    assert not embedding.grad[3].any()
    assert embedding.grad[5].any()


def test_no_bias_anywhere_when_switched_off(small_model):
    names = [name for name, _ in small_model(bias=False).named_parameters()]
    assert not any(name.endswith("bias") for name in names)


def test_dropout_acts_in_training_only(small_model, random_ids):
    model = small_model(dropout=0.3)
    ids = random_ids(2, 16)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    torch.testing.assert_close(model(ids).logits, small_model()(ids).logits)


@pytest.mark.parametrize("use", [Decoder, flops_of_unit, num_parameters])
def test_missing_vocabulary_size_is_refused(use):
    with pytest.raises(ValueError, match=r"model\.vocab_size is not set"):
        use(GPT2Config(num_layers=1))
