"""Gradients of a bf16 model at ZeRO stage 0, accumulated and summed over processes in fp32.

DeepSpeed has no such mode at stage 0: it accumulates micro-batches in bf16, and rounds the sum over
processes to bf16. At stages 1 to 3 it sums in fp32 if its configuration says so; see `zero.py`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from polyad.parallel import comm


class Fp32Gradients:
    """Collects gradients from autograd, and gives the fp32 master weights their mean.

    Args:
        engine: DeepSpeed's, at stage 0 in bf16. Its own reduction of gradients is turned off.
        bucket_size: elements that are summed over processes in one call.
        world: this process.
    """

    def __init__(self, engine: Any, bucket_size: int, world: comm.World) -> None:
        working = [p for group in engine.optimizer.fp16_groups for p in group]
        masters = [p for group in engine.optimizer.fp32_groups for p in group]
        self._pairs: list[tuple[Any, Any]] = list(zip(working, masters, strict=True))
        self._bucket_size, self._replicas = bucket_size, world.data_parallel_size
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        engine.enable_backward_allreduce = False
        for parameter in working:
            parameter.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor) -> None:
        """Called by autograd when a parameter's gradient of a micro-batch is complete."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sets the masters' gradients: the mean over all data-parallel processes, in fp32.

        Every process calls it, once a step. A parameter without a gradient here takes part with
        zeros, since other processes may have one. Experts are summed over the processes that hold
        the same ones, and divided by the number of all: each of those saw the tokens of many.
        """
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter, master in self._pairs:
            gradient = self._sums.pop(parameter, None)
            master.grad = torch.zeros_like(master) if gradient is None else gradient
            groups.setdefault(_replica_group(parameter), []).append(master)
        for group, masters in groups.items():
            alone = dist.get_world_size(group) == 1
            for bucket in _buckets([m.grad for m in masters], self._bucket_size):
                if alone:
                    torch._foreach_div_(bucket, self._replicas)
                    continue
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=group)
                flat /= self._replicas
                pieces = flat.split([gradient.numel() for gradient in bucket])
                for gradient, piece in zip(bucket, pieces, strict=True):
                    gradient.copy_(piece.view_as(gradient))


def _replica_group(parameter: Any) -> Any:
    """The processes that hold the same parameter and see other samples."""
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    if is_moe_param(parameter):
        return groups._get_expert_data_parallel_group(parameter.group_name)
    return groups._get_sequence_data_parallel_group()


def _buckets(gradients: list[Any], size: int) -> list[list[torch.Tensor]]:
    """Gradients in groups of at most `size` elements, or of one that is larger."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        if gradient.numel() > room or not buckets:
            buckets.append([])
            room = size
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets
