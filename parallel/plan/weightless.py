"""Operations that have shapes and no numbers: a step of any model, on any layout, in seconds.

The real model, the real engine and its collectives run, on tensors whose memory nobody touches: an
operation gives what its shape function says, in address space that the system never fills. Small
tensors whose numbers are known keep them, as the counters and flags that DeepSpeed decides by.
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
"""Elements up to which known numbers are computed with."""
_PAGES = 1 << 16
"""Bytes from which memory comes from the system, page by page as it is touched: never."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 does not have its name
ALIASES = {
    *("aten::detach", "aten::alias", "aten::lift_fresh", "aten::_reshape_alias", "aten::set_"),
    "aten::_unsafe_view",
}
"""Share the memory of an argument, though torch does not call them views."""

_META = torch.device("meta")


class Operation:
    """An operation that is done: its `result` is there once it was.

    Args:
        function: The dispatcher's function, an `OpOverload`.
        args: The call's.
        kwargs: The call's.
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
        """Its tensors."""
        return tensors_in((self.args, self.kwargs))

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The tensors that it returned."""
        return tensors_in(self.result)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What it is but for the numbers of tensors; it has no hash where an argument has none."""
        return self.function, _described(self.args), _described(self.kwargs)

    def run(self) -> Any:
        """Does it as torch does."""
        return self.function(*self.args, **self.kwargs)


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
        operation = Operation(func, args, kwargs or {})
        operation.result = self.execute(operation)
        for observer in self._observers:
            observer(operation)
        return operation.result

    def execute(self, operation: Operation) -> Any:
        """Does the operation, and returns its result."""
        return operation.run()


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

    def execute(self, operation: Operation) -> Any:
        """Does the operation on shapes, or on numbers that are known and few."""
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
        # Asked for as a shape, or of shapes, as an empty tensor like one is.
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
        """Returns what was written to, whose numbers are not known any more."""
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
        """The result as tensors that have a shape alone; it must not be changed."""
        key = operation.key
        try:
            if key not in self._shapes:
                self._shapes[key] = self._run_on_meta(operation)
        except TypeError:  # an argument that has no hash
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
def name_of(function: Any) -> str:
    """The name of an operation, as `aten::addmm`."""
    return str(function._schema.name)


@cache
def shares_memory(function: Any) -> bool:
    """Whether what an operation returns is the memory of an argument, and nothing is written."""
    return bool(function.is_view) or name_of(function) in ALIASES


@cache
def _written(function: Any) -> tuple[str, ...]:
    """The arguments that an operation writes to."""
    arguments = function._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@cache
def _returns_tensors(function: Any) -> bool:
    return any("Tensor" in str(each.type) for each in function._schema.returns)


def _described(value: Any) -> Any:
    """What an argument is but for the numbers of tensors, as a key."""
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
    try:
        pages = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except OSError as error:  # the addresses of a process end at 128 TB
        raise LayoutError(
            f"the model: a tensor of one process is {list(size)}, {elements * dtype.itemsize:.2g} "
            "bytes, more than this machine can address; choose a smaller model"
        ) from error
    return torch.frombuffer(pages, dtype=dtype).as_strided(size, stride)
