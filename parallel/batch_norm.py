"""BatchNorm of a gate's scores, or of a convolution's channels, over all data-parallel processes,
with the result of a single one.

Each normalizes by the mean and the variance over the tokens of the micro-batches of all. With
padding some have more tokens than others, and count for more. Sums of S + 1 and of S numbers are
exchanged forward, and their gradients backward.

Shapes: M tokens of this process, S experts of all levels.
"""

import torch
from torch import Tensor, nn

from polyad.model.mumoe.gating import BatchNorm, Gate
from polyad.model.small_network import Convolution
from polyad.parallel import comm
from polyad.parallel.regions import data_group


def synchronize_norms(model: nn.Module, world: comm.World) -> None:
    """Replaces each BatchNorm of a model by one over all data-parallel processes, in place.

    Args:
        model: on the meta device.
        world: this process.
    """
    if world.data_parallel_size == 1:
        return
    for owner in model.modules():
        if isinstance(owner, Gate | Convolution) and isinstance(owner.norm, BatchNorm):
            with torch.device("meta"):
                owner.norm = SynchronizedBatchNorm(owner.norm, world)


class SynchronizedBatchNorm(BatchNorm):
    """BatchNorm over the tokens of all data-parallel processes.

    Args:
        whole: the norm over the tokens of one process.
        world: this process.
    """

    def __init__(self, whole: BatchNorm, world: comm.World) -> None:
        super().__init__(whole.num_experts, whole.epsilon)
        self._group = data_group(world)

    def moments(self, scores_MS: Tensor) -> tuple[Tensor, Tensor]:
        """See `BatchNorm.moments`; gradients are averaged over the processes, as those of weights
        are.
        """
        # At least fp32, in which numbers of tokens are exact.
        wide = torch.promote_types(scores_MS.dtype, torch.float32)
        here_S, variance_S = (moment_S.to(wide) for moment_S in super().moments(scores_MS))
        count_1 = here_S.new_full((1,), len(scores_MS))
        sums = self._group.mean(torch.cat([count_1 * here_S, count_1]))
        weight_1 = count_1 / sums[-1:].detach()  # of this process, 1 on average
        mean_S = sums[:-1] / sums[-1:].detach()
        # The local variance is around the local mean; around the mean of all it is larger.
        spread_S = weight_1 * (variance_S + (here_S - mean_S).square())
        return mean_S, self._group.mean(spread_S)
