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
        for field, flat in fragment.values.items():
            _read_range(flat, name, field, fragment.placement, fragment.start, source)
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
    owned = _owned_frozen(engine, named)
    engine.frozen.clear()
    for name, parameter in named:
        placement = placement_of(parameter)
        whole = math.prod(placement.shape)
        if engine.stage == 3:
            start, stop = own_range(parameter)
            part = torch.zeros(max(0, stop - start), device=engine.device)
            _read_range(part, name, MASTER, placement, start, source)
            parts.append((parameter, part))
        else:
            _read_range(parameter.detach().view(-1), name, MASTER, placement, 0, source)
        if name in owned:
            exact = engine.stage < 3 and parameter.dtype == torch.float32
            if exact:
                engine.frozen[name] = parameter.detach().view(-1)
            else:
                engine.frozen[name] = torch.zeros(whole)  # on the CPU: it is only stored
                _read_range(engine.frozen[name], name, MASTER, placement, 0, source)
    return parts


def _read_range(
    flat: torch.Tensor, name: str, field: str, placement: Placement, start: int, source: Source
) -> None:
    """Sets elements of a shard, from `start` on, to the values of a source."""
    for (offset, size), view in placement.views(flat, start):
        view.copy_(source.read(Box(name, field, placement.global_shape, offset, size)))


def _owned_frozen(engine: Engine, named: Sequence[tuple[str, nn.Parameter]]) -> set[str]:
    """Returns the frozen weights that this rank writes: each whole, by one rank that has it."""
    world, owned = engine.world, set[str]()
    for number, (name, parameter) in enumerate(named):
        placement = placement_of(parameter)
        parts = placement.expert_parallel_size
        rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
        is_first = not placement.replicated or world.tensor_parallel_rank == 0
        if is_first and number % copies == rank and name not in engine.left_out:
            owned.add(name)
    return owned


def written(engine: Engine) -> Iterator[Fragment]:
    """Yields what this rank writes to a checkpoint of weights and optimizer state.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank. Parameters that
    tensor parallelism does not split, which are small, are on every such rank: the first one writes
    them. So each element is written by exactly one rank.
    """
    is_first = engine.world.tensor_parallel_rank == 0
    for fragment in fragments(engine).values():
        if is_first or not fragment.placement.replicated:
            yield fragment
    for name, parameter in engine.module.named_parameters():
        if (flat := engine.frozen.get(name)) is not None:
            yield Fragment(
                name=name,
                parameter=parameter,
                placement=placement_of(parameter),
                start=0,
                numel=flat.numel(),
                values={MASTER: flat},
                counter=None,
            )
