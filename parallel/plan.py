"""What a layout takes on one rank: memory of model states and traffic of ZeRO, by arithmetic; and
FLOPs, other memory and other traffic, by running the model on shapes.

DeepSpeed's stages 1 and 2 flatten the weights of each group of parameters and give every rank an
equal part; stage 3 gives every rank an equal part of each parameter. Gradients are summed in fp32.

torch's `FakeTensorMode` gives every operation tensors without values. What it cannot do is here: a
process group of one process that plays one rank of many, collectives within it, and numbers that
code reads from tensors.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from polyad.model.build import initial_value, place
from polyad.model.kernels import switch
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm, zero
from polyad.parallel.config import Dims, ParallelConfig
from polyad.parallel.expert import Counts, RowExchange
from polyad.parallel.shard import placement_of

ALIGNMENT = 2
"""DeepSpeed pads each flat group to a multiple of this number times its ranks."""
LIVE = 1_000_000_000
"""DeepSpeed's stage 3 keeps up to this many gathered weights until the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Parameters of one optimizer group on this rank, which ZeRO divides over the same ranks."""

    sizes: Sequence[int]
    """Number of elements of each, before ZeRO divides it."""
    copies: int
    """Number of ranks that hold the same parameters."""
    fields: int
    """State tensors of each weight: master, moments and average; 0 if they are frozen."""
    counter: int
    """Bytes of the count of steps."""

    @property
    def total(self) -> int:
        """All elements."""
        return sum(self.sizes)

    @property
    def padded(self) -> int:
        """All elements, as stages 1 and 2 flatten them."""
        several = ALIGNMENT * self.copies
        return ceil(self.total / several) * several if self.fields else self.total

    def part(self, stage: int) -> int:
        """Elements of which this rank keeps masters and moments."""
        if stage == 3:
            return sum(ceil(size / self.copies) for size in self.sizes)
        return self.padded // self.copies


def flat_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, dims: Dims, *, averaged: bool
) -> list[Flat]:
    """Returns how ZeRO groups the parameters of a model that is split for this rank.

    Args:
        model: From `split_layers`.
        optimizer: Its optimizer, which has not made a step.
        dims: The layout.
        averaged: Whether a moving average of the weights is kept.
    """
    counter = 4 if "exp_avg" in zero.state_fields(optimizer) else 0

    def flat(parameters: Sequence[nn.Parameter], fields: int, counter: int) -> Flat:
        cut = placement_of(parameters[0]).expert_parallel_size
        return Flat(
            sizes=[each.numel() for each in parameters],
            copies=dims.data_parallel_size // cut,
            fields=fields,
            counter=counter,
        )

    if dims.expert_parallel_size > 1:
        zero.split_expert_groups(optimizer)
    groups = []
    for group in optimizer.param_groups:
        fields = 1 + len(group[zero.STATE_TENSORS]) + averaged
        groups.append(flat(group["params"], fields, counter))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return groups + [flat([parameter], 0, 0) for parameter in frozen]


def model_states(
    flat: Sequence[Flat], parallel: ParallelConfig, precision: zero.Precision, buffer_bytes: int
) -> dict[str, int]:
    """Returns bytes that a rank holds between steps: `weights`, `gradients` and `optimizer`.

    Args:
        flat: From `flat_groups`.
        parallel: With the ZeRO stage.
        precision: Of the forward pass.
        buffer_bytes: Bytes of the model's buffers.
    """
    stage, size = parallel.zero_stage, zero.DTYPES[precision].itemsize
    kept = sum(each.part(3) if stage == 3 else each.padded for each in flat)
    trained = [each for each in flat if each.fields]
    return {
        "weights": size * kept + buffer_bytes,
        "gradients": 4 * sum(each.part(3) for each in trained) if stage == 3 else 0,
        "optimizer": sum(4 * each.fields * each.part(stage) + each.counter for each in trained),
    }


