"""Writes checkpoints: every process its own fragments, nothing gathered. The format is in
`checkpoint.py`.
"""

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel import comm
from parallel.checkpoint import FORMAT_VERSION, TORCH_DTYPES
from parallel.fragments import MASTER, Fragment, fragments, persistent_buffers
from parallel.zero import Engine

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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


def save(
    engine: Engine,
    folder: Path,
    step: int,
    *,
    state: dict[str, Any],
    config_yaml: str,
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
        _write_text(staging / "index.json", json.dumps(_index([s[0] for s in shards])))
        _write_text(staging / "state.json", json.dumps(state, indent=1))
        _write_text(staging / "config.yaml", config_yaml)
        files = {name: about for _, about in shards for name, about in about.items()}
        for name in ("index.json", "state.json", "config.yaml"):
            data = (staging / name).read_bytes()
            files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        manifest = {"format": "polyad-checkpoint", "version": FORMAT_VERSION, "step": step}
        _write_text(staging / "manifest.json", json.dumps(manifest | {"files": files}, indent=1))
        _sync_folder(staging)
        if final.exists():  # left incomplete by a crash, or a later step of a run that went back
            shutil.rmtree(final)
        staging.rename(final)
        _sync_folder(folder)

    _together(commit)
    if comm.rank() == 0:
        _write_text(folder / "latest.partial", final.name + "\n")
        (folder / "latest.partial").replace(folder / "latest")
    return final


def remove_partial(folder: Path) -> None:
    """Removes what a crash left of checkpoints that were never committed."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial)


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
            shape = tuple(buffer.shape)
            yield Chunk(name, "buffer", shape, (0,) * len(shape), shape, 0.0, buffer)
    for name, random_state in random_states(engine.device).items():
        whole = (random_state.numel(),)
        full_name = f"rank-{comm.rank():05d}.{name}"
        yield Chunk(full_name, "random", whole, (0,), whole, 0.0, random_state)


def _replica(engine: Engine, fragment: Fragment) -> tuple[int, int]:
    """Which copy of a fragment this process holds, and how many copies there are.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank; what tensor
    parallelism does not cut, every such rank has.
    """
    world = engine.world
    rank, copies = (0, 1) if engine.stage else (world.data_parallel_rank, world.data_parallel_size)
    if fragment.placement.replicated:
        rank = rank * world.tensor_parallel_size + world.tensor_parallel_rank
        copies *= world.tensor_parallel_size
    return rank, copies


def _share(fragment: Fragment, rank: int, replicas: int) -> tuple[int, int]:
    """The part of a fragment that this process writes where several hold it: an equal share."""
    first = fragment.start + fragment.numel * rank // replicas
    return first, fragment.start + fragment.numel * (rank + 1) // replicas


def _write_shard(
    staging: Path, rank: int, chunks: Iterator[Chunk]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Writes a safetensors file; beside the state it holds one chunk at a time.

    Returns:
        Index entries, and {file name: size and crc32}.
    """
    listed = list(chunks)  # views, not copies
    header: dict[str, Any] = {}
    end = 0
    for chunk in listed:
        begin, end = end, end + chunk.values.numel() * chunk.values.element_size()
        key = f"{chunk.name}/{chunk.field}/{','.join(map(str, chunk.offset))}"
        header[key] = {
            "dtype": _NAMES[chunk.values.dtype], "shape": chunk.size, "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    entries = []
    path = staging / f"rank-{rank:05d}.safetensors"
    with path.open("wb") as file:
        whole = 0
        for part in (struct.pack("<Q", len(encoded)), encoded):
            file.write(part)
            whole = zlib.crc32(part, whole)
        for chunk in listed:
            flat = chunk.values.detach().cpu().contiguous().reshape(-1)
            values = flat.view(torch.uint8).numpy().data
            entries.append({
                "name": chunk.name, "field": chunk.field, "shape": chunk.shape,
                "dtype": _NAMES[chunk.values.dtype], "offset": chunk.offset, "size": chunk.size,
                "step": chunk.step, "file": path.name, "begin": file.tell(),
                "crc32": zlib.crc32(values),
            })  # fmt: skip
            whole = zlib.crc32(values, whole)
            file.write(values)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return entries, {path.name: {"bytes": size, "crc32": whole}}


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


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
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
