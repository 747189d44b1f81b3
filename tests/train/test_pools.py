"""Runs with pools of experts: documents come from the data, and evaluation has no pools."""

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.parallel.weights import load_model
from tests.helpers.runs import refusal

pytestmark = pytest.mark.distributed
SECTION = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "pool_least": 2}
RUN_CHANGES = {"model__feed_forward": SECTION | {"pool": "prefix"}, "loss__load_balance": 0.1}


@pytest.fixture(scope="module")
def finished(run_of):
    return run_of(2, **RUN_CHANGES)


def test_documents_end_with_the_token_of_the_data(finished, prepared_path):
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    assert load_model(finished).config.end_of_text_id == end


@pytest.mark.slow
def test_evaluation_has_no_pools(finished):
    """The weights are those of a model without pools."""
    model = load_model(finished)
    section = model.config.feed_forward.model_copy(update={"pool": "none", "pool_least": None})
    free = type(model)(model.config.model_copy(update={"feed_forward": section}))
    free.load_state_dict(model.state_dict())
    ids_BT = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = free.eval()(ids_BT).logits
        torch.testing.assert_close(model(ids_BT).logits, plain)
        drawn = [model.train()(ids_BT).logits for _ in range(9)]  # some pools have all experts
    assert max((logits_BTV - plain).abs().max() for logits_BTV in drawn) > 1e-4


def test_another_end_of_documents_is_refused(workers, prepared_path, config):
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    text = refusal(workers(2), config, f"model.end_of_text_id={end + 1}")
    assert text.startswith(f"model.end_of_text_id: {end + 1} is not the token that ends documents")
    assert f"{end};" in text
    text = refusal(workers(2), config, "model.feed_forward.pool=document")
    assert "pool: document makes routing in training depend on the tokens to be" in text