def peak_memory(
    flat: Sequence[Flat],
    parallel: ParallelConfig,
    precision: zero.Precision,
    *,
    states: dict[str, int],
    computed: Sequence[tuple[int, int]],
    batch: int,
    num_parameters: int,
    accumulates: bool,
    temporaries: int,
) -> dict[str, int]:
    """Adds what a step takes to what a rank holds.

    Args:
        flat: From `flat_groups`.
        parallel: With the ZeRO stage and the size of its buckets.
        precision: Of the forward pass.
        states: From `model_states`.
        computed: For each gradient, in the order of the backward pass, the most bytes of other
            tensors since the last one, and its elements.
        batch: Bytes of a micro-batch.
        num_parameters: Of the whole model.
        accumulates: Whether a step has several micro-batches.
        temporaries: Tensors as large as a group's part of the masters that the optimizer computes.

    Returns:
        Bytes at the peak, by part.
    """
    stage, size = parallel.zero_stage, zero.DTYPES[precision].itemsize
    trained = [each for each in flat if each.fields]
    bucket = min(parallel.bucket_size, max(num_parameters, 1))
    total = sum(each.total for each in trained)
    if stage == 3:
        whole = sum(each.total for each in flat)
        gradients = states["gradients"]
        buffers = 4 * bucket + size * min(whole, LIVE)
    elif stage == 2:
        gradients, buffers = 4 * sum(each.part(stage) for each in trained), 2 * bucket * size
    else:
        gradients, buffers = 4 * sum(each.padded for each in trained), 0
    done, backward = 0, 0
    for most, elements in computed:
        grows = stage == 2 and not accumulates
        held = gradients * done // max(total, 1) if grows else gradients
        backward = max(backward, most + held + buffers)
        done += elements
    activations = max(0, backward - gradients - buffers)
    # Stage 1 hands its gradients over without a copy.
    update = batch + _update(trained, stage, temporaries + (stage > 1))
    if stage == 1:  # the sums over ranks of the first group, beside those of each rank
        parts = (each.part(stage) for each in trained if each.copies > 1)
        update = max(update, batch + gradients + 4 * next(parts, 0))
    if update > gradients + buffers + activations:
        activations, buffers = 0, max(0, update - gradients)
    return states | {"gradients": gradients, "activations": activations, "buffers": buffers}


def _update(trained: Sequence[Flat], stage: int, temporaries: int) -> int:
    """The peak of an update, which takes group after group and frees the gradients of each."""
    peak, left = 0, 0
    for each in reversed(trained):
        part = 4 * each.part(stage)
        peak = max(peak, (1 + temporaries) * part + left)
        left += part
    return peak


def zero_traffic(
    flat: Sequence[Flat], stage: int, precision: zero.Precision, micro_batches: int
) -> int:
    """Returns the bytes that a rank sends in a step to those with the same weights.

    Gradients are reduced once in stage 1, else in each micro-batch; in stages 1 and 2 the updated
    weights are gathered once, in stage 3 the weights of each micro-batch, twice if not all of them
    can stay.

    Args:
        flat: From `flat_groups`.
        stage: The ZeRO stage.
        precision: Of the forward pass.
        micro_batches: Micro-batches of a rank in a step.
    """
    size, sent = zero.DTYPES[precision].itemsize, 0
    times = 2 if sum(each.total for each in flat) > LIVE else 1
    for each in flat:
        others = each.copies - 1
        if each.fields:
            reduced = 4 * each.total * (1 if stage == 1 else micro_batches)
            sent += reduced * others // each.copies
        if stage == 3:
            sent += times * micro_batches * size * each.total * others // each.copies
        elif each.fields:
            sent += size * each.padded * others // each.copies
    return sent


# A model that is run on shapes.

Inputs = TypeVar("Inputs", bound=tuple[Tensor, ...])
Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with an operation, its arguments and its result."""


class _Shapes(TorchDispatchMode):
    """Within `FakeTensorMode`: collectives send nothing, and unknown values are 1.0, 0 or False.

    Args:
        observers: Called after every operation.
    """

    def __init__(self, *observers: Observer) -> None:
        super().__init__()
        self._observers = observers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._executed(func, args, kwargs)
        for observer in self._observers:
            observer(func, args, kwargs, result)
        return result

    def _executed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if func.namespace == "c10d":
            with unset_fake_temporarily():
                empty = tree_map_only(
                    Tensor, lambda x: torch.empty(0, dtype=x.dtype), (args, kwargs)
                )
                result = func(*empty[0], **empty[1])
            return (args[0], *result[1:]) if isinstance(result, tuple) else result
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # buffers, whose values are known
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else 0


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists all tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def shapes_only(
    *observers: Observer, on_gpu: bool = False, compiled: bool = False
) -> Iterator[None]:
    """A context in which new tensors have no values.

    Args:
        observers: Called after every operation.
        on_gpu: Whether to use the operations of a GPU.
        compiled: Whether the model is compiled there.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(switch.without_numbers(on_gpu=on_gpu, compiled=compiled))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Shapes(*observers))
        yield


def allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives a model on the meta device parameters without values, in place; buffers are known.

    Call it within `shapes_only`.
    """
    named = list(model.named_parameters())
    place(model, ((n, torch.empty(p.shape, dtype=dtype)) for n, p in named), "cpu", dtype)
    with unset_fake_temporarily():
        place(model, [(n, initial_value(model, n, 0)) for n, _ in model.named_buffers()], "cpu")


# A process group.


@contextmanager
def pretended_world(dims: Dims) -> Iterator[comm.World]:
    """Creates a process group of `dims.world_size` within the context; nothing is sent.

    Libraries keep groups in globals, which are restored when the context ends. There must be no
    process group yet.

    Args:
        dims: The layout.

    Yields:
        Its rank 0, on a CPU.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    zero.import_engine()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dims.world_size)
    cut = dims.tensor_parallel_size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this kind of group does not support a timeout
            if cut > 1:
                comm.join_groups(cut)
            yield comm.World(**vars(dims), rank=0, local_rank=0, device=torch.device("cpu"))
    finally:
        if cut > 1:
            comm.forget_groups()
        zero.forget_world()
        dist.destroy_process_group()


