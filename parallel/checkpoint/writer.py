"""Writes checkpoints: every process its own fragments, nothing gathered. The format is in
`CHECKPOINTS.md`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.box import MASTER
from polyad.parallel.checkpoint.commit import (
    NotFiniteError,
    Piece,
    Retention,
    Shard,
    commit,
    staging_folder,
    step_folder,
    write_rest,
    write_shard,
)
from polyad.parallel.checkpoint.parts import parts_of
from polyad.parallel.checkpoint.storage import make_folder, reason_of, remove_tree
from polyad.parallel.checkpoint.tensor_file import DTYPE_NAMES, Entry
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.shard import placement_of
from polyad.parallel.zero import Engine

T = TypeVar("T")
KEEP_ALL = Retention()


class SaveError(RuntimeError):
    """A checkpoint that could not be written: one line with the reason, on every process."""

    exit_status = 1


NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class Chunk:
    """A box of one tensor that this process writes."""

    name: str
    field: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    step: float
    values: torch.Tensor
    """The values; on the meta device if `make` returns them."""
    make: Callable[[], torch.Tensor] | None = None
    """Returns the values when it is their turn to be written."""
    by_optimizer: bool = False
    """Whether every change of the values is announced by `Engine.about_to_change`."""

    def entry(self) -> Entry:
        """The chunk as a tensor of a file."""
        key = f"{self.name}/{self.field}/{','.join(map(str, self.offset))}"
        return Entry(key, self.values.dtype, self.size, self.make or (lambda: self.values))

    def piece(self) -> Piece:
        """The chunk as the index describes it."""
        dtype = DTYPE_NAMES[self.values.dtype]
        return Piece(self.name, self.field, dtype, self.shape, self.offset, self.size, self.step)


def save(
    engine: Engine,
    folder: Path,
    step: int,
    *,
    state: dict[str, Any],
    config_yaml: str,
    files: Mapping[str, bytes] = NO_FILES,
    keep: Retention = KEEP_ALL,
) -> Path:
    """Writes `folder/step-NNNNNNNN` from all processes; all of them call it.

    In the order that makes a crash harmless: shards, then index and manifest in a staging folder,
    all flushed to disk; then the rename that makes it a checkpoint; then the pointer `latest`; then
    the removal of older ones.

    Args:
        engine: what to save.
        folder: the run's `checkpoints` folder.
        step: optimizer steps done.
        state: JSON values for `state.json`, the same on every process.
        config_yaml: the resolved configuration.
        files: what else lies in it by name, as the tokenizer whose ids the model knows.
        keep: which older checkpoints stay.

    Returns:
        The checkpoint's folder.

    Raises:
        SaveError: on every process, if writing failed on any; older checkpoints are as they were.
    """
    staging = comm.from_main(staging_folder(folder, step))
    try:
        together(step, lambda: make_folder(staging) if comm.rank() == 0 else None)
        chunks = list(chunks_of(engine))  # views, not copies
        shard = together(step, lambda: shard_of(staging, comm.rank(), chunks))
        shards = comm.gather_to_main(shard)
        others = small_files(state, config_yaml, files)
        together(step, lambda: commit(staging, step, shards, others, keep) if shards else None)
    except SaveError:
        if comm.rank() == 0:
            remove_quietly(staging)
        raise
    return folder / step_folder(step)


def save_weights(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    buffers: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    config_yaml: str,
    files: Mapping[str, bytes] = NO_FILES,
) -> None:
    """Writes a checkpoint of weights alone, at step 0, from this process and without an engine.

    Args:
        folder: the checkpoint's own, which exists and is empty.
        shapes: of the weights, by name.
        read: gives a whole weight, fp32; one is held at a time.
        buffers: of the model, by name.
        state: JSON values for `state.json`.
        config_yaml: the configuration.
        files: what else lies in it by name, as the tokenizer whose ids the model knows.
    """
    chunks = [
        Chunk(
            name, MASTER, shape, (0,) * len(shape), shape, 0.0, torch.empty(shape, device="meta"),
            partial(read, name),
        )
        for name, shape in shapes.items()
    ]  # fmt: skip
    chunks += [_buffer_chunk(name, buffer) for name, buffer in buffers.items()]
    # What is converted stays as it is; whoever converts says what is not finite.
    shard = shard_of(folder, 0, chunks, check_finite=False)
    write_rest(folder, 0, [shard], small_files(state, config_yaml, files))


def small_files(
    state: dict[str, Any], config_yaml: str, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Contents of the small files beside the tensors, by name."""
    return {
        "state.json": json.dumps(state, indent=1).encode(),
        "config.yaml": config_yaml.encode(),
        **files,
    }


