"""Fills this rank's part of a model, and determines which part of it the rank writes.

A fragment (`zero.py`) is a row-major range of one parameter's elements. Together the fragments of
all ranks cover every parameter.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from polyad.model.build import buffers_changed
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.shard import Placement, placement_of
from polyad.parallel.source import Source
from polyad.parallel.zero import (
    Engine,
    Fragment,
    fragments,
    own_range,
    refresh,
)


@torch.no_grad()
def fill(engine: Engine, source: Source, *, frozen: bool = True) -> None:
    """Sets master weights, optimizer state and step counters, then the weights of the forward pass.

    Every rank reads only the boxes of its own fragments.

    Args:
        engine: the engine whose weights are set.
        source: the source of the values.
        frozen: whether to set frozen weights too, which have no masters and never change.
    """
    engine.about_to_change()
    held = fragments(engine)
    for name, fragment in held.items():
        stop = fragment.start + fragment.numel
        for field, view in fragment.values.items():
            for first, (offset, size) in fragment.placement.boxes(fragment.start, stop):
                box = Box(name, field, fragment.placement.global_shape, offset, size)
                place = fragment.placement.values(view, first - fragment.start, size)
                place.copy_(source.read(box))
        if fragment.counter is not None:
            fragment.counter.fill_(source.step(name))
    refresh(engine, held, _fill_frozen(engine, source) if frozen else [])
    for name, buffer in persistent_buffers(engine.module):
        buffer.copy_(source.buffer(name))
    buffers_changed(engine.module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers that belong to a model's state, by name; every rank has them whole."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _fill_frozen(engine: Engine, source: Source) -> list[tuple[Any, torch.Tensor]]:
    """Sets frozen weights, which have no masters, and keeps those that this rank writes.

    Returns:
        In stage 3, where weights are set in `refresh`: parameters, and the values of this rank's
        part of each.
    """
    parts: list[tuple[Any, torch.Tensor]] = []
    named = [(n, p) for n, p in engine.module.named_parameters() if not p.requires_grad]
    owners = _owners_of_frozen(engine, named)
    engine.frozen.clear()
    for name, parameter in named:
        placement = placement_of(parameter)
        whole = math.prod(placement.shape)
        if engine.stage == 3:
            start, stop = own_range(parameter)
            part = torch.zeros(max(0, stop - start), device=engine.device)
            _read_range(part, name, placement, start, source)
            parts.append((parameter, part))
        else:
            _read_range(parameter.detach().view(-1), name, placement, 0, source)
        if name in owners:
            exact = engine.stage < 3 and parameter.dtype == torch.float32
            if exact:
                engine.frozen[name] = parameter.detach().view(-1)
            else:
                engine.frozen[name] = torch.zeros(whole)  # on the CPU: it is only stored
                _read_range(engine.frozen[name], name, placement, 0, source)
    return parts


def _read_range(
    flat: torch.Tensor, name: str, placement: Placement, start: int, source: Source
) -> None:
    """Sets elements of a shard, from `start` on, to the values of a source."""
    for first, (offset, size) in placement.boxes(start, start + flat.numel()):
        box = Box(name, MASTER, placement.global_shape, offset, size)
        placement.values(flat, first - start, size).copy_(source.read(box))


def _owners_of_frozen(engine: Engine, named: Sequence[tuple[str, nn.Parameter]]) -> set[str]:
    """Returns the frozen weights that this rank writes: each whole, by one rank that has it."""
    world, mine, at = engine.world, set[str](), dict[tuple[int, bool], int]()
    kept = [(n, placement_of(p)) for n, p in named if n not in engine.left_out]
    totals: dict[tuple[int, bool], int] = {}
    for _, placement in kept:
        kind = placement.expert_parallel_size, placement.replicated
        totals[kind] = totals.get(kind, 0) + math.prod(placement.shape)
    for name, placement in kept:
        kind = parts, replicated = placement.expert_parallel_size, placement.replicated
        rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
        if replicated:
            rank = rank * world.tensor_parallel_size + world.tensor_parallel_rank
            copies *= world.tensor_parallel_size
        if at.get(kind, 0) * copies // totals[kind] == rank:
            mine.add(name)
        at[kind] = at.get(kind, 0) + math.prod(placement.shape)
    return mine


def shares(engine: Engine) -> Iterator[Fragment]:
    """Yields what this rank writes to a checkpoint of weights and optimizer state.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank. Parameters that
    tensor parallelism does not split are on every such rank: these are laid end to end and cut into
    one range per rank, so that the index of a checkpoint, which lists every box, has few entries.
    Each element is written by exactly one rank.
    """
    world = engine.world
    held = list(fragments(engine).values())
    yield from (part for part in held if not part.placement.replicated)
    some = [part for part in held if part.placement.replicated]
    total = sum(part.numel for part in some)
    rank, copies = world.tensor_parallel_rank, world.tensor_parallel_size
    first, last = total * rank // copies, total * (rank + 1) // copies
    at = 0
    for part in some:
        start, stop = max(first - at, 0), min(last - at, part.numel)
        at += part.numel
        if start < stop:
            yield part.cut(start, stop)
