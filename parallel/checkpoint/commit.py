"""How a folder of files becomes a checkpoint, and what is removed after that.

Imports no torch: the process that writes snapshots does it, or the training process itself.
"""

import contextlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from polyad.parallel.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    FileRecord,
    record_of,
    render,
)
from polyad.parallel.checkpoint.storage import (
    discard,
    reason_of,
    remove_file,
    remove_tree,
    rename,
    replace_file,
    set_aside,
    sync_folder,
    write_file,
)
from polyad.parallel.checkpoint.tensor_bytes import RawTensor, all_finite, write_tensors

STEP_FOLDER = re.compile(r"step-(\d{8,})")
LATEST_FILE, BEST_FILE = "latest", "best"
LEFT_BY_CRASHES = (".step-*.partial", ".step-*.deleted", ".step-*.replaced")


class NotFiniteError(ValueError):
    """Values that no run can go on from: NaN or infinity. One line that names them."""

    exit_status = 2


class Piece(NamedTuple):
    """A box of one tensor, as the index describes it."""

    name: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    step: float


class Shard(NamedTuple):
    """What one process wrote: JSON values, which travel between processes."""

    entries: list[dict[str, Any]]
    """Entries of the index."""
    name: str
    bytes: int
    digests: list[Any]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept when a new one is written."""

    last: int | None = None
    """How many of the newest good checkpoints are kept; None keeps all."""
    every: int = 0
    """Checkpoints whose step is a multiple of this are always kept; 0: none."""
    best: int | None = None
    """The step of the best one, which is always kept, and named in `best`; None: there is none."""
    judged: bool = True
    """Whether no validation of the new one's weights is due; else it may turn out not to be good,
    and takes the place of none."""


def step_folder(step: int) -> str:
    """The name of a checkpoint."""
    return f"step-{step:08d}"


def staging_folder(folder: Path, step: int) -> Path:
    """A new name for a folder that is not a checkpoint yet.

    Each name is used once: what a process writes that outlives its run is never read.
    """
    return folder / f".{step_folder(step)}.{secrets.token_hex(4)}.partial"


def step_folders(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint in a run's `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if STEP_FOLDER.fullmatch(p.name)), key=_step)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Folders that have a manifest: every checkpoint that was committed has one."""
    return [path for path in step_folders(folder) if (path / MANIFEST_FILE).is_file()]


def write_shard(
    staging: Path,
    rank: int,
    tensors: Sequence[RawTensor],
    pieces: Sequence[Piece],
    *,
    check_finite: bool = True,
) -> Shard:
    """Writes the file of one process; beside its state it holds one tensor at a time.

    Args:
        staging: the folder.
        rank: of the process.
        tensors: the content.
        pieces: what each of them is.
        check_finite: whether numbers of fp32 have to be finite.

    Raises:
        NotFiniteError: a number is NaN or infinite: such weights take no good checkpoint's place.
    """
    path = staging / f"rank-{rank:05d}.safetensors"
    checked = [
        replace(tensor, data=partial(_finite, tensor, piece))
        if check_finite and tensor.dtype == "F32"
        else tensor
        for tensor, piece in zip(tensors, pieces, strict=True)
    ]
    written = write_tensors(path, checked)
    entries = [
        piece._asdict() | {"file": path.name, "begin": tensor.begin, "xxh3": tensor.xxh3}
        for piece, tensor in zip(pieces, written.tensors, strict=True)
    ]
    return Shard(entries, path.name, written.record.bytes, list(written.record.digests))


def _finite(tensor: RawTensor, piece: Piece) -> Any:
    """The bytes of a tensor of fp32, whose numbers are all finite."""
    data = tensor.data()
    if not all_finite(memoryview(data)):
        raise NotFiniteError(f"{piece.name} ({piece.field}) has numbers that are not finite")
    return data


def write_rest(staging: Path, step: int, shards: Sequence[Shard], others: dict[str, bytes]) -> None:
    """Writes the index of what all shards hold, and the other files; the manifest last."""
    index = json.dumps(_index(shards)).encode()
    files = {shard.name: FileRecord(shard.bytes, tuple(shard.digests)) for shard in shards}
    for name, content in ({"index.json": index} | others).items():
        write_file(staging / name, [content])
        files[name] = record_of(content)
    write_file(staging / MANIFEST_FILE, [render(step, files)])
    sync_folder(staging)


