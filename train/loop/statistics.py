"""What the processes tell each other of a step: one vector, one all-reduce, one copy to the host.

    loss, routing statistics            means over the micro-batches of the step and all processes
    numbers of process 0, 1, ...        what each alone knows: its memory, a signal it got

Routers are updated from the vector on the device. The host's copy is made meanwhile, and read when
the next step is under way, so that a GPU never waits for the host.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyad.model.output import RoutingStats
from polyad.parallel import comm

Routing = tuple[RoutingStats, ...]
PART = 20
"""Bits of a number's lower half: fp32 holds whole numbers up to 24 bits, and sums of them with
zeros."""


OF_MICRO_BATCHES = frozenset({"tokens", "similarity_loss"})
"""Fields of statistics that are not means over tokens."""


class StepNumbers(NamedTuple):
    """The vector on the host."""

    loss: float
    routing: Routing
    """On the CPU."""
    of_each: list[list[int]]
    """The numbers of each process."""


class Exchanged:
    """The vector after its exchange, the same on every process.

    Args:
        vector: On the device.
        routing: A micro-batch's statistics, whose shapes those of the step have.
        own: How many numbers each process added.
    """

    def __init__(self, vector: Tensor, routing: Routing, own: int) -> None:
        self._shapes, self._own = routing, own
        self._read: StepNumbers | None = None
        self.routing = _cut(vector, routing)
        """Averaged over the step, on the device."""
        self._ready: torch.cuda.Event | None = None
        self._host = vector
        if vector.is_cuda:
            self._host = torch.empty_like(vector, device="cpu", pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._ready is None or bool(self._ready.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepNumbers:
        """Waits until the copy has come, if it has not."""
        if self._read is None:
            if self._ready is not None:
                self._ready.synchronize()
            routing = _cut(self._host, self._shapes)
            parts = self._host[len(self._host) - 2 * self._own * comm.size() :].tolist()
            pairs = zip(parts[::2], parts[1::2], strict=True)
            whole = [(int(high) << PART) + int(low) for high, low in pairs]
            each = [whole[i : i + self._own] for i in range(0, len(whole), self._own or 1)]
            self._read = StepNumbers(self._host[0].item(), routing, each)
        return self._read


class StepStatistics:
    """Sums over the micro-batches of a step.

    Where all micro-batches have equally many tokens, means of means are means over tokens. Where
    they do not, for padding, each counts by its tokens.

    Args:
        device: Of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._last: Routing = ()
        self._sum = torch.zeros(1, device=device)
        self._count = 0

    def add(self, loss: Tensor, routing: Routing) -> None:
        """Adds a micro-batch.

        Args:
            loss: The mean over its targets.
            routing: As the model returned it.
        """
        parts = [loss, *(value for stats in routing for value in _weighted(stats))]
        flat = torch.cat([part.detach().reshape(-1).float() for part in parts])
        self._sum = flat if self._count == 0 else self._sum + flat
        self._last, self._count = routing, self._count + 1

    def exchange(self, own: Sequence[int] = ()) -> Exchanged:
        """Averages over micro-batches and processes; every process calls it.

        Args:
            own: Numbers of this process, not negative and below 2^44; as many on each.
        """
        size, first = comm.size(), 2 * len(own) * comm.rank()
        halves = torch.zeros(2 * len(own) * size, pin_memory=self._sum.is_cuda)
        for place, number in enumerate(own):
            halves[first + 2 * place] = number >> PART
            halves[first + 2 * place + 1] = number & ((1 << PART) - 1)
        mean = self._sum / (self._count * size)
        vector = torch.cat([mean, halves.to(mean.device, non_blocking=True)])
        return Exchanged(comm.sum_over_ranks(vector), self._last, len(own))


def _weighted(stats: RoutingStats) -> Iterator[Tensor]:
    """Its tensors, times the tokens that they are means over where that is not always the same."""
    for name, value in tensors_of(stats).items():
        if stats.tokens is None or name in OF_MICRO_BATCHES:
            yield value
        else:
            yield value * stats.tokens


def _cut(vector: Tensor, like: Routing) -> Routing:
    """The statistics in a vector, after its first number."""
    first, routing = 1, []
    for stats in like:
        values = {}
        for name, value in tensors_of(stats).items():
            values[name] = vector[first : first + value.numel()].view(value.shape)
            first += value.numel()
        if stats.tokens is not None:
            tokens = values["tokens"]
            values = {n: v if n in OF_MICRO_BATCHES else v / tokens for n, v in values.items()}
        routing.append(RoutingStats(**(stats._asdict() | values)))
    return tuple(routing)


def tensors_of(stats: RoutingStats) -> dict[str, Tensor]:
    """Those of its fields that the layer has, by name."""
    return {name: value for name, value in stats._asdict().items() if isinstance(value, Tensor)}
