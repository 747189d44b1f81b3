"""What Polyad uses of megatron-core, and the interface that DeepSpeed expects of it."""

import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


def join_groups(size: int) -> None:
    """Creates this process's two groups and registers them with megatron-core, unless they exist.

    These are the ranks that share its layers, and the ranks with the same part of other samples.
    megatron-core's own `initialize_model_parallel` creates one for every combination of its kinds
    of parallelism, on every process: 5,915 on 1,024 processes, each with a wait for all of them.

    Args:
        size: number of ranks that share layers; they are consecutive. All processes call it.
    """
    state = _state()
    group = state.get_tensor_model_parallel_group(check_initialized=False)
    if group is not None:
        if group.size() == size:
            return
        forget_groups()
    rank, total = dist.get_rank(), dist.get_world_size()
    first = rank - rank % size
    together, apart = range(first, first + size), range(rank % size, total, size)
    state._TENSOR_MODEL_PARALLEL_GROUP = _new_group(together, "tensor parallel")
    state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = list(together)
    state._DATA_PARALLEL_GROUP = _new_group(apart, "data parallel")
    state._DATA_PARALLEL_GLOBAL_RANKS = list(apart)


def forget_groups() -> None:
    """Makes megatron-core forget its groups."""
    _state().destroy_model_parallel()


def _new_group(ranks: Iterable[int], name: str) -> Any:
    """Creates a group that contains this process; processes outside of it do not know it.

    All processes create their group of a kind together: NCCL splits the world's communicator once.
    """
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)


def _state() -> Any:
    """`megatron.core.parallel_state`, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
    return parallel_state


def tensor_parallel_library() -> Any:
    """`megatron.core.tensor_parallel`, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import tensor_parallel
    return tensor_parallel


def tensor_parallel_group() -> Any:
    """Returns the group of ranks that share this one's layers."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def data_parallel_group() -> Any:
    """Returns the group of ranks that have the same part of every layer, and other samples."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def deepspeed_mpu() -> Any:
    """Returns the interface through which DeepSpeed learns about tensor parallelism."""
    tensor, data = tensor_parallel_group(), data_parallel_group()
    return SimpleNamespace(
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_rank=tensor.rank,
        get_model_parallel_world_size=tensor.size,
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=data.rank,
        get_data_parallel_world_size=data.size,
    )
