"""Writes checkpoints: every process its own fragments, nothing gathered. The format is in
`checkpoint.py`.
"""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.manifest import TokenizerFile
from parallel import comm
from parallel.checkpoint import FORMAT_VERSION
from parallel.fragments import MASTER, Fragment, fragments, persistent_buffers
from parallel.tensor_file import DTYPE_NAMES, Entry, write_safetensors
from parallel.zero import Engine


class TokenizerCopy(NamedTuple):
    """A tokenizer's file, whatever its format."""

    name: TokenizerFile
    content: bytes


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
    """On the meta device where `make` gives them."""
    make: Callable[[], torch.Tensor] | None = None
    """Gives the values when their turn to be written comes."""

    def entry(self) -> Entry:
        """The chunk as a tensor of a file."""
        key = f"{self.name}/{self.field}/{','.join(map(str, self.offset))}"
        return Entry(key, self.values.dtype, self.size, self.make or (lambda: self.values))


def save(
    engine: Engine,
    folder: Path,
    step: int,
    *,
    state: dict[str, Any],
    config_yaml: str,
    tokenizer: TokenizerCopy | None = None,
) -> Path:
    """Writes `folder/step-NNNNNNNN` from all processes; all of them call it.

    In the order that makes a crash harmless: shards, then index and manifest in a staging folder,
    all flushed to disk; then the rename that makes it a checkpoint; then the pointer `latest`.

    Args:
        engine: what to save.
        folder: the run's `checkpoints` folder.
        step: optimizer steps done.
        state: JSON values for `state.json`, the same on every process.
        config_yaml: the resolved configuration.
        tokenizer: the one whose ids the model knows.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: on every process, if writing failed on any.
    """
    final = folder / f"step-{step:08d}"
    staging = folder / f".{final.name}.partial"
    _together(lambda: _fresh_folder(staging) if comm.rank() == 0 else None)
    shard = _together(lambda: _write_shard(staging, comm.rank(), _chunks(engine)))
    shards = comm.gather_to_main(shard)

    def commit() -> None:
        if shards is None:
            return
        _write_rest(staging, step, shards, _small_files(state, config_yaml, tokenizer))
        if final.exists():  # left incomplete by a crash, or a later step of a run that went back
            shutil.rmtree(final)
        staging.rename(final)
        _sync_folder(folder)

    _together(commit)
    if comm.rank() == 0:
        _write_bytes(folder / "latest.partial", f"{final.name}\n".encode())
        (folder / "latest.partial").replace(folder / "latest")
    return final


def save_weights(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    buffers: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    config_yaml: str,
    tokenizer: TokenizerCopy | None = None,
) -> None:
    """Writes a checkpoint of weights alone, at step 0, from this process and without an engine.

    Args:
        folder: the checkpoint's own, which exists and is empty.
        shapes: of the weights, by name.
        read: gives a whole weight, fp32; one is held at a time.
        buffers: of the model, by name.
        state: JSON values for `state.json`.
        config_yaml: the configuration.
        tokenizer: the one whose ids the model knows.
    """
    chunks = [
        Chunk(
            name, MASTER, shape, (0,) * len(shape), shape, 0.0, torch.empty(shape, device="meta"),
            partial(read, name),
        )
        for name, shape in shapes.items()
    ]  # fmt: skip
    chunks += [_buffer_chunk(name, buffer) for name, buffer in buffers.items()]
    shard = _write_shard(folder, 0, chunks)
    _write_rest(folder, 0, [shard], _small_files(state, config_yaml, tokenizer))


def _small_files(
    state: dict[str, Any], config_yaml: str, tokenizer: TokenizerCopy | None
) -> dict[str, bytes]:
    files = {
        "state.json": json.dumps(state, indent=1).encode(),
        "config.yaml": config_yaml.encode(),
    }
    return files | ({tokenizer.name: tokenizer.content} if tokenizer is not None else {})


def _write_rest(
    staging: Path,
    step: int,
    shards: list[tuple[list[dict[str, Any]], dict[str, Any]]],
    others: dict[str, bytes],
) -> None:
    """Writes the index of what all shards hold, and the other files; the manifest last."""
    index = json.dumps(_index([entries for entries, _ in shards]))
    files = {name: about for _, written in shards for name, about in written.items()}
    for name, data in ({"index.json": index.encode()} | others).items():
        _write_bytes(staging / name, data)
        files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest = {"format": "polyad-checkpoint", "version": FORMAT_VERSION, "step": step}
    text = json.dumps(manifest | {"files": files}, indent=1)
    _write_bytes(staging / "manifest.json", text.encode())
    _sync_folder(staging)


