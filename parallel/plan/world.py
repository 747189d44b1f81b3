"""A world of processes that are not there, of which this one plays a rank.

Nobody knows which token chooses which expert, so the numbers of their rows are assumed.
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
    """Inside this context there is a process group of `dims.world_size`, and nothing is sent.

    Libraries keep groups in globals; those are as before when the context ends. There must be no
    process group yet.

    Args:
        dims: The layout.
        rank: The rank of this process.

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


class AssumedExchange(RowExchange):
    """Sends the rows that a plan assumes: even shares leave, and more than one may arrive.

    Args:
        exchange: The one that it stands for.
        imbalance: Rows that arrive, over the mean of all processes.
        capacity: Rows that are kept of an even share, at most; None: all.
    """

    def __init__(self, exchange: RowExchange, imbalance: float, capacity: float | None) -> None:
        self.__dict__ = exchange.__dict__  # the group is made after this
        most = imbalance if capacity is None else capacity
        self._leave, self._arrive = min(1.0, most), min(imbalance, most)

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers, and takes the assumed ones for them."""
        begun = super().begin(plan)
        rows = plan.assignment_M.shape[0]
        send = _shares(round(rows * self._leave), self.lots, self.parts)
        receive = _shares(round(rows * self._arrive), self.lots, self.parts)
        return begun._replace(numbers=torch.tensor([send, receive]))


def _shares(total: int, lots: int, parts: int) -> list[list[int]]:
    """Splits a total into parts that differ by at most 1."""
    whole, places = divmod(total, lots * parts)
    shares = [whole + (place < places) for place in range(lots * parts)]
    return [shares[lot * parts : (lot + 1) * parts] for lot in range(lots)]


def assume_rows(model: nn.Module, imbalance: float) -> None:
    """Has all expert-parallel layers of a model exchange assumed rows, in place.

    Args:
        model: Its layers are cut over processes.
        imbalance: Rows that arrive at this process, over the mean of all.
    """
    for layer in model.modules():
        if isinstance(layer, SelectingMoE):
            exchange = getattr(layer.dispatcher, "_exchange", None)
            if isinstance(exchange, RowExchange):
                assumed = AssumedExchange(exchange, imbalance, layer.config.capacity_factor)
                layer.dispatcher._exchange = assumed  # type: ignore[assignment]
