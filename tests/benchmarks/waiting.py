"""Where a process stands still in a step: when it came to each collective, and when it went on.

Of that time a part is waiting for the process that came last, and the rest is moving bytes. Every
collective is seen, whoever calls it: DeepSpeed, megatron-core, PyTorch's functional ones or ours.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from polyad.parallel.dims import Dims
from polyad.parallel.plan.traffic import Amount, Exchange, Traffic, group_of
from polyad.parallel.plan.weightless import Operation, Watched, tensors_in


class Call(NamedTuple):
    """A process's part in a collective; times are seconds of a clock that all processes share."""

    group: str
    """Its name and ranks, the same on all its processes."""
    exchange: Exchange
    began: float
    """The process has issued it."""
    waited: float
    """The process does nothing else from here on. Of one that is waited for at once, `began`."""
    returned: float
    """The process goes on; `waited` if nothing waits."""


class Stood(NamedTuple):
    """Seconds of a process in collectives."""

    waiting: float = 0.0
    """It stood still, and another process had not come yet."""
    moving: float = 0.0
    """It stood still, and all had come."""
    beside: float = 0.0
    """It computed between beginning one and waiting for it. They took at most as long."""

    def __add__(self, other: "Stood") -> "Stood":  # type: ignore[override]
        return Stood(*(a + b for a, b in zip(self, other, strict=True)))


class Step(NamedTuple):
    """A process's part in a step, on the clock that all share."""

    began: float
    ended: float
    calls: Sequence[Call]
    """In the order in which it began them."""


class Parts(NamedTuple):
    """Seconds of a process's step: the first three add up to the step."""

    computing: float
    """All else: arithmetic, reading data, and what Python takes."""
    waiting: float
    """See `Stood`; and what others had begun before it, and ended after it."""
    moving: float
    beside: float
    of: dict[Exchange, Stood]
    """By the kind of collective."""


def divide(steps: Sequence[Step]) -> list[Parts]:
    """Divides a step that processes did together, for each of them.

    The step goes from the first process's beginning to the last one's end.

    Args:
        steps: Of each process.
    """
    seconds = max(step.ended for step in steps) - min(step.began for step in steps)
    parts = []
    for step, of in zip(steps, _stood_still([step.calls for step in steps]), strict=True):
        stood = sum(of.values(), start=Stood())
        own = step.ended - step.began
        waiting = seconds - own + stood.waiting
        parts.append(
            Parts(own - stood.waiting - stood.moving, waiting, stood.moving, stood.beside, of)
        )
    return parts


def _stood_still(calls: Sequence[Sequence[Call]]) -> list[dict[Exchange, Stood]]:
    """Divides the time in collectives: before the last process of the group has come, and after.

    Processes of a group call its collectives in one order, so the n-th call of each is the same
    collective (messages from one process to another would not be; no step has any).
    """
    last: dict[tuple[str, int], float] = {}
    for numbered in map(_numbered, calls):
        for key, call in numbered:
            last[key] = max(call.began, last.get(key, call.began))
    found = []
    for numbered in map(_numbered, calls):
        spent: dict[Exchange, Stood] = defaultdict(Stood)
        for key, call in numbered:
            still = call.returned - call.waited
            waiting = min(still, max(0.0, last[key] - call.waited))
            spent[call.exchange] += Stood(waiting, still - waiting, call.waited - call.began)
        found.append(dict(spent))
    return found


def _numbered(calls: Sequence[Call]) -> Iterator[tuple[tuple[str, int], Call]]:
    numbers: dict[str, int] = defaultdict(int)
    for call in calls:
        yield (call.group, numbers[call.group]), call
        numbers[call.group] += 1


class _Clock:
    """The processor's clock, which all processes of a machine share."""

    def stamp(self) -> Any:
        """A moment."""
        return time.monotonic()

    def seconds(self, stamp: Any) -> float:
        """When that was."""
        return float(stamp)

    def is_beside(self) -> bool:
        """Whether what is issued here runs beside the step's own work."""
        return False