def remove_partial(folder: Path) -> None:
    """Removes what a crash left of checkpoints that were never committed."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)


def _together(work: Callable[[], Any]) -> Any:
    """Runs one phase on every process; if it fails on any, it fails on all and none hangs."""
    error: OSError | None = None
    result = None
    try:
        result = work()
    except OSError as caught:
        error = caught
    if comm.any_rank(error is not None):
        raise error or OSError("another process could not write its part of the checkpoint")
    return result


def _fresh_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _chunks(engine: Engine) -> Iterator[Chunk]:
    """What this process writes: every element of every tensor on exactly one process."""
    for name, fragment in fragments(engine).items():
        start, stop = _share(fragment, *_replica(engine, fragment))
        step = float(fragment.state.get("step", 0.0))
        shape = fragment.placement.global_shape
        for field in (MASTER, *engine.state_fields):
            view = fragment.view(field)
            for first, (offset, size) in fragment.placement.boxes(start, stop):
                done = first - fragment.start
                values = view[done : done + math.prod(size)]
                yield Chunk(name, field, shape, offset, size, step, values)
    if comm.rank() == 0:
        for name, buffer in persistent_buffers(engine.module):
            yield _buffer_chunk(name, buffer)
    for name, random_state in random_states(engine.device).items():
        whole = (random_state.numel(),)
        full_name = f"rank-{comm.rank():05d}.{name}"
        yield Chunk(full_name, "random", whole, (0,), whole, 0.0, random_state)


def _buffer_chunk(name: str, buffer: torch.Tensor) -> Chunk:
    shape = tuple(buffer.shape)
    return Chunk(name, "buffer", shape, (0,) * len(shape), shape, 0.0, buffer)


def _replica(engine: Engine, fragment: Fragment) -> tuple[int, int]:
    """Which copy of a fragment this process holds, and how many copies there are.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank; what tensor
    parallelism does not cut, every such rank has.
    """
    world = engine.world
    parts = fragment.placement.expert_parallel_size
    rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
    if engine.stage:
        rank, copies = 0, 1
    if fragment.placement.replicated:
        rank = rank * world.tensor_parallel_size + world.tensor_parallel_rank
        copies *= world.tensor_parallel_size
    return rank, copies


def _share(fragment: Fragment, rank: int, replicas: int) -> tuple[int, int]:
    """The part of a fragment that this process writes where several hold it: an equal share."""
    first = fragment.start + fragment.numel * rank // replicas
    return first, fragment.start + fragment.numel * (rank + 1) // replicas


def _write_shard(
    staging: Path, rank: int, chunks: Iterable[Chunk]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Writes a safetensors file; beside the state it holds one chunk at a time.

    Returns:
        Index entries, and {file name: size and crc32}.
    """
    listed = list(chunks)  # views, not copies
    path = staging / f"rank-{rank:05d}.safetensors"
    written = write_safetensors(path, [chunk.entry() for chunk in listed])
    entries = [
        {
            "name": chunk.name, "field": chunk.field, "shape": chunk.shape,
            "dtype": DTYPE_NAMES[chunk.values.dtype], "offset": chunk.offset, "size": chunk.size,
            "step": chunk.step, "file": path.name, "begin": tensor.begin, "crc32": tensor.crc32,
        }
        for chunk, tensor in zip(listed, written.tensors, strict=True)
    ]  # fmt: skip
    return entries, {path.name: {"bytes": written.bytes, "crc32": written.crc32}}


def _index(shards: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Index entries of all processes, grouped by tensor and field."""
    tensors: dict[str, dict[str, Any]] = {}
    for entry in (entry for shard in shards for entry in shard):
        name, field = entry.pop("name"), entry.pop("field")
        shape, dtype = entry.pop("shape"), entry.pop("dtype")
        fields = tensors.setdefault(name, {})
        about = fields.setdefault(field, {"shape": shape, "dtype": dtype, "chunks": []})
        about["chunks"].append(entry)
    return {"tensors": tensors}


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the random generators that training draws from, as bytes."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
