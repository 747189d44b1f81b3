"""Communication volume: calls and bytes of every collective, in a real run or a plan."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from polyad.parallel.dims import Dims
from polyad.parallel.plan.weightless import Operation, tensors_in

KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all-gather",
    "allgather_base": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Common names of collectives, by their names in torch's dispatcher."""
_SECOND_READ = {"reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"}
_SECOND_READ |= {"alltoall", "alltoall_base"}


class Exchange(NamedTuple):
    """A kind of collective in a kind of group."""

    kind: str
    """One of `KINDS`."""
    axis: str
    """The group: `data`, `tensor`, `expert`, `expert data` (with the same experts) or `world`."""
    precision: str
    """The dtype, for example `bfloat16`."""


class Amount(NamedTuple):
    """Calls and bytes of one or several kinds of collective."""

    calls: int = 0
    payload: int = 0
    """Bytes that a rank passes in; for an all-gather the bytes that it gets, its own included."""
    sent: int = 0
    """Bytes that a rank sends in a ring algorithm, averaged over ranks."""

    def __add__(self, other: "Amount") -> "Amount":  # type: ignore[override]
        return Amount(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: int) -> "Amount":
        """Multiplies calls and bytes by a number."""
        return Amount(*(number * each for each in self))


Exchanges = Mapping[Exchange, Amount]


def sent_bytes(kind: str, payload: int, size: int) -> int:
    """Returns the bytes that a rank sends in a ring algorithm, averaged over the ranks of a group.

    An all-reduce is a reduce-scatter and an all-gather; rows of experts are assumed to be even
    (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").

    Args:
        kind: A value of `KINDS`.
        payload: See `Amount`.
        size: Number of ranks in the group.
    """
    if kind in {"send", "recv"}:
        return payload if kind == "send" else 0
    return (2 if kind == "all-reduce" else 1) * payload * (size - 1) // size


def axes_of(dims: Dims, rank: int) -> dict[str, frozenset[int]]:
    """Returns the groups of a rank by what their members share; of equal groups the first counts.

    Args:
        dims: The layout.
        rank: The rank.
    """
    cut, experts = dims.tensor_parallel_size, dims.expert_parallel_size
    here, together = rank // cut, rank % cut
    first = here - here % experts
    return {
        "data": frozenset(range(together, dims.world_size, cut)),
        "tensor": frozenset(range(here * cut, here * cut + cut)),
        "expert": frozenset(cut * r + together for r in range(first, first + experts)),
        "expert data": frozenset(
            range((here % experts) * cut + together, dims.world_size, experts * cut)
        ),
        "world": frozenset(range(dims.world_size)),
    }


class Traffic:
    """Counts collectives; an observer of `Watched`.

    Args:
        dims: The layout.
        rank: This rank.
        told: Called with each collective, if given.
    """

    def __init__(
        self, dims: Dims, rank: int, told: Callable[[Exchange, Amount], None] | None = None
    ) -> None:
        self._axes, self._told = axes_of(dims, rank), told
        self._groups: dict[str, tuple[str, int]] = {}
        self.calls: Counter[Exchange] = Counter()
        self.exchanges: dict[Exchange, Amount] = {}

    def __call__(self, operation: Operation) -> None:
        """Counts an operation, if it is a collective."""
        if "c10d" not in operation.function.namespace:
            return
        name = operation.name.rpartition("::")[2].strip("_")
        if name not in KINDS:
            return
        kind = KINDS[name]
        group = group_of(operation)
        axis, size = self._named(group, kind)
        tensors = _payload(name, operation.args)
        payload = sum(each.nbytes for each in tensors)
        if name == "all_gather_into_tensor":
            payload *= size
        precision = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        amount = Amount(1, payload, sent_bytes(kind, payload, size))
        key = Exchange(kind, axis, precision)
        self.exchanges[key] = self.exchanges.get(key, Amount()) + amount
        if self._told is not None:
            self._told(key, amount)

    def _named(self, group: Any, kind: str) -> tuple[str, int]:
        name = f"{group.group_name} {kind == 'all-to-all'}"
        if name not in self._groups:
            ranks = frozenset(dist.get_process_group_ranks(group))
            equal = [axis for axis, members in self._axes.items() if members == ranks]
            if kind == "all-to-all" and "expert" in equal:  # only expert groups exchange rows
                equal = ["expert"]
            self._groups[name] = (equal or ["other"])[0], len(ranks)
        return self._groups[name]


def group_of(operation: Operation) -> Any:
    """Returns the process group of a collective."""
    for value in (*operation.args, *operation.kwargs.values()):
        if isinstance(value, str) and value in _named_groups():
            return _named_groups()[value]
        if type(value).__name__ == "ScriptObject" and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return dist.group.WORLD


def _named_groups() -> dict[str, Any]:
    return {each.group_name: each for each in distributed_c10d._world.pg_map}


def _payload(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    if name == "barrier":
        return []
    return tensors_in(args[1] if name in _SECOND_READ else args[0])
