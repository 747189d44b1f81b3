import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.model.build import num_parameters
from polyad.model.decoder import Decoder
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import FeedForward
from polyad.model.output import RoutingStats
from polyad.train.tasks.random_input import flops_of_unit
from tests.helpers.reference import reference_of


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


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "num_heads", "count"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_parameter_count_equals_the_released_models(num_layers, hidden_size, num_heads, count):
    config = GPT2Config(
        num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, vocab_size=50257
    )
    assert num_parameters(config) == count


def test_embedding_and_head_are_one_parameter(small_model):
    model = small_model()
    vocabulary_sized = [name for name, p in model.named_parameters() if 61 in p.shape]
    assert vocabulary_sized == ["token_embedding.weight"]
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert all(parameter.dim() >= 1 for parameter in model.parameters())
    assert not any("expert" in name for name, _ in model.named_parameters())


def test_a_head_of_its_own_is_one_more_matrix_and_no_more_work(small_model):
    tied, untied = small_model(), small_model(tied_embeddings=False)
    names = {name for name, _ in untied.named_parameters()}
    assert names - {name for name, _ in tied.named_parameters()} == {"head.weight"}
    assert untied.head.weight.shape == untied.token_embedding.weight.shape
    assert not torch.equal(untied.head.weight, untied.token_embedding.weight)
    assert untied.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert flops_of_unit(tied.config) == flops_of_unit(untied.config)


def test_no_bias_anywhere_when_switched_off(small_model, random_ids):
    model = small_model(bias=False)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert model(random_ids(2, 16)).logits.isfinite().all()


def test_input_longer_than_the_positions_is_refused(small_model, random_ids):
    with pytest.raises(ValueError, match=r"17 tokens; model\.sequence_length allows at most 16"):
        small_model()(random_ids(1, 17))


def test_dense_model_reports_no_routing(small_model, random_ids):
    assert small_model()(random_ids(1, 4)).routing == ()


class Routed(FeedForward):
    """Sends everything to the second of two experts."""

    def forward(self, normalized_BTD, residual_BTD, given):
        stats = RoutingStats(name="", load_E=torch.tensor([0.0, 1.0]))
        return residual_BTD - normalized_BTD, stats


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_routing_is_reported_under_the_name_of_its_place(small_model, random_ids, recompute):
    model = small_model(recompute=recompute)
    model.blocks[0].feed_forward = Routed()
    model.blocks[2].feed_forward = Routed()
    routing = model(random_ids(1, 4)).routing
    assert [stats.name for stats in routing] == ["blocks.0.feed_forward", "blocks.2.feed_forward"]
    assert all(torch.equal(stats.load_E, torch.tensor([0.0, 1.0])) for stats in routing)


def test_dropout_acts_in_training_only(small_model, random_ids):
    model = small_model(dropout=0.3)
    ids = random_ids(2, 16)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    torch.testing.assert_close(model(ids).logits, small_model()(ids).logits)


def test_every_field_has_a_description():
    assert all(field.description for field in GPT2Config.model_fields.values())


@pytest.mark.parametrize("use", [Decoder, flops_of_unit, num_parameters])
def test_missing_vocabulary_size_is_refused(use):
    with pytest.raises(ValueError, match=r"model\.vocab_size is not set"):
        use(GPT2Config(num_layers=1))
