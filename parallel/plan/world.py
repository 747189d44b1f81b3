"""A simulated process group, in which this process plays one rank.

Which token chooses which expert is unknown, so the numbers of exchanged rows are assumed.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyad.model.smoe.dispatch import Plan
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm
from polyad.parallel.dims import Dims
from polyad.parallel.exchange import Counts, RowExchange
from polyad.parallel.megatron import forget_groups, join_groups
from polyad.parallel.zero import forget_world, import_engine


@contextmanager
def pretended_world(dims: Dims, rank: int = 0) -> Iterator[comm.World]:
    """Creates a process group of `dims.world_size` within the context; nothing is sent.

    Libraries keep groups in globals, which are restored when the context ends. There must be no
    process group yet.

    Args:
        dims: The layout.
        rank: The rank of this process.

    Yields:
        This rank, on a CPU.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import_engine()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this kind of group does not support a timeout
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


class AssumedExchange(RowExchange):
    """Exchanges the rows that a plan assumes: even shares are sent, and more than that may arrive.

    Args:
        exchange: The exchange that it replaces.
        imbalance: Number of rows that arrive, relative to the mean of all ranks.
        capacity: Maximum rows to keep, relative to an even share; None for no limit.
    """

    def __init__(self, exchange: RowExchange, imbalance: float, capacity: float | None) -> None:
        self.__dict__ = exchange.__dict__  # the group is created later
        most = imbalance if capacity is None else capacity
        self._leave, self._arrive = min(1.0, most), min(imbalance, most)

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers of rows, and replaces them by the assumed ones."""
        begun = super().begin(plan)
        rows = plan.assignment_M.shape[0]
        send = _shares(round(rows * self._leave), self.parts)
        receive = _shares(round(rows * self._arrive), self.parts)
        return begun._replace(numbers=torch.tensor([send, receive]))


def _shares(total: int, parts: int) -> list[int]:
    """Splits a total into parts that differ by at most 1."""
    whole, places = divmod(total, parts)
    return [whole + (place < places) for place in range(parts)]


def assume_rows(model: nn.Module, imbalance: float) -> None:
    """Makes all expert-parallel layers of a model exchange assumed rows, in place.

    Args:
        model: A model whose layers are split over ranks.
        imbalance: Number of rows that arrive at this rank, relative to the mean of all.
    """
    for layer in model.modules():
        if isinstance(layer, SelectingMoE):
            exchange = getattr(layer.dispatcher, "_exchange", None)
            if isinstance(exchange, RowExchange):
                assumed = AssumedExchange(exchange, imbalance, layer.config.capacity_factor)
                layer.dispatcher._exchange = assumed  # type: ignore[assignment]
