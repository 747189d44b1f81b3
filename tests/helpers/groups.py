"""Process groups of a layout, called in worker processes."""

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyad.parallel import comm
from polyad.parallel.dims import Dims
from polyad.parallel.megatron import data_parallel_group, forget_groups, tensor_parallel_group
from polyad.parallel.plan.traffic import axes_of
from polyad.parallel.plan.world import pretended_world


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
