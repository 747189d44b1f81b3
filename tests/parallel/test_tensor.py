"""Tensor parallelism: shares, padding of the vocabulary, dropout, recomputation."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from polyad.model.bert import BertConfig
from polyad.parallel.config import Dims
from polyad.parallel.plan import pretended_world
from tests.helpers.bert import padded_input
from tests.helpers.training import MODEL, Case, build_engine, inspect_shards, local_losses


def scores_of_padded(case: Case, targets: list[list[int]]) -> dict[str, Any]:
    """The loss of hidden tokens in padded input, whether each is the best guess, and that guess."""
    engine, _ = build_engine(case)
    engine.train(False)
    ids, mask, segments = padded_input()
    positions = torch.tensor([[1, 15], [3, 10], [0, 0]])
    with torch.no_grad():
        logits = engine(ids, mask, segments, positions).logits
        both = engine(ids, mask, segments, positions, torch.tensor(targets)).logits
        losses = engine.cross_entropy(logits, torch.tensor(targets))
    torch.testing.assert_close(both[..., 0], losses)
    return {
        "losses": losses.tolist(),
        "right": both[..., 1].tolist(),
        "best": logits.argmax(-1).tolist(),  # where the vocabulary is cut: of this part
    }


def groups_of_many_processes(dims: Dims) -> int:
    """How many groups a process is asked to make where there are very many; nothing is sent."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made, pretended_world(dims):
        return int(made.call_count)


pytestmark = pytest.mark.distributed

# Large enough that what is replicated is small, and a vocabulary that 2 does not divide.


def test_dropout_is_equal_where_replicated_and_differs_where_cut(workers):
    results = workers(4).run(inspect_shards, Case(tensor=2, dropout=0.5))
    first, second, third, _ = results
    assert first["replicated"] == second["replicated"] != third["replicated"]
    assert first["cut"] != second["cut"]
    assert first["after"] == second["after"]  # the replicated stream goes on in step
    assert 0.0 in first["cut"]


@pytest.mark.parametrize(
    ("vocab_size", "length", "shared"),
    [(61, 17, {}), (62, 17, {}), (3, 17, {})]
    + [(61, length, {"sequence": True}) for length in (16, 15)],
)
def test_losses_are_those_of_whole_logits(workers, vocab_size, length, shared):
    # 61 and, over 4 processes, 62 and 3 need padding; with 3 the last process has nothing else.
    model = MODEL.model_copy(update={"vocab_size": vocab_size, "sequence_length": length})
    expected = torch.tensor(workers(1).run(local_losses, Case(model=model), 0)[0])
    for losses in workers(4).run(local_losses, Case(model=model, tensor=4, **shared), 0):
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("processes", "tensor"), [(8, 2), (64, 8), (1024, 8)])
def test_groups_do_not_grow_with_the_number_of_processes(processes, tensor):
    assert groups_of_many_processes(Dims(world_size=processes, tensor_parallel_size=tensor)) == 2


def test_a_cut_vocabulary_knows_the_best_guess(workers):
    bert = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 17}
    case = Case(model=BertConfig(**bert, vocab_size=61), micro_batch=8)
    asked = [[3, 60], [5, 6], [7, 8]]
    whole = workers(1).run(scores_of_padded, case, asked)[0]
    for targets in (asked, whole["best"]):
        expected = workers(1).run(scores_of_padded, case, targets)[0]
        for found in workers(2).run(scores_of_padded, case.but(tensor=2), targets):
            torch.testing.assert_close(
                torch.tensor(found["losses"]), torch.tensor(expected["losses"])
            )
            assert found["right"] == expected["right"]
    assert expected["right"] == [[1.0, 1.0]] * 3  # the last targets were the best guesses
