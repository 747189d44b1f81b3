"""Memory in use, by purpose."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

from polyad.parallel.plan.weightless import Operation, shares_memory

PLACES = (
    ("/torch/optim/", "optimizer"),
    ("/train/loop/muon.py", "optimizer"),
    ("/parallel/gradients.py", "gradients"),
    ("/deepspeed/runtime/", "communication"),
    ("/parallel/exchange.py", "experts"),
    ("/model/smoe/dispatch.py", "experts"),
    ("/model/smoe/experts.py", "experts"),
    ("/model/emoe/experts.py", "experts"),
    ("/model/kernels/linear_cross_entropy.py", "loss"),
    ("/train/tasks/losses.py", "loss"),
)
"""The purpose of memory, by the nearest of these files in the call stack; else `activations`."""
GRADIENTS = {"_fill_param_grad_accum_attribute", "_build_compact_grad_partition_buffer"}
"""The functions in which DeepSpeed's stages 1 and 2 allocate memory for summed gradients."""
NOT_THERE = ("/deepspeed/runtime/engine.py",)
"""Files to ignore, because they are below every call."""


class _Block:
    """The memory of one storage."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind


class Memory:
    """Tracks the memory of tensors from creation to release; an observer of `Watched`.

    Attributes:
        now: Bytes in use, by kind.
        peak: Bytes by kind at the time of the highest total.
        largest: The maximum of each kind, at separate times.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self._total = self._highest = 0
        self._blocks: weakref.WeakKeyDictionary[Any, _Block] = weakref.WeakKeyDictionary()

    def __call__(self, operation: Operation) -> None:
        """Counts the memory that an operation has allocated."""
        given: set[int] = set()
        if operation.name != "aten::lift_fresh":  # a tensor made of Python numbers
            if shares_memory(operation.function):
                return
            given = {each.untyped_storage()._cdata for each in operation.inputs}
        for tensor in operation.outputs:
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage not in self._blocks and storage.nbytes():
                self._add(storage, _kind_by_place())

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Assigns a purpose to the memory of tensors."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage())
            if block is not None:
                self.now[block.kind] -= block.size
                block.kind = kind
                self._count(kind, block.size)

    def start_peak(self) -> None:
        """Resets the peak, to track it from here on."""
        self.peak, self._highest = Counter(self.now), self._total
        self.largest = Counter(self.now)

    def _count(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.largest[kind] = max(self.largest[kind], self.now[kind])

    def _add(self, storage: Any, kind: str) -> None:
        block = self._blocks[storage] = _Block(storage.nbytes(), kind)
        self._count(kind, block.size)
        self._total += block.size
        if self._total > self._highest:
            self.peak, self._highest = Counter(self.now), self._total
        weakref.finalize(storage, self._free, block)

    def _free(self, block: _Block) -> None:
        self.now[block.kind] -= block.size
        self._total -= block.size


def _kind_by_place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in GRADIENTS:
            return "gradients"
        kind = _kind_of_file(frame.f_code.co_filename)
        if kind is not None:
            return kind
        frame = frame.f_back
    return "activations"


@cache
def _kind_of_file(name: str) -> str | None:
    if name.endswith(NOT_THERE):
        return None
    return next((kind for part, kind in PLACES if part in name), None)
