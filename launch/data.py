"""`polyad data verify`: whether prepared folders are what was written, to the last byte."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, user_path
from polyad.data.images.dataset import ImageData, holds_images
from polyad.data.images.manifest import ImageManifest
from polyad.data.prepared import Read
from polyad.data.progress import Progress
from polyad.data.text.manifest import Manifest
from polyad.data.text.verification import bytes_to_verify, check_prepared, unsealed, verify_files
from polyad.launch.output import align

IMAGES_NOTE = (
    "images are read when they are trained on; here the files that hold them are looked at"
)


def verify_data(folders: Sequence[str]) -> dict[str, Any]:
    """Reads every byte of prepared folders, and goes on where one is damaged.

    Args:
        folders: of prepared data.

    Returns:
        JSON values: `folders`, each with its `files`, whether it is `good` and a `note` on what
        could not be checked; `seconds`, `bytes`, and `good`, whether nothing is damaged.

    Raises:
        DataError: one is no folder of prepared data; nothing was read.
    """
    paths = list(dict.fromkeys(user_path(folder) for folder in folders))
    images = {
        path: ImageData(path, ImageManifest.read(path)) for path in paths if holds_images(path)
    }
    for path in paths:
        if path not in images:
            check_prepared(path)
    started, done = time.monotonic(), 0
    progress = Progress()
    total = sum(
        images[path].bytes_to_verify() if path in images else bytes_to_verify(path)
        for path in paths
    )
    progress.start("verify", total)

    def read(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done)

    try:
        listed = [_about(path, images.get(path), read) for path in paths]
    finally:
        progress.close()
    return {
        "folders": listed,
        "seconds": time.monotonic() - started,
        "bytes": sum(file["bytes"] for about in listed for file in about["files"]),
        "good": all(about["good"] for about in listed),
    }


def _about(folder: Path, images: ImageData | None, read: Read) -> dict[str, Any]:
    """Reads a folder of images, or of text where there are none."""
    reports = list(verify_files(folder, read) if images is None else images.reports(read))
    note: str | None = IMAGES_NOTE
    if images is None:
        note = unsealed(Manifest.read(folder)) if reports[0].reason is None else None
    status = {True: "verified", False: "damaged"}
    files = [each._asdict() | {"status": status[each.reason is None]} for each in reports]
    good = all(each.reason is None for each in reports)
    return {"folder": str(folder), "files": files, "good": good, "note": note}


def data_table(result: dict[str, Any]) -> str:
    """Verified folders for a person; below them what could not be checked, and what it took."""
    rows: list[tuple[str, ...]] = [("file", "MB", "compared with", "status")]
    notes = []
    for about in result["folders"]:
        for file in about["files"]:
            path = str(Path(about["folder"]) / file["name"])
            size = f"{file['bytes'] / 1e6:,.2f}"
            rows.append((path, size, file["checked"], file["status"]))
        if about["note"] is not None:
            notes.append(f"{about['folder']}: {about['note']}")
    megabytes = result["bytes"] / 1e6
    rate = megabytes / max(result["seconds"], 1e-9)
    took = f"{megabytes:,.2f} MB in {result['seconds']:.1f} s, {rate:,.1f} MB/s"
    return "\n".join([align(rows), *notes, took])


def check_verified(result: dict[str, Any]) -> None:
    """Ends the command with a line where something is damaged.

    Raises:
        DataError: something is; the first is named, and how many there are.
    """
    reasons = [
        file["reason"] for about in result["folders"] for file in about["files"] if file["reason"]
    ]
    if reasons:
        others = len(reasons) - 1
        plural = "s" if others > 1 else ""
        more = f" (and {others} more damaged file{plural})" if others else ""
        raise DataError(f"{reasons[0]}{more}")