def assume_even_rows(model: nn.Module) -> None:
    """Makes expert-parallel layers exchange equal numbers of rows with all ranks, in place."""
    for layer in model.modules():
        if isinstance(layer, SelectingMoE) and isinstance(layer.dispatcher, RowExchange):
            exchange: Any = layer.dispatcher
            share = min(1.0, layer.config.capacity_factor or 1.0)
            exchange.begin = partial(_begin_evenly, exchange.begin, exchange.parts, share)


def _begin_evenly(begin: Callable[[Any], Counts], parts: int, share: float, plan: Any) -> Counts:
    rows = round(plan.assignment_M.shape[0] * share)
    way = [rows // parts + (part < rows % parts) for part in range(parts)]
    return begin(plan)._replace(numbers=torch.tensor([way, way]))


# What is observed.


class Held:
    """An observer of the memory of tensors from creation to release.

    Attributes:
        now: Bytes in use.
        peak: Maximum since `restart`.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Counts the memory that an operation has allocated."""
        inputs = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in inputs and storage not in self._known and storage.nbytes():
                self._known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size

    def restart(self) -> int:
        """Returns the peak since the last call."""
        peak, self.peak = self.peak, self.now
        return peak


_SECOND_IS_SENT = {
    *("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base"),
}
"""Collectives whose first argument is their result."""


class Traffic:
    """An observer of collectives.

    Args:
        dims: The layout.

    Attributes:
        sent: Bytes sent, by what the members of a group share; see `sent_bytes`.
    """

    def __init__(self, dims: Dims) -> None:
        cut, experts = dims.tensor_parallel_size, dims.expert_parallel_size
        data = dims.data_parallel_size
        self._axes = {
            "data": (data, cut),
            "tensor": (cut, 1),
            "expert": (experts, cut),
            "expert data": (data // experts, experts * cut),
            "world": (dims.world_size, 1),
        }
        """The size of a group, and the distance of its ranks; of equal groups the first counts."""
        self.sent: dict[str, int] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Counts an operation, if it is a collective."""
        if "c10d" not in func.namespace:
            return
        name = func._schema.name.rpartition("::")[2].strip("_")
        if name in {"wait_tensor", "barrier"}:
            return
        ranks = dist.get_process_group_ranks(_group_of((*args, *kwargs.values())))
        if len(ranks) == 1:
            return
        group = len(ranks), ranks[1] - ranks[0]
        equal = [axis for axis, members in self._axes.items() if members == group]
        if "all" in name and "to" in name and "expert" in equal:
            equal = ["expert"]  # only these exchange rows
        payload = sum(
            tensor.nbytes for tensor in tensors_in(args[1 if name in _SECOND_IS_SENT else 0])
        )
        if name == "all_gather_into_tensor":
            payload *= len(ranks)
        axis = (equal or ["other"])[0]
        self.sent[axis] = self.sent.get(axis, 0) + sent_bytes(name, payload, len(ranks))


def sent_bytes(kind: str, payload: int, size: int) -> int:
    """Returns the bytes that a rank sends in a ring algorithm, averaged over the ranks of a group.

    An all-reduce is a reduce-scatter and an all-gather (Thakur et al. 2005, "Optimization of
    Collective Communication Operations in MPICH").

    Args:
        kind: The name of the collective in torch's dispatcher.
        payload: Bytes that a rank passes in; of an all-gather those that it gets.
        size: Number of ranks in the group.
    """
    return (2 if kind in {"allreduce", "all_reduce"} else 1) * payload * (size - 1) // size


def _group_of(values: Sequence[Any]) -> Any:
    named: dict[str, Any] = {each.group_name: each for each in distributed_c10d._world.pg_map}
    for value in values:
        if isinstance(value, str) and value in named:
            return named[value]
        if type(value).__name__ == "ScriptObject" and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return dist.group.WORLD


# FLOPs.


def forward_flops(
    model: nn.Module, inputs: Inputs, run: Callable[[nn.Module, Inputs], object]
) -> int:
    """Counts the FLOPs of a forward pass in training mode.

    Values that only routing records or routing losses need do not count. Causal attention counts in
    full, as model FLOPs do by convention (Chowdhery et al. 2022, appendix B).

    Args:
        model: The model on the meta device, from `build_model`; it gets parameters without values.
        inputs: The inputs of the model, whose values do not matter.
        run: Runs the forward pass.

    Returns:
        FLOPs of matrix products; a multiply-add counts as two.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_OTHERS)
    with torch.no_grad(), shapes_only(), counter:
        allocate(model, torch.float32)
        ask_for_statistics(model, losses=frozenset(), samples=False, record_is_due=False)
        run(model.train(), tree_map(torch.empty_like, inputs))
    return counter.get_total_flops()


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _grouped_mm(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(rows) * matrices[-1]


_OTHERS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.polyad.grouped_mm: _grouped_mm,
}
"""FLOPs of operations that torch does not count, as functions of the shapes of the arguments."""
