"""What is computed: operations by their shapes, with the products and bytes of each."""

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from polyad.parallel.plan.weightless import ALIASES, Operation


class Shape(NamedTuple):
    """A tensor without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Work(NamedTuple):
    """An operation of certain shapes."""

    function: Any
    args: Any
    """With a `Shape` for each tensor."""
    kwargs: Any
    phase: str
    """`forward`, `backward` (with what it computes again), or `update`."""
    flops: int
    """A multiply-add counts as two; of products alone, causal attention at half."""
    bytes: int
    """Read and written, each tensor once."""
    dtype: torch.dtype
    """Of its largest tensor."""

    @property
    def name(self) -> str:
        """As `aten::addmm`."""
        return str(self.function._schema.name)


class Phase:
    """Which part of a step this is.

    Args:
        model: Its forward pass is one part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inside = False
        model.register_forward_pre_hook(lambda *_: self._enter(True))
        model.register_forward_hook(lambda *_: self._enter(False))

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def __call__(self) -> str:
        """`forward`, `backward`, or `update` of all else."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self._inside else "update"


class Computed:
    """Counts operations by their shapes; an observer of `Watched`.

    Args:
        phase: Which part of a step this is.

    Attributes:
        times: How often each was done, by a key.
        of: The operation of each key.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.times: Counter[str] = Counter()
        self.of: dict[str, Work] = {}

    def __call__(self, operation: Operation) -> None:
        """Counts an operation, unless it moves no byte or is a collective."""
        function = operation.function
        if function.is_view or operation.name in ALIASES or "c10d" in function.namespace:
            return
        if "empty" in operation.name:
            return
        tensors = operation.inputs() + operation.outputs()
        moved = sum(each.nbytes for each in tensors)
        if not moved:
            return
        args, kwargs = tree_map(_shape, (operation.args, operation.kwargs))
        phase = self._phase()
        key = f"{phase} {function} {args} {kwargs}"
        if key not in self.of:
            largest = max(tensors, key=lambda each: each.nbytes)
            self.of[key] = Work(
                function, args, kwargs, phase, flops_of(operation), moved, largest.dtype
            )
        self.times[key] += 1


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), value.stride(), value.dtype)
    return value


def flops_of(operation: Operation) -> int:
    """Floating-point operations of a product, by torch's own count where it has one; else 0."""
    args, name = operation.args, operation.name
    if name in _OTHERS:
        return int(_OTHERS[name](args))
    packet = operation.function.overloadpacket
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **operation.kwargs, out_val=operation.result))


def _attention(args: Any, products: int, causal: bool) -> int:
    *batch, queries, width = args[0].shape
    keys = args[1].shape[-2]
    return 2 * products * prod(batch) * queries * keys * width // (2 if causal else 1)


def _grouped(args: Any) -> int:
    rows, by = args[0].shape, args[1].shape
    return 2 * prod(rows) * by[-1]


def _products_backward(of_rows: bool, of_up: bool, of_bias: bool, of_down: bool) -> int:
    """Products of an expert's backward pass, of which frozen weights need none."""
    return of_rows + of_up + of_down + (of_rows or of_up or of_bias)


_OTHERS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda args: _attention(
        args, 2, len(args) > 4 and bool(args[4])
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention(
        args[1:], 5, bool(args[7])
    ),
    "polyad::experts_on_cpu": lambda args: 4 * prod(args[0].shape) * args[1].shape[2],
    "polyad::experts_on_cpu_backward": lambda args: (
        2 * prod(args[0].shape) * args[3].shape[2] * _products_backward(*args[7])
    ),
    "polyad::grouped_mm": _grouped,
}
