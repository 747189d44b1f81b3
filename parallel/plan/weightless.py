"""Operations that have shapes and no numbers: a step of any model, on any layout, in seconds.

The real model, the real engine and its collectives run, on tensors whose memory nobody touches: an
operation gives what its shape function says, in address space that the system never fills. Small
tensors whose numbers are known keep them, as the counters and flags that DeepSpeed decides by.
"""

import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 65_536
"""Elements up to which known numbers are computed with."""
_PAGES = 1 << 16
"""Bytes from which memory comes from the system, page by page as it is touched: never."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 does not have its name
ALIASES = {
    *("aten::detach", "aten::alias", "aten::lift_fresh", "aten::_reshape_alias", "aten::set_"),
    "aten::_unsafe_view",
}
"""Share the memory of an argument, though torch does not call them views."""


class Operation(NamedTuple):
    """An operation that was done."""

    function: Any
    """The dispatcher's function, an `OpOverload`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """As `aten::addmm`."""
        return str(self.function._schema.name)

    def inputs(self) -> list[Tensor]:
        """Its tensors."""
        return tensors_in((self.args, self.kwargs))

    def outputs(self) -> list[Tensor]:
        """The tensors that it returned."""
        return tensors_in(self.result)


class Observer(Protocol):
    """Is told every operation."""

    def __call__(self, operation: Operation) -> None:
        """One was done."""


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple | dict):
        for each in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(each, Tensor):
                found.append(each)
            elif isinstance(each, list | tuple | dict):
                _add_tensors(each, found)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Nested lists, tuples and dictionaries with something else in place of what is in them."""
    if isinstance(tree, dict):
        return {name: mapped(change, each) for name, each in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)([mapped(change, each) for each in tree])
    return change(tree)


class Watched(TorchDispatchMode):
    """Inside this context observers are told every operation; it is done as always.

    Args:
        observers: Are told.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self._observers = observers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = self.execute(func, args, named)
        done = Operation(func, args, named, result)
        for observer in self._observers:
            observer(done)
        return result

    def execute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does the operation."""
        return function(*args, **kwargs)


class Weightless(Watched):
    """Inside this context operations have shapes and no numbers.

    A number that is read and not known is 1.0, or 0 of whole numbers and truth values: a loss and a
    norm are finite, and no flag of an overflow is set. Lists of unknown whole numbers must not be
    asked for.

    Args:
        observers: Are told every operation.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        super().__init__(observers)
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shapes: dict[Any, Any] = {}
        """Results on the meta device, by function and arguments: layers are much alike."""

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether a tensor has no numbers."""
        return tensor.untyped_storage() in self._unknown

    def forget(self, tensor: Tensor) -> None:
        """Takes a tensor's numbers, and those of all that shares its memory, as not known."""
        self._unknown.add(tensor.untyped_storage())

    def execute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does the operation on shapes, or on numbers that are known and few."""
        name, inputs = function._schema.name, tensors_in((args, kwargs))
        if function.namespace == "c10d":
            return self._collective(function, args, kwargs)
        if name == "_c10d_functional::wait_tensor":
            return args[0]
        unknown = any(map(self.is_unknown, inputs))
        if function is torch.ops.aten._local_scalar_dense.default and unknown:
            return 1.0 if args[0].is_floating_point() else 0
        written = _written(function)
        is_meta = kwargs.get("device") == torch.device("meta")  # asked for as a shape
        makes_tensors = written or _returns_tensors(function)
        if is_meta or function.is_view or name in ALIASES or not makes_tensors:
            return function(*args, **kwargs)
        known = not unknown and all(each.numel() <= SMALL for each in inputs)
        if known and inputs and function.namespace != "_c10d_functional":
            return function(*args, **kwargs)
        if written:
            return self._in_place(function, args, kwargs)
        on_meta = self._on_meta(function, args, kwargs)
        if not inputs and all(each.numel() <= SMALL for each in tensors_in(on_meta)):
            return function(*args, **kwargs)
        return mapped(lambda x: self._like(x) if isinstance(x, Tensor) else x, on_meta)

    def _in_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what was written to, whose numbers are not known any more."""
        schema = function._schema
        given = {a.name: x for a, x in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given[name] for name in _written(function)]
        for tensor in tensors_in(written):
            self.forget(tensor)
        if not schema.returns:
            return None
        return written[0] if len(schema.returns) == 1 else tuple(written)

    def _on_meta(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result as tensors that have a shape alone; it must not be changed."""
        key = (function, _described(args), _described(kwargs))
        try:
            if key not in self._shapes:
                self._shapes[key] = self._run_on_meta(function, args, kwargs)
        except TypeError:  # an argument that has no hash
            return self._run_on_meta(function, args, kwargs)
        return self._shapes[key]

    def _run_on_meta(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies: dict[int, Tensor] = {}

        def shape_of(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("meta")
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
            return copies[id(value)]

        args, kwargs = mapped(shape_of, (args, kwargs))
        if not copies and "device" in {a.name for a in function._schema.arguments}:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        return function(*args, **kwargs)

    def _like(self, shape: Tensor) -> Tensor:
        """A tensor in memory that is not there."""
        tensor = _reserved(shape.shape, shape.stride(), shape.dtype)
        self.forget(tensor)
        return tensor

    def _collective(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sends nothing: small known numbers stay what they are, as if all others had the same."""
        nothing: Callable[[Any], Any] = lambda x: (  # noqa: E731
            torch.empty(0, dtype=x.dtype) if isinstance(x, Tensor) else x
        )
        empty, named = mapped(nothing, (args, kwargs))
        result = function(*empty, **named)
        for written, read in _copied(function._schema.name, args):
            if self.is_unknown(read) or read.numel() > SMALL or written.numel() % read.numel():
                self.forget(written)
            else:
                written.view(-1, read.numel()).copy_(read.clone().view(1, -1))
        return (args[0], *result[1:]) if isinstance(result, tuple) else result


@cache
def _written(function: Any) -> tuple[str, ...]:
    """The arguments that an operation writes to."""
    arguments = function._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@cache
def _returns_tensors(function: Any) -> bool:
    return any("Tensor" in str(each.type) for each in function._schema.returns)


def _described(value: Any) -> Any:
    """What the shape of a result may depend on, of an argument."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are equal, and are not the same argument


def _copied(name: str, args: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    """What a collective that gathers writes, and what it reads; of others each stays what it is."""
    if "allgather" not in name or len(args) < 2:
        return []
    written, read = tensors_in(args[0]), tensors_in(args[1])
    return [(each, read[0]) for each in written] if len(read) == 1 else []


def _reserved(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages the system has only promised."""
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    if elements * dtype.itemsize < _PAGES:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).as_strided(size, stride)
