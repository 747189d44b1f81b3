"""Predicted cost of reading held-out text with a decoder, whole or block by block."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyad.model.build import build_model, initial_value, place
from polyad.model.decoder import Decoder, DecoderSettings
from polyad.model.kernels import switch
from polyad.parallel.host_memory import free_memory
from polyad.parallel.plan.memory import Memory
from polyad.parallel.plan.replay import replayed
from polyad.parallel.plan.weightless import Weightless
from polyad.parallel.plan.work import Computed, Work
from polyad.parallel.streamed import Streamed, bytes_of, parts_of
from polyad.parallel.weights import open_weights
from polyad.parallel.zero import DTYPES
from polyad.train.config.run import RunConfig
from polyad.train.forecast.forecast import Machines
from polyad.train.forecast.measured import LIBRARIES
from polyad.train.forecast.times import operation_seconds
from polyad.train.tasks.random_input import random_batch

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ReadOnce:
    """Cost of a batch of windows that passes through a decoder part by part."""

    weights: int
    """Bytes of weights of all parts."""
    largest_part: int
    """Bytes of weights of the largest part."""
    peak: int
    """Peak bytes: weights of a part, and its activations for the batch."""
    computed: int
    """Peak bytes of activations, in any part."""
    tokens: int
    """Number of tokens in the batch."""
    stream: int
    """Bytes of activations between two blocks."""
    work: list[tuple[Work, int]]
    """Operations, and the number of times each is executed."""


def read_once(config: RunConfig, batch_size: int, *, on_gpu: bool) -> ReadOnce:
    """Runs a batch of windows through the parts of a decoder, on shapes alone.

    Only one of several equal blocks is run.

    Args:
        config: resolved configuration of a decoder that predicts text.
        batch_size: number of windows in the batch.
        on_gpu: whether to use the operations of a GPU.
    """
    precision = config.train.precision
    memory, peaks = Memory(), Counter[str]()
    work: dict[Any, Work] = {}
    computed = Computed(lambda: "forward")
    times: Counter[Any] = Counter()
    model = build_model(config.model).eval()
    assert isinstance(model, Decoder)
    with (
        torch.no_grad(),
        switch.without_numbers(on_gpu=on_gpu),
        Weightless([memory, lambda operation: computed(operation)]) as weightless,
    ):
        batch = random_batch(config.model, range(batch_size), config.data)
        ids_BT, target_BT = batch[:2]
        x_BTD = torch.empty(*ids_BT.shape, model.config.hidden_size, dtype=DTYPES[precision])
        for tensor in (ids_BT, target_BT, x_BTD):
            weightless.forget(tensor)
        positions_T = torch.arange(ids_BT.shape[1])
        given = model.given(positions_T, x_BTD.dtype)
        parts = parts_of(model)
        runs: list[Callable[[], Any]] = [
            lambda: model.embed(ids_BT, positions_T),
            *(lambda block=block: block(x_BTD, given) for block in model.blocks),
            lambda: model.score(x_BTD, target_BT),
        ]
        alike = Counter(_form(model, part) for part in parts)
        for part, run in zip(parts, runs, strict=True):
            if not (number := alike.pop(_form(model, part), 0)):
                continue
            computed = Computed(lambda: "forward")
            _fill(model, part, DTYPES[precision], memory, weightless)
            computed.times.clear()
            memory.start_peak()
            run()
            held = Counter(memory.peak)
            peaks["peak"] = max(peaks["peak"], held.total())
            peaks["computed"] = max(peaks["computed"], held.total() - held["weights"])
            for key, amount in computed.times.items():
                work[key] = computed.of[key]
                times[key] += number * amount
            place(model, _shapes(model, part), "meta", DTYPES[precision])
    return ReadOnce(
        weights=sum(bytes_of(model, precision, part) for part in parts),
        largest_part=max(bytes_of(model, precision, part) for part in parts),
        peak=peaks["peak"],
        computed=peaks["computed"],
        tokens=ids_BT.numel(),
        stream=x_BTD.nbytes,
        work=[(work[key], number) for key, number in times.items()],
    )


def reading(
    config: RunConfig, folder: Path, machines: Machines | None, told: Callable[[float], None]
) -> dict[str, Any] | None:
    """Predicts reading text with a folder of weights, for its plan.

    Args:
        config: resolved configuration.
        folder: the folder of weights.
        machines: GPUs, one of which reads; None: this process on this machine, where operations and
            the largest part are timed.
        told: called with the share timed.

    Returns:
        JSON values; None unless the model is a decoder that predicts text.
    """
    if not isinstance(config.model, DecoderSettings) or config.model.head is not None:
        return None
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size
    read = read_once(config, batch_size, on_gpu=machines is not None)
    if machines is not None:
        device, tf32 = machines.device, config.train.tf32
        times = [(operation_seconds(each, device, tf32=tf32), n) for each, n in read.work]
        computed = sum(seconds * number for seconds, number in times)
        calls = sum(number for _, number in times) * device.host_seconds
        return describe_reading(
            read,
            config,
            seconds=max(computed, calls),
            rate=machines.storage,
            memory=device.memory,
            libraries=device.libraries,
        )
    computed = sum(replayed(read.work, told).values())
    model = Streamed(open_weights(folder), torch.device("cpu"), config.train.precision)
    part = max(parts_of(model), key=lambda each: bytes_of(model, model.precision, each))
    began = time.perf_counter()
    with model.part(*part):
        rate = read.largest_part / (time.perf_counter() - began)
    return describe_reading(
        read, config, seconds=computed, rate=rate, memory=free_memory(), libraries=LIBRARIES
    )


def describe_reading(
    read: ReadOnce,
    config: RunConfig,
    *,
    seconds: float,
    rate: float,
    memory: int,
    libraries: int,
) -> dict[str, Any]:
    """Makes the contents of a plan for reading.

    Args:
        read: cost of a batch.
        config: resolved configuration.
        seconds: time of all operations of a batch.
        rate: bytes of weights read per second.
        memory: the device's memory in bytes.
        libraries: bytes of memory for libraries per process.

    Returns:
        JSON values.
    """
    batches = MILLION / read.tokens
    whole = read.weights + read.computed + libraries
    return {
        "sequence_length": config.model.units_per_sample(),
        "batch_size": read.tokens // config.model.units_per_sample(),
        "precision": config.train.precision,
        "weights_bytes": read.weights,
        "whole_bytes": whole,
        "fits_whole": whole <= memory,
        "largest_part_bytes": read.largest_part,
        "streamed_bytes": read.peak + libraries,
        "between_blocks_bytes_per_million_tokens": round(batches * read.stream),
        "weights_seconds": read.weights / rate,
        "seconds_per_million_tokens": batches * seconds,
    }


def _form(model: nn.Module, part: tuple[str, ...]) -> tuple[Any, ...]:
    """Key that is the same for equal parts."""
    block = model.get_submodule(part[0].removesuffix(".")) if "blocks." in part[0] else None
    shapes = (tuple(p.shape) for n, p in model.named_parameters() if n.startswith(part))
    return (part if block is None else repr(block), *shapes)


def _shapes(model: nn.Module, part: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, torch.empty(each.shape, dtype=each.dtype, device="meta"))
        for name, each in (*model.named_parameters(), *model.named_buffers())
        if name.startswith(part)
    ]


def _fill(
    model: nn.Module,
    part: tuple[str, ...],
    dtype: torch.dtype,
    memory: Memory,
    weightless: Weightless,
) -> None:
    """Assigns weights to memory that is never accessed."""
    names = [name for name, _ in model.named_parameters() if name.startswith(part)]
    shapes = {name: each.shape for name, each in model.named_parameters()}
    place(model, ((name, torch.empty(shapes[name], dtype=dtype)) for name in names), dtype=dtype)
    buffers = [name for name, _ in model.named_buffers() if name.startswith(part)]
    place(model, ((name, initial_value(model, name, 0)) for name in buffers))
    filled = dict((*model.named_parameters(), *model.named_buffers()))
    held = [filled[name] for name in (*names, *buffers)]
    memory.name(held, "weights")
    for tensor in held:
        weightless.forget(tensor)
