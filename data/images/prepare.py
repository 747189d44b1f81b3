"""`polyad prepare --images`: an index of images that stay where they are."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, check_path, user_path
from polyad.data.files import temporary_folder, writing
from polyad.data.images.index import INDEX, Listed, missing_classes, split_images, write_index
from polyad.data.images.labels import by_name
from polyad.data.images.manifest import ImageManifest
from polyad.data.images.shards import ROW, Entry
from polyad.data.images.sources.found import Found
from polyad.data.images.sources.opening import open_images
from polyad.data.images.sources.published import MNIST
from polyad.data.prepared import MANIFEST_FILE, SPLITS, in_words, put_in_place
from polyad.data.progress import Progress, Report

FEW = 100
"""Number of validation images below which a note says that they are few."""
OURS = re.compile(
    rf"{INDEX.pattern}|{re.escape(MANIFEST_FILE)}|files|"
    rf"{'|'.join(re.escape(name) for names in MNIST.values() for name in names)}"
)
"""All files and folders of a prepared folder."""


def prepare_images(
    source: str,
    output: str | Path,
    *,
    held_out: float | None = None,
    domains: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> ImageManifest:
    """Makes an index of images, which stay where they are; images of tables are copied.

    The folder appears complete or not at all. One made from the same images is kept.

    Args:
        source: `digits`, `hub:OWNER/NAME`, or a file or folder; see `open_images`.
        output: The folder to make.
        held_out: Share of the training images that become the validation split; None for 0.01 if
            the data set has no validation split besides its test split.
        domains: Whether the source has one folder per domain, each with one folder per class;
            images are then held out within each domain.
        overwrite: Whether prepared data in `output` may be replaced.
        report: Receives each line of progress; None writes to standard error.

    Returns:
        The manifest of the folder.

    Raises:
        DataError: An argument, an image's label or the output folder is invalid.
    """
    check_path(str(output))
    if held_out is not None and not 0 < held_out < 1:
        raise DataError(f"--held-out: {held_out} is not allowed: above 0 and below 1")
    output = user_path(output).resolve()
    request = hashlib.sha256(json.dumps([source, held_out, domains]).encode()).hexdigest()
    _check_output(output, request, overwrite)
    with (
        contextlib.closing(Progress(report)) as progress,
        writing(output, "name another folder with --output"),
        temporary_folder(f".{output.name}.partial-", output.parent) as folder,
    ):
        found = open_images(source, folder, output, domains=domains)
        listed = _listed(found, progress)
        if found.packed is not None:
            found.packed.close()
        names, labelled = by_name(source, found, listed)
        for split in listed.keys() - labelled.keys():
            found.left_out[f"{split} images without a label"] += len(listed[split].names)
        for domain, missing in missing_classes(labelled["train"], names, found.domain_names):
            progress.say(f"{domain}: has no image of {missing}")
        splits, said = split_images(labelled, held_out, found.domain_names)
        manifest = write_index(folder, source, request, found, names, splits, said, output)
        if ImageManifest.find(output) == manifest:  # a run may be reading it
            progress.say(f"{output}: already prepared from the same images; kept as it is")
        else:
            put_in_place(folder, output)
        return manifest


def _check_output(output: Path, request: str, overwrite: bool) -> None:
    if not output.exists():
        return
    names = [entry.name for entry in output.iterdir()] if output.is_dir() else []
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if not output.is_dir() or foreign or (names and MANIFEST_FILE not in names):
        what = f"holds {(foreign or names)[0]}" if names else "is a file"
        raise DataError(f"--output: {output}: {what}, and is not a folder of prepared images")
    existing = ImageManifest.find(output)
    if names and (existing is None or existing.request != request) and not overwrite:
        raise DataError(f"--output: {output}: holds other prepared data; --overwrite replaces it")


def _listed(found: Found, progress: Progress) -> dict[str, Listed]:
    listed: dict[str, Listed] = {}
    for split in (name for name in SPLITS if name in found.splits):
        progress.start(f"index {split}", found.total_bytes)
        rows: list[tuple[int, int, int, int]] = []
        attributes: list[npt.NDArray[np.uint8]] = []
        domains: list[int] = []
        names: list[str] = []
        done = 0
        for entry in found.splits[split]():
            _check_name(entry)
            if not entry.size:
                found.left_out.add("images of 0 bytes")
                continue
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
        without = in_words(found.left_out)
        raise DataError(
            f"--images: the source has no training images{f', but {without}' * bool(without)}"
        )
    return listed


def _check_name(entry: Entry) -> None:
    if "\n" in entry.name:
        raise DataError(f"{entry.name!r}: the name of an image must not contain a line feed")
    if not -1 <= entry.label < 2**31:
        raise DataError(
            f"{entry.name}: has the label {entry.label}, which is not the number of a class"
        )


def prepared_rows(
    manifest: ImageManifest, output: Path, seconds: float
) -> Iterator[tuple[str, str]]:
    """Summarizes what was prepared as names and values for the terminal.

    Args:
        manifest: The manifest of the folder.
        output: The folder.
        seconds: How long it took.
    """
    for split, about in manifest.splits.items():
        fewest, most = min(about.per_class), max(about.per_class)
        each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        of = "with each attribute" if manifest.has_attributes else "of each class"
        yield split, f"{about.images:,} image{'s' * (about.images != 1)}, {each} {of}"
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
        yield "left out", in_words(manifest.left_out)
    validation = manifest.splits.get("validation")
    if validation is not None and validation.images < FEW:
        yield "note", _few(manifest, validation.images)
    yield "folder", str(output)
    yield "time", f"{seconds:.1f} s"


def _few(manifest: ImageManifest, images: int) -> str:
    """Warns that a validation split is small, and says how to get a larger one."""
    said = (
        f"validation has {images:,} image{'s' * (images > 1)}: each counts for "
        f"{1 / images:.0%} of a score"
    )
    if not manifest.held_out:
        return said
    both = images + manifest.splits["train"].images
    return f"{said}; --held-out 0.2 would hold out {round(0.2 * both):,} of the {both:,}"
