"""What is asked of megatron-core, and what DeepSpeed asks of it."""

import warnings
from typing import Any


def tensor_parallel_library() -> Any:
    """`megatron.core.tensor_parallel`, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import tensor_parallel
    return tensor_parallel


def tensor_parallel_group() -> Any:
    """The processes that share this one's layers."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


class Mpu:
    """The interface that DeepSpeed asks about tensor parallelism, answered by megatron-core."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def get_model_parallel_group(self) -> Any:
        """Processes that share every layer."""
        return self._state.get_tensor_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        """This process's rank among those."""
        return self._state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """The number of processes that share every layer."""
        return self._state.get_tensor_model_parallel_world_size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        """Processes that hold the same part of the model and see different samples."""
        return self._state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        """This process's rank among those that see different samples."""
        return self._state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        """The number of processes that see different samples."""
        return self._state.get_data_parallel_world_size()
