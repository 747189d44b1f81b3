"""Tensor parallelism: shares, padding of the vocabulary, dropout, recomputation."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyad.model.bert import BertConfig
from polyad.model.build import num_parameters
from polyad.parallel import comm
from polyad.parallel.dims import Dims
from polyad.parallel.megatron import data_parallel_group, forget_groups, tensor_parallel_group
from polyad.parallel.plan import axes_of, pretended_world
from polyad.parallel.shard import Axis, Placement
from tests.helpers.bert import scores_of_padded
from tests.helpers.training import MODEL, Case, inspect_shards, local_losses, train


def groups_of_tensor_parallelism(size: int) -> dict[str, Any]:
    """What joining makes, and what it is asked for afterwards."""
    comm.initialize()
    forget_groups()
    before = len(distributed_c10d._world.pg_map)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        world = comm.initialize(tensor_parallel_size=size)
        comm.initialize(tensor_parallel_size=size)  # joins nothing again
    axes = axes_of(Dims(world_size=world.size, tensor_parallel_size=size), world.rank)
    tensor, data = tensor_parallel_group(), data_parallel_group()
    assert set(dist.get_process_group_ranks(tensor)) == axes["tensor"]
    assert set(dist.get_process_group_ranks(data)) == axes["data"]
    assert (tensor.rank(), data.rank()) == (world.tensor_parallel_rank, world.data_parallel_rank)
    return {
        "asked": made.call_count,
        "held": len(distributed_c10d._world.pg_map) - before,
        "names": [tensor.group_desc, data.group_desc],
    }


def groups_of_many_processes(dims: Dims) -> int:
    """How many groups a process is asked to make where there are very many; nothing is sent."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made, pretended_world(dims):
        return int(made.call_count)


pytestmark = pytest.mark.distributed

# Large enough that what is replicated is small, and a vocabulary that 2 does not divide.
WIDE = MODEL.model_copy(update={"hidden_size": 128, "vocab_size": 1001})


def gathered(places, shards):
    """The global tensor, put together from all shards; -1 where nothing lies."""
    whole = torch.full(places[0].global_shape, -1)
    for place, shard in zip(places, shards, strict=True):
        flat = shard.reshape(-1)
        for first, (offset, size) in place.boxes(0, flat.numel()):
            box = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
            assert whole[box].eq(-1).all()
            whole[box] = flat[first : first + whole[box].numel()].view(size)
    return whole


def test_fused_rows_are_split_by_matrix():
    whole = torch.arange(24).view(12, 2)  # three matrices of 4 rows
    parts = [Placement.cut((12, 2), {0: Axis.part_of_each(12, 3, rank, 2)}) for rank in (0, 1)]
    # By hand: the first process has rows 0, 1 of each matrix.
    shards = [whole[[0, 1, 4, 5, 8, 9]], whole[[2, 3, 6, 7, 10, 11]]]
    assert torch.equal(gathered(parts, shards), whole)


def test_columns_are_split_evenly():
    whole = torch.arange(24).view(4, 6)
    parts = [Placement.cut((4, 6), {1: Axis.part(6, rank, 3)}) for rank in range(3)]
    assert torch.equal(gathered(parts, whole.split(2, dim=1)), whole)


@pytest.mark.parametrize(("rows", "parts"), [(5, 2), (6, 2), (5, 4), (2, 4)])
def test_padding_is_in_no_box(rows, parts):
    whole = torch.arange(rows * 3).view(rows, 3)
    axes = [Axis.part_of_vocabulary(rows, rank, parts) for rank in range(parts)]
    places = [Placement.cut((rows, 3), {0: axis}) for axis in axes]
    size = places[0].shape[0]
    padded = torch.cat([whole, torch.full((size * parts - rows, 3), -7)])
    assert torch.equal(gathered(places, padded.split(size)), whole)


def test_any_range_of_a_shard_is_covered_in_order():
    place = Placement.cut((12, 2), {0: Axis.part_of_each(12, 3, 1, 2)})
    flat = torch.arange(24).view(12, 2)[[2, 3, 6, 7, 10, 11]].reshape(-1)
    whole = torch.arange(24).view(12, 2)
    for start in range(13):
        for stop in range(start, 13):
            found = [
                whole[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))].reshape(-1)
                for _, (o, s) in place.boxes(start, stop)
            ]
            expected = flat[start:stop].tolist()
            assert (torch.cat(found).tolist() if found else []) == expected


def test_scalars_and_vectors_have_a_shard():
    assert list(Placement.whole(()).boxes(0, 1)) == [(0, ((), ()))]
    assert list(Placement.whole((5,)).boxes(1, 4)) == [(1, ((1,), (3,)))]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_holds_its_share_and_5_percent(workers, size):
    total = num_parameters(WIDE)
    for result in workers(size).run(inspect_shards, Case(tensor=size, model=WIDE)):
        assert result["elements"] <= total * (1 / size + 0.05)


def test_dropout_is_equal_where_replicated_and_differs_where_cut(workers):
    results = workers(4).run(inspect_shards, Case(tensor=2, dropout=0.5))
    first, second, third, _ = results
    assert first["replicated"] == second["replicated"] != third["replicated"]
    assert first["cut"] != second["cut"]
    assert first["after"] == second["after"]  # the replicated stream goes on in step
    assert 0.0 in first["cut"]


@pytest.mark.parametrize("vocab_size", [61, 62, 3])
def test_losses_are_those_of_whole_logits(workers, vocab_size):
    # 61 and, over 4 processes, 62 and 3 need padding; with 3 the last process has nothing else.
    model = MODEL.model_copy(update={"vocab_size": vocab_size})
    expected = torch.tensor(workers(1).run(local_losses, Case(model=model), 0)[0])
    for losses in workers(4).run(local_losses, Case(model=model, tensor=4), 0):
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_recomputation_drops_the_same_units(workers):
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0, tensor=2, dropout=0.3)
    expected = workers(2).run(train, case)[0]
    model = MODEL.model_copy(update={"recompute": "block"})
    actual = workers(2).run(train, case.but(model=model))[0]
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-6)


@pytest.mark.parametrize(("processes", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_a_process_makes_the_two_groups_that_it_is_in(workers, processes, tensor):
    for found in workers(processes).run(groups_of_tensor_parallelism, tensor):
        assert found == {"asked": 2, "held": 2, "names": ["tensor parallel", "data parallel"]}


@pytest.mark.usefixtures("no_process_group")
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
