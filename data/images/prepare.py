"""`polyad prepare --images`: an index of images that stay where they are."""

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.errors import DataError, check_path, user_path
from data.files import locked, writing
from data.images.labels import by_name
from data.images.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    SPLITS,
    ImageManifest,
    ImageSplitInfo,
    record_of,
)
from data.images.mistakes import check_highest, check_mistakes
from data.images.packed import GO_ON, PACKED_FILE, Packed
from data.images.shards import MOST_BYTES, ROW, Entry, Rows, Shard, too_large
from data.images.sources.found import Found
from data.images.sources.opening import open_images
from data.images.sources.raw import MNIST
from data.images.splits import Listed, missing_classes, split_images
from data.progress import Progress, Report

QUICK = ("folder", "raw")
"""Kinds of shards that are listed anew each time: it is quick, and files may have come or gone, or
labels be in files that are no shards."""
FEW = 100
"""Images of a validation split below which it is said that they are few."""
LOCK_FILE = ".lock"
"""Is locked while the folder is prepared."""
INDEX = re.compile(
    rf"({'|'.join(SPLITS)})\.(npy|ends\.npy|names|attributes\.npy|domains\.npy)|"
    rf"{re.escape(PACKED_FILE)}"
)
"""Files of the index."""
OURS = re.compile(
    rf"({INDEX.pattern}|{re.escape(MANIFEST_FILE)}|"
    rf"{'|'.join(re.escape(name) for names in MNIST.values() for name in names)})(\.partial)?|"
    rf"files|{re.escape(LOCK_FILE)}"
)
"""All that a prepared folder holds."""


def prepare_images(
    source: str,
    output: str | Path,
    *,
    held_out: float | None = None,
    domains: bool = False,
    accept: bool = False,
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
        accept: Whether images are prepared although something is probably a mistake, as a class
            without images.
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
    with _alone(output), contextlib.closing(Progress(report)) as progress:
        found = open_images(source, output, domains=domains)
        kept = _kept(output, request, found)
        if kept is not None:
            progress.say(f"{output}: was prepared from the same images; it is kept")
            return kept
        try:
            listed = _listed(found, progress)
            check_highest(source, found, listed)
            names, labelled = by_name(source, found, listed)
            for split in listed.keys() - labelled.keys():
                for name in listed[split].names:
                    found.left_out.add(f"{split} images without a label", name, mistake=False)
            check_mistakes(source, found, labelled, names, accept=accept)
            for domain, missing in missing_classes(labelled["train"], names, found.domain_names):
                progress.say(f"{domain}: has no image of {missing}")
            splits, said = split_images(labelled, held_out, found.domain_names)
            return _written(output, source, request, found, names, splits, said)
        finally:
            if found.packed is not None:
                found.packed.discard()


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Within the block no other process prepares a folder; what is unfinished then is removed.

    Raises:
        DataError: Another one does, or the folder cannot be made.
    """
    lock = output / LOCK_FILE
    with writing(output, "name another folder with --output"):
        output.mkdir(parents=True, exist_ok=True)
        taken = contextlib.ExitStack()
        ours = taken.enter_context(locked(lock, wait=False))
    with taken:
        if not ours:
            raise DataError(
                f"--output: {output}: another process prepares it; wait until that has ended, or "
                f"name another folder"
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                for entry in output.iterdir():
                    if entry.name.endswith(".partial") and INDEX.fullmatch(entry.stem):
                        entry.unlink()
                if [entry.name for entry in output.iterdir()] == [LOCK_FILE]:
                    lock.unlink()
                    output.rmdir()


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
    own = [shard for shard in manifest.shards if Path(shard.path).name != PACKED_FILE]
    theirs = [shard for shard in found.shards if Path(shard.path).name != PACKED_FILE]
    if (manifest.version, manifest.request, own) != (FORMAT_VERSION, request, theirs):
        return None
    if manifest.stamp != _stamp(found) or any(s.kind in QUICK for s in found.shards):
        return None
    complete = all((output / name).is_file() for name in manifest.files)
    return manifest if complete else None


def _stamp(found: Found) -> str:
    """A digest of the names of classes, and of when the files of images were written last."""
    files = [shard.path for shard in found.shards if shard.kind not in QUICK]
    times = [os.stat(path).st_mtime_ns for path in files if Path(path).name != PACKED_FILE]
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
        without = ", ".join(found.left_out.mistakes())
        raise DataError(
            f"--images: the source has no training images{f', but {without}' * bool(without)}"
        )
    return listed


def _check_name(entry: Entry) -> None:
    if "\n" in entry.name:
        raise DataError(f"{entry.name!r}: a name of an image holds no line feed")
    if entry.size > MOST_BYTES:
        raise DataError(f"{entry.name}: {too_large(entry.size)}")
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
    written: list[Path] = []
    shards = found.shards
    if found.packed is not None:
        found.packed.close()
        shards = _with_packed(found.shards, found.packed)
        if found.packed.size:
            written.append(found.packed.partial)
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
        stamp=_stamp(found),
        left_out=dict(found.left_out.counts),
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


def _with_packed(shards: list[Shard], packed: Packed) -> list[Shard]:
    """The shards, with the size of the file of packed images, or without it if it has none."""
    own = [shard for shard in shards if shard.path != str(packed.path)]
    size = {"size": packed.size}
    return [
        *own,
        *(s.model_copy(update=size) for s in shards[len(own) :] if packed.size),
    ]


def _save(path: Path, array: npt.NDArray[np.generic] | Rows) -> Path:
    """As `_write`, an array."""
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
    if manifest.left_out:
        left = (f"{reason}: {count:,}" for reason, count in manifest.left_out.items())
        yield "left out", "; ".join(left)
    validation = manifest.splits.get("validation")
    if validation is not None and validation.images < FEW:
        yield "note", _few(manifest, validation.images)
    yield "folder", str(output)
    yield "time", f"{seconds:.1f} s"


def _few(manifest: ImageManifest, images: int) -> str:
    """Says of a small validation split what it can tell, and how to get a larger one."""
    said = (
        f"validation has {images:,} image{'s' * (images > 1)}: each is {1 / images:.0%} of a score"
    )
    if not manifest.held_out:
        return said
    both = images + manifest.splits["train"].images
    return f"{said}; --held-out 0.2 would take {round(0.2 * both):,} of the {both:,}"
