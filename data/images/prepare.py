"""`polyad prepare --images`: an index of images that stay where they are."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from data.errors import DataError, check_path, user_path
from data.images.labels import by_name
from data.images.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    ImageManifest,
    ImageSplitInfo,
    record_of,
)
from data.images.shards import ROW, Entry, Rows
from data.images.sources.found import Found
from data.images.sources.opening import open_images
from data.images.sources.raw import MNIST
from data.images.splits import Listed, missing_classes, split_images
from data.progress import Progress, Report

QUICK = ("folder", "raw")
"""Kinds of shards that are listed anew each time: it is quick, and files may have come or gone, or
labels be in files that are no shards."""
INDEX = re.compile(rf"({'|'.join(SPLITS)})\.(npy|ends\.npy|names|attributes\.npy|domains\.npy)")
"""Files of the index."""
OURS = re.compile(
    rf"({INDEX.pattern}|{re.escape(MANIFEST_FILE)}|"
    rf"{'|'.join(re.escape(name) for names in MNIST.values() for name in names)})(\.partial)?|files"
)
"""All that a prepared folder holds."""


def prepare_images(
    source: str,
    output: str | Path,
    *,
    held_out: float | None = None,
    domains: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> ImageManifest:
    """Makes an index of images, which stay where they are.

    The folder appears complete or not at all. If it was made from the same request, it is kept.

    Args:
        source: `digits`, `hub:OWNER/NAME`, or a file or folder; see `open_images`.
        output: The folder to make.
        held_out: Share of the training images that become the validation split; None: 0.01 where
            the data set has no validation split of its own beside a test.
        domains: Whether the source has a folder for each domain, and in these one for each class;
            images are then held out within each domain.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes them to standard error.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, an image's label or the output folder will not do.
    """
    check_path(str(output))
    if held_out is not None and not 0 < held_out < 1:
        raise DataError(f"--held-out: {held_out} is not allowed: above 0 and below 1")
    output = user_path(output).resolve()
    asked = [source, held_out, *(["domains"] if domains else [])]
    request = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    _check_output(output, request, overwrite)
    progress = Progress(report)
    found = open_images(source, output, domains=domains)
    kept = _kept(output, request, found)
    if kept is not None:
        progress.say(f"{output}: was prepared from the same images; it is kept")
        return kept
    try:
        listed = _listed(found, progress)
    finally:
        progress.close()
    names, listed = by_name(source, found, listed)
    for domain, missing in missing_classes(listed["train"], names, found.domain_names):
        progress.say(f"{domain}: has no image of {missing}")
    splits, said = split_images(listed, held_out, found.domain_names)
    return _written(output, source, request, found, names, splits, said)


def _check_output(output: Path, request: str, overwrite: bool) -> None:
    manifest = output / MANIFEST_FILE
    if not manifest.exists():
        others = [e.name for e in output.iterdir()] if output.is_dir() else []
        foreign = [name for name in others if not OURS.fullmatch(name)]
        if f"{MANIFEST_FILE}.partial" not in others and not overwrite:  # nothing of ours was begun
            foreign += [name for name in others if INDEX.fullmatch(name)]
        if output.exists() and (not output.is_dir() or foreign):
            what = f"holds {foreign[0]}" if foreign else "is a file"
            raise DataError(f"--output: {output}: {what}, and is not a folder of prepared images")
        return
    try:
        same = ImageManifest.read(output).request == request
    except DataError:
        same = False
    if not same and not overwrite:
        raise DataError(f"--output: {output}: holds other prepared data; --overwrite replaces it")


def _kept(output: Path, request: str, found: Found) -> ImageManifest | None:
    """The manifest of a folder that was made from the same request and files."""
    try:
        manifest = ImageManifest.read(output)
    except DataError:
        return None
    if manifest.version != FORMAT_VERSION:
        return None
    if (manifest.request, manifest.shards) != (request, list(found.shards)):
        return None
    if manifest.stamp != _stamp(found) or any(s.kind in QUICK for s in found.shards):
        return None
    complete = all((output / name).is_file() for name in manifest.files)
    return manifest if complete else None


def _stamp(found: Found) -> str:
    """A digest of the names of classes, and of when the files of images were written last."""
    times = [os.stat(shard.path).st_mtime_ns for shard in found.shards if shard.kind not in QUICK]
    known = [times, found.class_names, found.names_of_shards]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _listed(found: Found, progress: Progress) -> dict[str, Listed]:
    listed = {}
    for split in (name for name in SPLITS if name in found.splits):
        progress.start(f"index {split}", found.total_bytes)
        rows: list[tuple[int, int, int, int]] = []
        attributes: list[npt.NDArray[np.uint8]] = []
        domains: list[int] = []
        names: list[str] = []
        done = 0
        for entry in found.splits[split]():
            _check_name(entry)
            rows.append(entry[:4])
            names.append(entry.name)
            if entry.attributes is not None:
                attributes.append(entry.attributes)
            if entry.domain is not None:
                domains.append(entry.domain)
            done += entry.size
            progress.update(done)
        progress.say(f"index {split}: {len(rows):,} images")
        of_each = np.stack(attributes) if attributes else None
        of_domain = np.array(domains, dtype=np.int32) if domains else None
        listed[split] = Listed(np.array(rows, dtype=ROW), names, of_each, of_domain)
    if not listed.get("train") or not len(listed["train"].rows):
        raise DataError("--images: the source has no training images")
    return listed


def _check_name(entry: Entry) -> None:
    if "\n" in entry.name:
        raise DataError(f"{entry.name!r}: a name of an image holds no line feed")
    if not -1 <= entry.label < 2**31:
        raise DataError(f"{entry.name}: has the label {entry.label}, which is no number of a class")


def _written(
    output: Path,
    source: str,
    request: str,
    found: Found,
    names: list[str],
    splits: dict[str, Listed],
    said: str | None,
) -> ImageManifest:
    """Writes the index; one that says the same stays as it is, since a run may read it."""
    output.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for split, each in splits.items():
        encoded = [os.fsencode(name) for name in each.names]
        ends = np.cumsum([len(name) + 1 for name in encoded], dtype=np.int64) - 1
        written += [
            _save(output / f"{split}.npy", each.rows),
            _save(output / f"{split}.ends.npy", ends),
            _write(output / f"{split}.names", partial(_put, b"".join(n + b"\n" for n in encoded))),
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
                grouped=split in found.grouped or (said is not None and bool(found.grouped)),
            )
            for split, each in splits.items()
        },
        shards=list(found.shards),
        stamp=_stamp(found),
        held_out=said,
        request=request,
        fingerprint=_fingerprint(splits["train"], names, found.domain_names),
        files={path.stem: record_of(path) for path in written},
    )
    new = _write(output / MANIFEST_FILE, partial(_put, manifest.to_json().encode()))
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


def _save(path: Path, array: npt.NDArray[np.generic] | Rows) -> Path:
    """As `_write`, an array."""
    return _write(path, partial(np.save, arr=array, allow_pickle=False))


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Writes what is to become a file, and gives the partial one."""
    unfinished = path.with_name(f"{path.name}.partial")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return unfinished


def prepared_rows(
    manifest: ImageManifest, output: Path, seconds: float
) -> Iterator[tuple[str, str]]:
    """What was prepared, for a person: names and values.

    Args:
        manifest: Of the folder.
        output: The folder.
        seconds: That it took.
    """
    for split, about in manifest.splits.items():
        fewest, most = min(about.per_class), max(about.per_class)
        each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        of = "with each attribute" if manifest.has_attributes else "of each class"
        yield split, f"{about.images:,} images, {each} {of}"
    names = manifest.class_names
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    yield "attributes" if manifest.has_attributes else "classes", f"{len(names):,}: {shown}"
    if manifest.domain_names:
        counts = np.sum([about.per_domain for about in manifest.splits.values()], axis=0)
        each_of = zip(manifest.domain_names, counts.tolist(), strict=True)
        shown = ", ".join(f"{name} {images:,}" for name, images in each_of)
        yield "domains", f"{len(manifest.domain_names)}: {shown}"
    if manifest.held_out:
        yield "held out", manifest.held_out
    yield "folder", str(output)
    yield "time", f"{seconds:.1f} s"
