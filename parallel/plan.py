"""What a layout takes on one rank: memory of model states and traffic of ZeRO, by arithmetic.

DeepSpeed's stages 1 and 2 flatten the weights of each group of parameters and give every rank an
equal part; stage 3 gives every rank an equal part of each parameter. Gradients are summed in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import nn

from polyad.parallel.config import ParallelConfig
from polyad.parallel.dims import Dims
from polyad.parallel.shard import placement_of
from polyad.parallel.zero import DTYPES, STATE_TENSORS, Precision, split_expert_groups, state_fields

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
    all_fields = state_fields(optimizer)
    counter = 4 if "exp_avg" in all_fields else 0

    def flat(parameters: Sequence[nn.Parameter], fields: int, counter: int) -> Flat:
        cut = placement_of(parameters[0]).expert_parallel_size
        return Flat(
            sizes=[each.numel() for each in parameters],
            copies=dims.data_parallel_size // cut,
            fields=fields,
            counter=counter,
        )

    if dims.expert_parallel_size > 1:
        split_expert_groups(optimizer)
    found = []
    for group in optimizer.param_groups:
        kept = len(group.get(STATE_TENSORS, all_fields))
        found.append(flat(group["params"], 1 + kept + averaged, counter))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return found + [flat([parameter], 0, 0) for parameter in frozen]


def model_states(
    flat: Sequence[Flat], parallel: ParallelConfig, precision: Precision, buffer_bytes: int
) -> dict[str, int]:
    """Returns bytes that a rank holds between steps: `weights`, `gradients` and `optimizer`.

    Args:
        flat: From `flat_groups`.
        parallel: With the ZeRO stage.
        precision: Of the forward pass.
        buffer_bytes: Bytes of the model's buffers.
    """
    stage, size = parallel.zero_stage, DTYPES[precision].itemsize
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
    precision: Precision,
    *,
    states: dict[str, int],
    computed: Sequence[tuple[int, int]],
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
        num_parameters: Of the whole model.
        accumulates: Whether a step has several micro-batches.
        temporaries: Tensors as large as a group's part of the masters that the optimizer computes.

    Returns:
        Bytes at the peak, by part.
    """
    stage, size = parallel.zero_stage, DTYPES[precision].itemsize
    trained = [each for each in flat if each.fields]
    bucket = min(parallel.bucket_size, max(num_parameters, 1))
    total = sum(each.total for each in trained)
    if stage == 3:
        whole = sum(each.total for each in flat)
        gradients = states["gradients"]
        buffers = 4 * bucket + size * min(whole, LIVE)
    else:
        gradients = 4 * sum(each.total if stage == 1 else each.part(stage) for each in trained)
        buffers = 2 * bucket * (4 if stage == 1 else size)
    done, backward = 0, 0
    for most, elements in computed:
        held = gradients if accumulates or stage == 3 else gradients * done // max(total, 1)
        backward = max(backward, most + held + buffers)
        done += elements
    activations = max(0, backward - gradients - buffers)
    update = _update(trained, stage, temporaries + 1)
    if update > gradients + buffers + activations:
        activations, buffers = 0, max(0, update - gradients)
    return {
        "weights": states["weights"],
        "gradients": gradients,
        "optimizer": states["optimizer"],
        "activations": activations,
        "buffers": buffers,
    }


def _update(trained: Sequence[Flat], stage: int, temporaries: int) -> int:
    """The peak of an update, which takes group after group and frees the gradients of each."""
    left = [4 * (each.total if stage == 1 else each.part(stage)) for each in trained]
    return max(
        (
            4 * (1 + temporaries) * each.part(stage) + sum(left[number + 1 :])
            for number, each in enumerate(trained)
        ),
        default=0,
    )


def zero_traffic(flat: Sequence[Flat], stage: int, precision: Precision, micro_batches: int) -> int:
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
    size, sent = DTYPES[precision].itemsize, 0
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


def buffer_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's buffers."""
    storages: dict[Any, int] = {
        id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()
    }
    return sum(storages.values())
