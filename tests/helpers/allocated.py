"""Counts bytes allocated by operations, even on the meta device, where nothing is allocated."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Observed(TorchDispatchMode):
    """A context in which an observer sees every operation: what it is given, and its result."""

    def __init__(self, observer: Callable[[Any, Any, Any, Any], object]) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._observer(func, args, kwargs or {}, result)
        return result


class Allocated(Observed):
    """A context that counts the bytes of new storages until they are freed."""

    def __init__(self) -> None:
        super().__init__(self._observe)
        self._now = 0
        self.peak = 0
        """Peak of allocated bytes."""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                self._add(each.untyped_storage())

    def _add(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self._now -= size


def saved_bytes(call: Callable[[], object], known: Iterable[Tensor] = ()) -> int:
    """Bytes that a forward pass keeps for the backward pass, each storage once.

    Args:
        call: The forward pass.
        known: Tensors that do not count, as parameters.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor  # stays alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call()
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
