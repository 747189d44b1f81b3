"""The computation of a step: operations by shape, with the FLOPs and bytes of each."""

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from polyad.model.build import initial_value, place
from polyad.model.kernels import switch
from polyad.model.output import ask_for_statistics
from polyad.parallel.plan.weightless import (
    Operation,
    Weightless,
    mapped,
    name_of,
    shares_memory,
)

Inputs = TypeVar("Inputs", bound=tuple[Tensor, ...])


class Shape(NamedTuple):
    """A tensor without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Work(NamedTuple):
    """An operation on certain shapes."""

    function: Any
    args: Any
    """Arguments, with a `Shape` for each tensor."""
    kwargs: Any
    phase: str
    """`forward`, `backward` (including recomputation), or `update`."""
    flops: int
    """FLOPs of matrix products only; a multiply-add counts as two, causal attention as half."""
    bytes: int
    """Bytes read and written, each tensor once."""
    dtype: torch.dtype
    """The dtype of its largest tensor."""

    @property
    def name(self) -> str:
        """The name of the operation, for example `aten::addmm`."""
        return name_of(self.function)


class Phase:
    """The current part of a step.

    Args:
        model: The model, whose forward pass is one part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inside = False
        model.register_forward_pre_hook(lambda *_: self._enter(True))
        model.register_forward_hook(lambda *_: self._enter(False))

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def __call__(self) -> str:
        """Returns `forward`, `backward`, or `update` for everything else."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self._inside else "update"


class Computed:
    """Counts operations by shape; an observer of `Watched`.

    Args:
        phase: The current part of a step.

    Attributes:
        times: How often each operation was run, by key.
        of: The operation of each key.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self.times: Counter[Any] = Counter()
        self.of: dict[Any, Work] = {}

    def __call__(self, operation: Operation) -> None:
        """Counts an operation, unless it moves no bytes or is a collective."""
        function = operation.function
        if shares_memory(function) or "c10d" in function.namespace:
            return
        if "empty" in operation.name:
            return
        tensors = operation.inputs + operation.outputs
        moved = sum(each.nbytes for each in tensors)
        if not moved:
            return
        phase = self._phase()
        key = phase, operation.key
        if key not in self.of:
            args, kwargs = mapped(_shape, (operation.args, operation.kwargs))
            largest = max(tensors, key=lambda each: each.nbytes)
            self.of[key] = Work(
                function, args, kwargs, phase, flops_of(operation), moved, largest.dtype
            )
        self.times[key] += 1


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), value.stride(), value.dtype)
    return value


def forward_flops(
    model: nn.Module, inputs: Inputs, run: Callable[[nn.Module, Inputs], object]
) -> int:
    """Counts the FLOPs of a forward pass in training mode, using shapes only.

    Values that only routing records or routing losses need do not count.

    Causal attention counts in full, as model FLOPs do by convention (Chowdhery et al. 2022,
    appendix B).

    Args:
        model: The model on the meta device, from `build_model`; it gets memory that is never
            touched.
        inputs: The inputs of the model, whose values do not matter.
        run: Runs the forward pass.

    Returns:
        FLOPs of matrix products; a multiply-add counts as two.
    """
    total = 0

    def count(operation: Operation) -> None:
        nonlocal total
        total += flops_of(operation, causal_in_full=True)

    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        switch.without_numbers(),
        Weightless([count]) as weightless,
    ):
        weights = ((name, torch.empty(p.shape)) for name, p in model.named_parameters())
        place(model, weights)
        place(model, ((name, initial_value(model, name, 0)) for name, _ in model.named_buffers()))
        for tensor in (*model.parameters(), *inputs):
            weightless.forget(tensor)
        ask_for_statistics(model, losses=frozenset(), samples=False, record_is_due=False)
        run(model.train(), inputs)
    return total


def flops_of(operation: Operation, *, causal_in_full: bool = False) -> int:
    """Returns the FLOPs of a product, by torch's own count if there is one; else 0.

    Args:
        operation: Any operation.
        causal_in_full: Whether causal attention counts as if every token saw all others, rather
            than half.
    """
    args, name = operation.args, operation.name
    if name in _OTHERS:
        flops, is_causal = _OTHERS[name](args)
        return flops // 2 if is_causal and not causal_in_full else flops
    packet = operation.function.overloadpacket
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **operation.kwargs, out_val=operation.result))


def _attention(args: Any, products: int, is_causal: bool) -> tuple[int, bool]:
    *batch, queries, width = args[0].shape
    keys = args[1].shape[-2]
    return 2 * products * prod(batch) * queries * keys * width, is_causal


def _experts_backward(args: Any) -> tuple[int, bool]:
    """Counts the products of an expert's backward pass; frozen weights need none."""
    of_rows, of_up, of_bias, of_down = args[7]
    products = of_rows + of_up + of_down + (of_rows or of_up or of_bias)
    return 2 * prod(args[0].shape) * args[3].shape[2] * products, False


_OTHERS: dict[str, Callable[[Any], tuple[int, bool]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda args: _attention(
        args, 2, len(args) > 4 and bool(args[4])
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention(
        args[1:], 5, bool(args[7])
    ),
    "polyad::experts_on_cpu": lambda args: (4 * prod(args[0].shape) * args[1].shape[2], False),
    "polyad::experts_on_cpu_backward": _experts_backward,
    "polyad::grouped_mm": lambda args: (2 * prod(args[0].shape) * args[1].shape[-1], False),
}
"""FLOPs of operations that torch does not count, and whether half of them are for tokens that
causal attention does not see, as functions of the arguments."""