def commit(
    staging: Path, step: int, shards: Sequence[Shard], others: dict[str, bytes], keep: Retention
) -> Path:
    """Makes a checkpoint of a staging folder whose shards are all on the disk.

    Args:
        staging: the folder, beside the checkpoints.
        step: optimizer steps done.
        shards: of all processes.
        others: the small files, by name.
        keep: which checkpoints stay.

    Returns:
        The checkpoint's folder.
    """
    folder = staging.parent
    final = folder / step_folder(step)
    write_rest(staging, step, shards, others)
    # The folder exists if this step was saved before, and was damaged, not judged, or the run went
    # back. Until the new one has its name, the old one can be put back: see `put_back`.
    replaced = set_aside(final, "replaced") if final.exists() else None
    try:
        rename(staging, final)
    except OSError:
        if replaced is not None and not final.exists():
            with contextlib.suppress(OSError):  # the next start of the run does it
                rename(replaced, final)
        raise
    replace_file(folder / LATEST_FILE, f"{final.name}\n".encode())
    if keep.best is not None and (folder / step_folder(keep.best) / MANIFEST_FILE).is_file():
        replace_file(folder / BEST_FILE, f"{step_folder(keep.best)}\n".encode())
    elif (folder / BEST_FILE).is_file():  # a checkpoint that is no longer the best, or not kept
        remove_file(folder / BEST_FILE)
    if replaced is not None:
        _remove(replaced, remove_tree)
    prune(folder, step, keep)
    return final


def prune(folder: Path, step: int, keep: Retention) -> None:
    """Removes the checkpoints that are not to be kept.

    That of `step` was just written and always stays. It is good once it is judged, so the last good
    one is never removed. Others count as good if their manifest, the sizes of their files and their
    small files are, and if they are judged; a later one than `step` is of a run that went back, and
    is left alone.
    """
    if keep.last is None:
        return
    before = [path for path in complete_checkpoints(folder) if _step(path) < step]
    newest: list[Path] = []
    for path in reversed(before):
        if len(newest) < keep.last - keep.judged and _is_good(path):
            newest.append(path)
    for path in before:
        for_ever = (keep.every and _step(path) % keep.every == 0) or _step(path) == keep.best
        if path not in newest and not for_ever:
            _remove(path, discard)


def point_at_newest(folder: Path) -> None:
    """Points `latest` at the newest complete checkpoint, or removes it if there is none."""
    found = complete_checkpoints(folder)
    if found:
        replace_file(folder / LATEST_FILE, f"{found[-1].name}\n".encode())
    else:
        remove_file(folder / LATEST_FILE)


def put_back(folder: Path) -> None:
    """Gives checkpoints their names again whose replacement a crash has cut short."""
    for path in replaced_checkpoints(folder):
        final = folder / path.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            rename(path, final)


def replaced_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that stepped aside for another one of the same step, and were not removed."""
    return sorted(folder.glob(".step-*.replaced"))


def remove_leftovers(folder: Path) -> None:
    """Removes what a crash left of checkpoints that were never committed, or half removed."""
    put_back(folder)
    for pattern in LEFT_BY_CRASHES:
        for path in folder.glob(pattern):
            _remove(path, remove_tree)


def _remove(path: Path, way: Callable[[Path], None]) -> None:
    """Removes what is not needed any more; if that fails, a run does not end for it."""
    try:
        way(path)
    except OSError as error:
        print(
            f"polyad: warning: {path}: cannot be removed now: {reason_of(error)}; the next start "
            f"of the run tries again",
            file=sys.stderr,
        )


def _step(path: Path) -> int:
    match = STEP_FOLDER.fullmatch(path.name)
    assert match
    return int(match[1])


def _is_good(path: Path) -> bool:
    from polyad.parallel.checkpoint.contents import (
        read_contents,  # slow to import, and seldom needed
    )

    try:
        return read_contents(path).is_judged
    except CheckpointError:
        return False


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    """Index entries of all processes, grouped by tensor and field."""
    tensors: dict[str, dict[str, Any]] = {}
    for entry in (dict(entry) for shard in shards for entry in shard.entries):
        name, field = entry.pop("name"), entry.pop("field")
        shape, dtype = entry.pop("shape"), entry.pop("dtype")
        fields = tensors.setdefault(name, {})
        about = fields.setdefault(field, {"shape": shape, "dtype": dtype, "chunks": []})
        about["chunks"].append(entry)
    return {"tensors": tensors}
