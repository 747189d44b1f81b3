"""What is computed: operations by their shapes, with the products and bytes of each."""

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
    """The dtype of its largest tensor."""

    @property
    def name(self) -> str:
        """The name of the operation, for example `aten::addmm`."""
        return name_of(self.function)


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
        self.times: Counter[Any] = Counter()
        self.of: dict[Any, Work] = {}

    def __call__(self, operation: Operation) -> None:
        """Counts an operation, unless it moves no byte or is a collective."""
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
    """Counts the FLOPs of a forward pass in training mode, on shapes alone.

    What records of routing alone need does not count, nor what its losses need.

    Causal attention counts in full, as model FLOPs do by convention (Chowdhery et al. 2022,
    appendix B).

    Args:
        model: On the meta device, from `build_model`; it gets memory that nobody touches.
        inputs: What it reads. Their numbers do not matter.
        run: The forward pass.

    Returns:
        FLOPs of products, a multiply-add counted as two.
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
    """Floating-point operations of a product, by torch's own count where it has one; else 0.

    Args:
        operation: Any.
        causal_in_full: Whether causal attention counts as if every token saw all others; else at
            half.
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


def _mixture(args: Any, of_features: int, of_scores: int, is_causal: bool) -> tuple[int, bool]:
    """So many products as wide as features, and as wide as scores."""
    (*batch, queries, features), (*_, keys, scores) = args[0].shape, args[2].shape
    width = of_features * features + of_scores * scores
    return 2 * prod(batch) * queries * keys * width, is_causal


def _experts_backward(args: Any) -> tuple[int, bool]:
    """The products of an expert's backward pass, of which frozen weights need none."""
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
    "polyad::mixture": lambda args: _mixture(args, 1, 1, bool(args[4])),
    "polyad::mixture_backward": lambda args: _mixture(args[3:], 3, 2, bool(args[7])),
}
"""FLOPs of operations that torch does not count, and whether half of them are for tokens that a
causal one does not see; by their arguments."""
