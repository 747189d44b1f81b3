"""Runs operations on shapes without values: plans a step of any model and layout in seconds.

The real model, the real engine and its collectives run on tensors whose memory is never touched: an
operation returns what its shape function says, in address space that the system never fills. Small
tensors with known values keep them, such as the counters and flags that DeepSpeed branches on.
"""

import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.parallel.dims import LayoutError

SMALL = 65_536
"""Maximum number of elements for computing with known values."""
_PAGES = 1 << 16
"""Size in bytes from which memory is mapped by the system page by page, when touched: never."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 lacks its name
ALIASES = {
    *("aten::detach", "aten::alias", "aten::lift_fresh", "aten::_reshape_alias", "aten::set_"),
    "aten::_unsafe_view",
}
"""Operations that return memory of an argument, although torch does not call them views."""

_META = torch.device("meta")


class Operation:
    """A dispatched operation, with its `result` once it has run.

    Args:
        function: The dispatcher's function, an `OpOverload`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.result: Any = None

    @property
    def name(self) -> str:
        """The name of the operation, for example `aten::addmm`."""
        return name_of(self.function)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Its tensor arguments."""
        return tensors_in((self.args, self.kwargs))

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The tensors that it returned."""
        return tensors_in(self.result)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Identifies the operation except for tensor values; unhashable if an argument is."""
        return self.function, _described(self.args), _described(self.kwargs)

    def run(self) -> Any:
        """Runs it in torch."""
        return self.function(*self.args, **self.kwargs)


class Observer(Protocol):
    """Called with every operation."""

    def __call__(self, operation: Operation) -> None:
        """Handles an operation that has run."""


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists all tensors in nested lists, tuples and dictionaries."""
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
    """Applies a function to all values in nested lists, tuples and dictionaries."""
    if isinstance(tree, dict):
        return {name: mapped(change, each) for name, each in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)([mapped(change, each) for each in tree])
    return change(tree)


class Watched(TorchDispatchMode):
    """A context in which observers see every operation; operations run as usual.

    Args:
        observers: Called with every operation.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self._observers = observers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = Operation(func, args, kwargs or {})
        operation.result = self.execute(operation)
        for observer in self._observers:
            observer(operation)
        return operation.result

    def execute(self, operation: Operation) -> Any:
        """Runs the operation, and returns its result."""
        return operation.run()


class Weightless(Watched):
    """A context in which operations have shapes but no values.

    An unknown value that is read is 1.0, or 0 for integers and booleans: a loss and a norm are
    finite, and no overflow flag is set. Lists of unknown integers must not be read.

    Args:
        observers: Called with every operation.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        super().__init__(observers)
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shapes: dict[Any, Any] = {}
        """Results on the meta device, by function and arguments: layers are mostly alike."""

    def is_unknown(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has no values."""
        return tensor.untyped_storage() in self._unknown

    def forget(self, tensor: Tensor) -> None:
        """Marks the values of a tensor, and of all tensors that share its memory, as unknown."""
        self._unknown.add(tensor.untyped_storage())

    def execute(self, operation: Operation) -> Any:
        """Runs the operation on shapes, or on known values if there are few."""
        function, args = operation.function, operation.args
        name, inputs = operation.name, operation.inputs
        if function.namespace == "c10d":
            return self._collective(function, args, operation.kwargs)
        if name == "_c10d_functional::wait_tensor":
            return args[0]
        unknown = any(map(self.is_unknown, inputs))
        if function is torch.ops.aten._local_scalar_dense.default and unknown:
            return 1.0 if args[0].is_floating_point() else 0
        written = _written(function)
        device = operation.kwargs.get("device")
        # Requested on the meta device, or inherited from meta tensors, as in `empty_like`.
        is_meta = device == _META or (device is None and any(each.is_meta for each in inputs))
        makes_tensors = written or _returns_tensors(function)
        if is_meta or shares_memory(function) or not makes_tensors:
            return operation.run()
        known = not unknown and all(each.numel() <= SMALL for each in inputs)
        if known and inputs and function.namespace != "_c10d_functional":
            return operation.run()
        if written:
            return self._in_place(operation)
        on_meta = self._on_meta(operation)
        if not inputs and all(each.numel() <= SMALL for each in tensors_in(on_meta)):
            return operation.run()
        if isinstance(on_meta, Tensor):
            return self._like(on_meta)
        return mapped(lambda x: self._like(x) if isinstance(x, Tensor) else x, on_meta)

    def _in_place(self, operation: Operation) -> Any:
        """Returns the written argument, whose values become unknown."""
        schema = operation.function._schema
        positional = zip(schema.arguments, operation.args, strict=False)
        given = {argument.name: x for argument, x in positional} | operation.kwargs
        written = [given[name] for name in _written(operation.function)]
        for tensor in tensors_in(written):
            self.forget(tensor)
        if not schema.returns:
            return None
        return written[0] if len(schema.returns) == 1 else tuple(written)

    def _on_meta(self, operation: Operation) -> Any:
        """Returns the result as tensors with only a shape; it must not be changed."""
        key = operation.key
        try:
            if key not in self._shapes:
                self._shapes[key] = self._run_on_meta(operation)
        except TypeError:  # an unhashable argument
            return self._run_on_meta(operation)
        return self._shapes[key]

    def _run_on_meta(self, operation: Operation) -> Any:
        function = operation.function
        copies: dict[int, Tensor] = {}

        def shape_of(value: Any) -> Any:
            if isinstance(value, torch.device):
                return _META
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
            return copies[id(value)]

        args, kwargs = mapped(shape_of, (operation.args, operation.kwargs))
        if not copies and "device" in {a.name for a in function._schema.arguments}:
            kwargs = {**kwargs, "device": _META, "pin_memory": False}
        return function(*args, **kwargs)

    def _like(self, shape: Tensor) -> Tensor:
        """Returns a tensor in memory that does not exist."""
        tensor = _reserved(shape.shape, shape.stride(), shape.dtype)
        self.forget(tensor)
        return tensor

    def _collective(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sends nothing: small known values stay the same, as if all other ranks had equal ones."""
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
def name_of(function: Any) -> str:
    """Returns the name of an operation, such as `aten::addmm`."""
    return str(function._schema.name)


@cache
def shares_memory(function: Any) -> bool:
    """Returns whether an operation returns memory of an argument without writing to it."""
    return bool(function.is_view) or name_of(function) in ALIASES


@cache
def _written(function: Any) -> tuple[str, ...]:
    """Returns the arguments that an operation writes to."""
    arguments = function._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@cache
def _returns_tensors(function: Any) -> bool:
    return any("Tensor" in str(each.type) for each in function._schema.returns)


def _described(value: Any) -> Any:
    """Describes an argument except for tensor values, as a key."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are equal, but not the same argument


def _copied(name: str, args: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    """Returns what a gathering collective writes and reads; other collectives change nothing."""
    if "allgather" not in name or len(args) < 2:
        return []
    written, read = tensors_in(args[0]), tensors_in(args[1])
    return [(each, read[0]) for each in written] if len(read) == 1 else []


def _reserved(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose pages are reserved but not allocated."""
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    if elements * dtype.itemsize < _PAGES:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        pages = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except OSError as error:  # the address space of a process ends at 128 TB
        raise LayoutError(
            f"the model: a tensor of one process is {list(size)}, {elements * dtype.itemsize:.2g} "
            "bytes, more than this machine can address; choose a smaller model"
        ) from error
    return torch.frombuffer(pages, dtype=dtype).as_strided(size, stride)
