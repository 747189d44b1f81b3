"""BatchNorm of a gate's scores over all data-parallel processes, with the result of a single one.

Each normalizes by the mean and the variance over the micro-batches of all, which have equally many
tokens. Sums of two vectors of S numbers are exchanged forward, and their gradients backward.

Shapes: M tokens of this process, S experts of all levels.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from model.mumoe.gating import BatchNorm, Gate
from parallel import comm


def synchronize_norms(model: nn.Module, world: comm.World) -> None:
    """Replaces each BatchNorm of a model by one over all data-parallel processes, in place.

    Args:
        model: on the meta device.
        world: this process.
    """
    if world.data_parallel_size == 1:
        return
    for gate in model.modules():
        if isinstance(gate, Gate) and isinstance(gate.norm, BatchNorm):
            with torch.device("meta"):
                gate.norm = SynchronizedBatchNorm(gate.norm, world)


class SynchronizedBatchNorm(BatchNorm):
    """BatchNorm over the tokens of all data-parallel processes.

    Args:
        whole: the norm over the tokens of one process.
        world: this process.
    """

    def __init__(self, whole: BatchNorm, world: comm.World) -> None:
        super().__init__(whole.num_experts)
        self._world = world

    def moments(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """See `BatchNorm.moments`; gradients are averaged over the processes, as those of weights
        are.
        """
        here_S, variance_S = super().moments(scores_MS)
        mean_S = _Mean.apply(here_S, self._world)
        # The local variance is around the local mean; around the mean of all it is larger.
        return mean_S, _Mean.apply(variance_S + (here_S - mean_S).square(), self._world)


class _Mean(torch.autograd.Function):
    """The mean over data-parallel processes.

    Each has the gradient of its own loss, and the loss of all is their mean: so the gradient of
    what a process gave is the mean of the gradients, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: comm.World) -> Tensor:
        ctx.world = world
        return _mean(x, world)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _mean(gradient, ctx.world), None


def _mean(x: Tensor, world: comm.World) -> Tensor:
    total = collectives.all_reduce(x, "sum", _group(world))
    return collectives.wait_tensor(total) / world.data_parallel_size


def _group(world: comm.World) -> Any:
    if world.tensor_parallel_size == 1:
        return dist.group.WORLD
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()
