"""BatchNorm of gates: n data-parallel processes compute what one computes with all tokens."""

import pytest

from polyad.model.decoder_config import GPT2Config
from polyad.model.mumoe.config import MuMoEConfig
from tests.helpers.everyday import everyday
from tests.helpers.factors import batch_norm_against_the_whole
from tests.helpers.training import MODEL

pytestmark = pytest.mark.distributed


def with_batch_norm(**changes) -> GPT2Config:
    """A language model refuses such a gate: so it is put into it past the check."""
    options = {"num_experts": (5, 2), "rank": 8, "hidden_size": 24, "gate_norm": "batch"}
    return MODEL.model_copy(update={"feed_forward": MuMoEConfig(**(options | changes))})


@pytest.mark.parametrize("model", [with_batch_norm(), with_batch_norm(factorization="tr")])
@everyday(("processes", "tensor"), [(2, 1), (4, 1), (4, 2)], keep=[(4, 2)])
def test_output_gradients_and_statistics_are_those_of_all_tokens(workers, model, processes, tensor):
    for result in workers(processes).run(batch_norm_against_the_whole, model, tensor, 6):
        assert max(result.values()) < 1e-10, result


def test_processes_with_more_tokens_than_others_count_for_more(workers):
    for result in workers(2).run(batch_norm_against_the_whole, with_batch_norm(), 1, 3, 9):
        assert max(result.values()) < 1e-10, result
