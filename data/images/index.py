"""Writes the index of images: rows, names and the manifest, and what they vouch for."""

import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.files import writing
from polyad.data.images.manifest import (
    MANIFEST_FILE,
    SPLITS,
    ImageManifest,
    ImageSplitInfo,
    record_of,
)
from polyad.data.images.packed import GO_ON, PACKED_FILE
from polyad.data.images.shards import Rows, Shard
from polyad.data.images.sources.found import Found
from polyad.data.images.splits import Listed

QUICK = ("folder", "raw")
"""Kinds of shards that are listed anew each time: it is quick, and files may have come or gone, or
labels be in files that are no shards."""
INDEX = re.compile(
    rf"({'|'.join(SPLITS)})\.(npy|ends\.npy|names|attributes\.npy|domains\.npy)|"
    rf"{PACKED_FILE.pattern}"
)
"""Files of the index."""


def write_index(
    output: Path,
    source: str,
    request: str,
    found: Found,
    names: list[str],
    splits: dict[str, Listed],
    said: str | None,
    *,
    accepted: bool,
) -> ImageManifest:
    """Writes the index; one that says the same stays as it is, since a run may read it.

    Args:
        output: The prepared folder.
        source: What the user wrote.
        request: A digest of what was asked for.
        found: The source.
        names: Of the classes.
        splits: The images of each split.
        said: What was held out of what; None: nothing was.
        accepted: Whether what looks like a mistake is meant.

    Raises:
        DataError: The disk refuses it.
    """
    written: list[Path] = []
    shards = found.shards
    if found.packed is not None:
        shards = without_packed(found.shards)
        if (packed := found.packed.close()) is not None:
            about = {"path": str(output / packed.stem), "size": found.packed.size}
            shards += [shard.model_copy(update=about) for shard in found.shards[len(shards) :]]
            written.append(packed)
    for split, each in splits.items():
        encoded = [os.fsencode(name) for name in each.names]
        ends = np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64) - 1
        written += [
            _save(output / f"{split}.npy", each.rows),
            _save(output / f"{split}.ends.npy", ends),
            _write(output / f"{split}.names", b"".join(name + b"\n" for name in encoded)),
        ]
        if each.attributes is not None:
            written.append(_save(output / f"{split}.attributes.npy", each.attributes))
        if each.domains is not None:
            written.append(_save(output / f"{split}.domains.npy", each.domains))
    manifest = ImageManifest(
        source=source,
        class_names=names,
        has_attributes=found.has_attributes,
        domain_names=found.domain_names,
        splits={
            split: ImageSplitInfo(
                images=len(each.rows),
                per_class=each.per_class(len(names)),
                per_domain=each.per_domain(len(found.domain_names)),
            )
            for split, each in splits.items()
        },
        shards=shards,
        stamp=stamp_of(found),
        left_out=dict(found.left_out.counts),
        accepted=accepted,
        held_out=said,
        request=request,
        fingerprint=_fingerprint(splits["train"], names, found.domain_names),
        files={path.stem: record_of(path) for path in written},
    )
    new = _write(output / MANIFEST_FILE, manifest.to_json().encode())
    if _stands(output, manifest):
        for path in written:
            path.unlink()
        if ImageManifest.read(output) == manifest:
            new.unlink()
            return manifest
    else:
        (output / MANIFEST_FILE).unlink(missing_ok=True)  # or it would vouch for some new files
        for path in written:
            path.replace(output / path.stem)
    new.replace(output / MANIFEST_FILE)
    for path in output.iterdir():  # of an earlier index
        if INDEX.fullmatch(path.name) and path.name not in manifest.files:
            path.unlink()
    return manifest


def _stands(output: Path, manifest: ImageManifest) -> bool:
    """Whether a folder's manifest says the same, and the files that it vouches for are there."""
    try:
        there = ImageManifest.read(output)
    except DataError:
        return False
    same = there.model_copy(update={"stamp": manifest.stamp}) == manifest
    files = ((output / name, record) for name, record in manifest.files.items())
    return same and all(path.is_file() and record_of(path) == record for path, record in files)


def _fingerprint(train: Listed, names: list[str], domain_names: list[str]) -> str:
    digest = hashlib.sha256(json.dumps(names).encode())
    digest.update(np.ascontiguousarray(train.rows["size"]).tobytes())
    digest.update(np.ascontiguousarray(train.rows["label"]).tobytes())
    if train.attributes is not None:
        digest.update(np.ascontiguousarray(train.attributes).tobytes())
    if train.domains is not None:
        digest.update(json.dumps(domain_names).encode() + train.domains.tobytes())
    for name in train.names:
        digest.update(os.fsencode(name) + b"\n")
    return digest.hexdigest()


def without_packed(shards: Sequence[Shard]) -> list[Shard]:
    """The shards that are files of the source."""
    return [shard for shard in shards if not PACKED_FILE.fullmatch(Path(shard.path).name)]


def _save(path: Path, array: npt.NDArray[np.generic] | Rows) -> Path:
    """Writes an array, as `_write` does bytes."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return _write(path, content.getbuffer())


def _write(path: Path, content: bytes | memoryview) -> Path:
    """Writes what is to become a file, and gives the partial one."""
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        with writing(path, GO_ON), unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def stamp_of(found: Found) -> str:
    """A digest of the names of classes, and of when the files of images were written last."""
    files = [s.path for s in without_packed(found.shards) if s.kind not in QUICK]
    times = [os.stat(path).st_mtime_ns for path in files]
    known = [times, found.class_names, found.names_of_shards]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