def shard_of(
    staging: Path, rank: int, chunks: Sequence[Chunk], *, check_finite: bool = True
) -> Shard:
    """Writes the chunks of a process without copying them first; see `write_shard`."""
    tensors = [chunk.entry().raw() for chunk in chunks]
    pieces = [chunk.piece() for chunk in chunks]
    return write_shard(staging, rank, tensors, pieces, check_finite=check_finite)


def together(step: int, work: Callable[[], T]) -> T:
    """Runs one phase on every process; if it fails on any, it fails on all and none hangs.

    Raises:
        SaveError: on every process, with the reason of the first that failed.
    """
    reason = None
    try:
        result = work()
    except OSError as error:
        reason = reason_of(error)
    except NotFiniteError as error:
        reason = str(error)
    raise_together(step, reason)
    return result


def raise_together(step: int, reason: str | None) -> None:
    """Ends a save on every process if any of them has a reason to.

    Raises:
        SaveError: with the reason of the first.
    """
    if not comm.any_rank(reason is not None):
        return
    reasons = {rank: text for rank, text in enumerate(comm.from_all(reason)) if text}
    first = min(reasons)
    raise SaveError(f"step {step} could not be saved: rank {first}: {reasons[first]}")


def remove_quietly(staging: Path) -> None:
    """Removes the folder of a checkpoint that failed; what cannot be removed is left."""
    with contextlib.suppress(OSError):
        remove_tree(staging)


def chunks_of(engine: Engine) -> Iterator[Chunk]:
    """The chunks that this process writes; each element is written by exactly one process.

    All processes call it together: under ZeRO 3 on many of them they exchange values.
    """
    for part in parts_of(engine):
        shape = part.placement.global_shape
        for field, flat in part.values.items():
            for first, (offset, size) in part.placement.boxes(part.start, part.start + part.numel):
                values = part.placement.values(flat, first - part.start, size)
                yield Chunk(
                    part.name, field, shape, offset, size, part.step, values, by_optimizer=True
                )
    yield from _frozen_chunks(engine)
    if comm.rank() == 0:
        for name, buffer in persistent_buffers(engine.module):
            yield _buffer_chunk(name, buffer)
    for name, random_state in random_states(engine.device).items():
        whole = (random_state.numel(),)
        full_name = f"rank-{comm.rank():05d}.{name}"
        yield Chunk(full_name, "random", whole, (0,), whole, 0.0, random_state)


def _frozen_chunks(engine: Engine) -> Iterator[Chunk]:
    """Frozen weights, which have no moments and never change."""
    for name, parameter in engine.module.named_parameters():
        if (flat := engine.frozen.get(name)) is None:
            continue
        placement = placement_of(parameter)
        for first, (offset, size) in placement.boxes(0, flat.numel()):
            values = placement.values(flat, first, size)
            shape = placement.global_shape
            yield Chunk(name, MASTER, shape, offset, size, 0.0, values, by_optimizer=True)


def _buffer_chunk(name: str, buffer: torch.Tensor) -> Chunk:
    shape = tuple(buffer.shape)
    return Chunk(name, "buffer", shape, (0,) * len(shape), shape, 0.0, buffer)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the random generators that training draws from, as bytes."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
