"""`polyad checkpoint` and `polyad data verify`: lists and verifies what is on disk."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polyad.data.errors import DataError, user_path
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import Manifest
from polyad.launch.command import UsageError
from polyad.parallel.checkpoint.format import CheckpointError, read_contents, verify_contents
from polyad.parallel.checkpoint.manage import LEFT_BY_CRASHES, STEP_FOLDER, step_folders
from polyad.train.results import aligned

Values = dict[str, Any]
"""JSON values of a result, or of one of its rows."""


def list_checkpoints(folder: Path) -> Values:
    """Lists checkpoints; reads manifests, sizes and small files, but no tensors.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Returns:
        The `folder`, and `checkpoints`, oldest first. The `status` of each is complete (manifest
        and sizes are correct), damaged (for a `reason`) or unfinished (not committed); values that
        cannot be read are None.

    Raises:
        UsageError: there is no checkpoint, not even a broken one.
    """
    place, paths = _find(folder)
    return {"folder": str(place), "checkpoints": [_checkpoint(path) for path in paths]}


def verify_checkpoints(folder: Path) -> Values:
    """Reads every byte of checkpoints and compares it with the manifests.

    Args:
        folder: a run, its `checkpoints` folder, or one checkpoint.

    Returns:
        As of `list_checkpoints`, where `status` may be verified; `seconds`, the `bytes` that were
        read, and `good`: nothing is damaged.

    Raises:
        UsageError: there is no checkpoint, not even a broken one.
    """
    result = list_checkpoints(folder)
    whole = [each for each in result["checkpoints"] if each["status"] == "complete"]
    total, begun, before = sum(each["bytes"] for each in whole), time.monotonic(), 0
    with _progress(total) as bar:

        def report(done: int) -> None:
            bar.update(before + done - bar.n)

        for each in whole:
            try:
                verify_contents(Path(result["folder"]) / each["name"], report)
                each["status"] = "verified"
            except CheckpointError as error:
                each |= {"status": "damaged", "reason": str(error)}
            before += each["bytes"]
    good = all(each["status"] != "damaged" for each in result["checkpoints"])
    return result | {"seconds": time.monotonic() - begun, "bytes": total, "good": good}


def checkpoints_text(result: Values) -> str:
    """Formats listed or verified checkpoints; below the table why one is damaged."""
    rows = [("checkpoint", "step", "MB", "processes", "saved", "status")]
    for each in result["checkpoints"]:
        step, size, saved = each["step"], each["bytes"], each["saved_at"]
        cells = (
            "" if step is None else f"{step:,}",
            "" if size is None else f"{size / 1e6:,.1f}",
            str(each["processes"] or ""),
            "" if saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(saved)),
        )
        rows.append((each["name"], *cells, each["status"]))
    lines = [*aligned(rows), *(each["reason"] for each in result["checkpoints"] if each["reason"])]
    if "seconds" in result:
        gigabytes, seconds = result["bytes"] / 1e9, result["seconds"]
        rate = gigabytes / max(seconds, 1e-9)
        lines.append(f"{gigabytes:,.2f} GB in {seconds:.1f} s, {rate:.2f} GB/s")
    return "\n".join(lines)


def _progress(total_bytes: int) -> Any:
    return tqdm(total=total_bytes, desc="verify", unit="B", unit_scale=True, disable=None)


def _find(folder: Path) -> tuple[Path, list[Path]]:
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    if STEP_FOLDER.fullmatch(folder.absolute().name) or (folder / "manifest.json").is_file():
        return folder.parent, [folder]
    for place in (folder / "checkpoints", folder):
        folders = step_folders(place)
        folders += [path for pattern in LEFT_BY_CRASHES for path in sorted(place.glob(pattern))]
        if folders:
            return place, folders
    raise UsageError(f"{folder}: holds no checkpoint (a run folder or a step-* folder)")


def _checkpoint(path: Path) -> Values:
    row = {
        "name": path.name,
        **dict.fromkeys(("step", "bytes", "saved_at", "processes")),
        "status": "unfinished",
        "reason": None,
    }
    if path.name.startswith("."):
        return row
    try:
        contents = read_contents(path)
    except CheckpointError as error:
        return row | {"status": "damaged", "reason": str(error)}
    return row | {
        "step": contents.step,
        "bytes": sum(record.bytes for record in contents.files.values()),
        "saved_at": contents.state.saved_at,
        "processes": contents.state.world_size,
        "status": "complete",
    }


def verify_data(folders: Sequence[str]) -> Values:
    """Reads every byte of prepared folders, and continues if one is damaged.

    Returns:
        `folders`, each with its `files`, which are verified or damaged (for a `reason`), and
        whether they are `good`; `seconds`, the `bytes` that were read, and `good` of all.

    Raises:
        DataError: one is not a folder of prepared data; nothing was read.
    """
    paths = dict.fromkeys(user_path(folder) for folder in folders)
    stored = [PreparedData(path, Manifest.read(path)) for path in paths]
    begun = time.monotonic()
    files = [folder.path / name for folder in stored for name in folder.manifest.sha256]
    with _progress(sum(file.stat().st_size for file in files if file.is_file())) as bar:
        listed = [_verified(folder, bar) for folder in stored]
    return {
        "folders": listed,
        "seconds": time.monotonic() - begun,
        "bytes": sum(file["bytes"] for each in listed for file in each["files"]),
        "good": all(each["good"] for each in listed),
    }


def _verified(folder: PreparedData, bar: Any) -> Values:
    files: list[Values] = []
    for name in folder.manifest.sha256:
        path, reason = folder.path / name, folder.damage(name, bar.update)
        size = path.stat().st_size if path.is_file() else 0
        status = "damaged" if reason else "verified"
        files.append({"name": name, "bytes": size, "reason": reason, "status": status})
    good = all(each["reason"] is None for each in files)
    return {"folder": str(folder.path), "files": files, "good": good}


def data_text(result: Values) -> str:
    """Formats verified folders, and what it took."""
    rows = [("file", "MB", "status")]
    for folder in result["folders"]:
        for each in folder["files"]:
            path = str(Path(folder["folder"]) / each["name"])
            rows.append((path, f"{each['bytes'] / 1e6:,.2f}", each["status"]))
    megabytes, seconds = result["bytes"] / 1e6, result["seconds"]
    rate = megabytes / max(seconds, 1e-9)
    last = f"{megabytes:,.2f} MB in {seconds:.1f} s, {rate:,.1f} MB/s"
    return "\n".join([*aligned(rows), last])


def check_data(result: Values) -> None:
    """Ends the command with a line if something is damaged.

    Raises:
        DataError: names the first damaged file, and the number of them.
    """
    files = [file for each in result["folders"] for file in each["files"]]
    reasons = [file["reason"] for file in files if file["reason"]]
    if reasons:
        others = len(reasons) - 1
        plural = "s" if others > 1 else ""
        more = f" (and {others} more damaged file{plural})" if others else ""
        raise DataError(f"{reasons[0]}{more}")
