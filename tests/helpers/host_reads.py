"""Counts where a step would synchronize with a GPU, while it runs on a CPU.

Since a CPU never waits, synchronization is recognized by the kind of operation: reading a number or
list from a tensor, copying to NumPy, and operations whose output size depends on values.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.training import Case, build_engine, take_step

READS = {
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__array__,
}  # fmt: skip
SIZED_BY_VALUES = (
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "_local_scalar_dense", "equal", "is_nonzero",
)  # fmt: skip
OURS = ("/model/", "/parallel/", "/train/", "/deepspeed/", "/megatron/")


class HostReads(TorchFunctionMode):
    """A context that counts reads from Python by their place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._inner = _SizedByValues(self.places)

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inner.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            if not _of_an_optimizer():
                self.places[f"{getattr(func, '__name__', func)} at {_place()}"] += 1
            with self._inner.silent():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _SizedByValues(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places, self._silent = places, 0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """A context that counts nothing: the read was counted above."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_", "_unsafe_index") and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in (args[1] or ())
        )
        if by_mask and name.startswith("index_put"):
            by_mask = args[2].dim() > 0  # a number is filled in without counting the places
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if not self._silent and (name in SIZED_BY_VALUES or by_mask or unsized):
            self._places[f"{name} at {_place()}"] += 1
        return func(*args, **(kwargs or {}))


def _of_an_optimizer() -> bool:
    """Whether torch's optimizer asks: it keeps the numbers of its steps on the host."""
    return any("/torch/optim/" in frame.filename for frame in traceback.extract_stack()[-6:])


def _place() -> str:
    """The nearest line of the program, or of DeepSpeed or megatron-core."""
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in OURS) and "/tests/" not in frame.filename:
            return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"
    return "?"


def reads_of_a_step(case: Case) -> dict[str, int]:
    """How often the host reads in the third step of a run, by place; called in worker processes."""
    engine, world = build_engine(case)
    options = {"losses": case.losses, "progress": 0.1, "own": lambda: (0, 1, 2)}
    for step in range(3):
        with HostReads() as reads:
            _ = take_step(engine, world, case, step, **options).statistics.numbers
    return dict(reads.places)
