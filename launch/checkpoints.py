"""`polyad checkpoint list`, `verify` and `delete`: the checkpoints of a run, and their state."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from polyad.data.progress import Progress
from polyad.launch.command import UsageError
from polyad.launch.output import align
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.keeping import (
    LEFT_BY_CRASHES,
    STEP_FOLDER,
    complete_checkpoints,
    point_at_newest,
    step_folders,
)
from polyad.parallel.checkpoint.storage import discard
from polyad.parallel.checkpoint.verification import is_good, read_contents, verify_contents

Status = Literal["complete", "verified", "damaged", "unfinished"]
"""complete: manifest and sizes are right; verified: every byte is; unfinished: never committed."""


class RefusedError(ValueError):
    """A deletion that needs an explicit option."""

    exit_status = 2


def list_checkpoints(folder: Path) -> dict[str, Any]:
    """Lists checkpoints; manifests, sizes and small files are read, tensors are not.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Returns:
        JSON values: `folder`, and `checkpoints`, oldest first.

    Raises:
        UsageError: there is no checkpoint, not even a broken one.
    """
    place, found = _find(folder)
    return {"folder": str(place), "checkpoints": [_about(path) for path in found]}


def verify_checkpoints(folder: Path) -> dict[str, Any]:
    """Reads every byte of what is there and compares it with the manifests.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Returns:
        As `list_checkpoints`; with `seconds`, `bytes` and `good`, whether nothing is damaged.
    """
    place, found = _find(folder)
    listed = [_about(path) for path in found]
    complete = [about for about in listed if about["status"] == "complete"]
    total = sum(about["bytes"] for about in complete)
    started, done = time.monotonic(), 0
    progress = Progress()
    progress.start("verify", total)

    def report(more: int) -> None:
        progress.update(done + more)

    try:
        for about in complete:
            _verify(about, place, report)
            done += about["bytes"]
    finally:
        progress.close()
    seconds = time.monotonic() - started
    good = all(about["status"] in {"verified", "unfinished"} for about in listed)
    return {
        "folder": str(place), "checkpoints": listed, "seconds": seconds, "bytes": total,
        "good": good,
    }  # fmt: skip


def delete_checkpoints(paths: Sequence[Path], *, even_the_last_good: bool) -> dict[str, Any]:
    """Removes checkpoints, good or damaged.

    Args:
        paths: their folders.
        even_the_last_good: otherwise a good one stays where it was, beside the others of its run.

    Returns:
        JSON values: `deleted`, by name, size and status.

    Raises:
        UsageError: one is no checkpoint; nothing is deleted.
        RefusedError: no good one would be left; nothing is deleted.
    """
    paths = list(dict.fromkeys(path.absolute() for path in paths))
    for path in paths:
        if not STEP_FOLDER.fullmatch(path.name) or not path.is_dir():
            raise UsageError(f"{path}: is no checkpoint; a folder step-NNNNNNNN is needed")
    if not even_the_last_good:
        for folder in {path.parent for path in paths}:
            _refuse_the_last_good(folder, [path for path in paths if path.parent == folder])
    deleted = []
    for path in paths:
        deleted.append(_about(path))
        discard(path)
        point_at_newest(path.parent)
    return {"deleted": deleted}


def _refuse_the_last_good(folder: Path, going: Sequence[Path]) -> None:
    staying = [path for path in complete_checkpoints(folder) if path not in going]
    if any(_is_good(path) for path in reversed(staying)):
        return
    for path in reversed(going):
        if _is_good(path):
            raise RefusedError(
                f"{path}: is the last good checkpoint in {folder}; --even-the-last-good deletes it"
            )


def _is_good(path: Path) -> bool:
    try:
        return is_good(verify_contents(path))
    except CheckpointError:
        return False


def _find(folder: Path) -> tuple[Path, list[Path]]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    if STEP_FOLDER.fullmatch(folder.absolute().name) or (folder / "manifest.json").is_file():
        return folder.parent, [folder]
    for place in (folder / "checkpoints", folder):
        found = step_folders(place)
        found += [path for pattern in LEFT_BY_CRASHES for path in sorted(place.glob(pattern))]
        if found:
            return place, found
    raise UsageError(f"{folder}: holds no checkpoint (a run folder or a step-* folder)")


def _about(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": path.name, "step": None, "bytes": None, "saved_at": None, "processes": None,
        "status": "unfinished", "reason": None,
    }  # fmt: skip
    if path.name.startswith("."):
        return about
    try:
        contents = read_contents(path)
    except CheckpointError as error:
        return about | {"status": "damaged", "reason": str(error)}
    manifest, state = contents.manifest, contents.state
    return about | {
        "step": manifest.step, "bytes": manifest.total_bytes, "saved_at": state.saved_at,
        "processes": state.world_size, "status": "complete",
    }  # fmt: skip


def _verify(about: dict[str, Any], place: Path, report: Callable[[int], None]) -> None:
    try:
        verify_contents(place / about["name"], report)
    except CheckpointError as error:
        about |= {"status": "damaged", "reason": str(error)}
    else:
        about["status"] = "verified"


def checkpoint_table(result: dict[str, Any]) -> str:
    """Checkpoints for a person; below them why one is damaged, and what verifying took."""
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "MB", "processes", "saved", "status")]
    listed = result.get("checkpoints", result.get("deleted", []))
    for about in listed:
        saved = about["saved_at"]
        when = "" if saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(saved))
        rows.append(
            (
                about["name"],
                "" if about["step"] is None else f"{about['step']:,}",
                "" if about["bytes"] is None else f"{about['bytes'] / 1e6:,.1f}",
                str(about["processes"] or ""),
                when,
                about["status"] if "deleted" not in result else f"{about['status']}, deleted",
            )
        )
    lines = [align(rows), *(about["reason"] for about in listed if about["reason"])]
    if "seconds" in result:
        rate = result["bytes"] / 1e9 / max(result["seconds"], 1e-9)
        gigabytes = result["bytes"] / 1e9
        lines.append(f"{gigabytes:,.2f} GB in {result['seconds']:.1f} s, {rate:.2f} GB/s")
    return "\n".join(lines)