class _StreamClock(_Clock):
    """The moments at which a GPU comes to a point of a stream, on the clock of the processor."""

    def __init__(self) -> None:
        self._own = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._zero = self.stamp()
        torch.cuda.synchronize()
        self._at = time.monotonic()

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Any) -> float:
        stamp.synchronize()
        return self._at + float(self._zero.elapsed_time(stamp)) / 1000

    def is_beside(self) -> bool:
        return bool(torch.cuda.current_stream() != self._own)


class _Open:
    """A call under way, with stamps in place of times."""

    def __init__(self, began: Any, beside: bool) -> None:
        self.began, self.beside = began, beside
        self.waited: Any = None
        self.returned: Any = None
        self.group = ""
        self.exchange = Exchange("", "", "")


class Waiting(Watched):
    """Inside this context every collective of this process is noted, and counted as by `Traffic`.

    On a GPU times are those at which its stream comes to a collective and goes on. DeepSpeed sums
    gradients on a stream beside it: those are under way while others compute, and what the step
    waits for them at its end is not seen.

    Args:
        dims: The layout.
        rank: Of this process.
        device: That computes.
    """

    def __init__(self, dims: Dims, rank: int, device: torch.device) -> None:
        self.traffic = Traffic(dims, rank, self._named)
        super().__init__([self._grouped, self.traffic])
        self._clock = _StreamClock() if device.type == "cuda" else _Clock()
        self._calls: list[_Open] = []
        self._under_way: dict[Any, tuple[_Open, Any]] = {}
        self._latest: _Open | None = None
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> "Waiting":
        plain = Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            return self._wait(work, lambda: plain(work, *args, **kwargs))

        Work.wait = wait  # type: ignore[assignment,method-assign]
        self._restore = lambda: setattr(Work, "wait", plain)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._restore()

    def execute(self, operation: Operation) -> Any:
        """Does the operation, and notes the time if it is a collective or waits for one."""
        if "c10d" not in operation.function.namespace:
            self._latest = None
            return operation.run()
        if operation.name == "_c10d_functional::wait_tensor":
            return self._wait(operation.args[0].untyped_storage()._cdata, operation.run)
        call = _Open(self._clock.stamp(), self._clock.is_beside())
        result = operation.run()
        self._latest = call
        for key, kept in _waitable(result):
            self._under_way[key] = call, kept
        return result

    def _wait(self, key: Any, wait: Callable[[], Any]) -> Any:
        call, _ = self._under_way.pop(key, (None, None))
        if call is None:  # it was waited for before
            return wait()
        at_once = call is self._latest  # nothing was done since it began
        call.waited, self._latest = call.began if at_once else self._clock.stamp(), None
        result = wait()
        call.returned = self._clock.stamp()
        return result

    def _grouped(self, operation: Operation) -> None:
        if self._latest is not None and "c10d" in operation.function.namespace:
            group = group_of(operation)
            self._latest.group = f"{group.group_name} {dist.get_process_group_ranks(group)}"

    def _named(self, exchange: Exchange, amount: Amount) -> None:
        assert self._latest is not None
        self._latest.exchange = exchange
        self._calls.append(self._latest)

    def calls(self) -> list[Call]:
        """All calls, in the order in which they began."""
        seconds = self._clock.seconds
        found = []
        for call in self._calls:
            began = seconds(call.began)
            returned = began if call.returned is None else seconds(call.returned)
            waited = began if call.waited is None else seconds(call.waited)
            waited = returned if call.beside else waited
            found.append(Call(call.group, call.exchange, began, waited, returned))
        return found


def _waitable(result: Any) -> Iterator[tuple[Any, Any]]:
    """What is waited for, and what has to be kept so that its key stays its own."""
    parts = result if isinstance(result, tuple | list) else [result]
    for part in parts:
        if type(part).__name__ == "ScriptObject" and "Work" in str(part._type()):
            work = Work.unbox(part)
            yield work, work
            return
    for tensor in tensors_in(result):
        yield tensor.untyped_storage()._cdata, tensor
