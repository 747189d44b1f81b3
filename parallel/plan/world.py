"""A world of processes that are not there, of which this one plays a rank."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyad.parallel import comm
from polyad.parallel.dims import Dims
from polyad.parallel.megatron import forget_groups, join_groups
from polyad.parallel.zero import forget_world, import_engine


@contextmanager
def pretended_world(dims: Dims, rank: int = 0) -> Iterator[comm.World]:
    """Inside this context there is a process group of `dims.world_size`, and nothing is sent.

    Libraries keep groups in globals; those are as before when the context ends. There must be no
    process group yet.

    Args:
        dims: The layout.
        rank: Of this process.

    Yields:
        This process, on a CPU.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import_engine()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this kind of group has no timeout to set
            if dims.tensor_parallel_size > 1:
                join_groups(dims.tensor_parallel_size)
            yield comm.World(
                rank,
                dims.world_size,
                0,
                torch.device("cpu"),
                dims.tensor_parallel_size,
                dims.expert_parallel_size,
            )
    finally:
        _forget_groups(dims)
        dist.destroy_process_group()


def _forget_groups(dims: Dims) -> None:
    if dims.tensor_parallel_size > 1:
        forget_groups()
    forget_world()
