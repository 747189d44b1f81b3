"""Folders of classes, at the top or inside folders of splits or of domains."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

from polyad.data.errors import DataError, listed
from polyad.data.images.shards import Entry, Shard
from polyad.data.images.sources.found import (
    File,
    Found,
    Parts,
    Tree,
    is_image,
)
from polyad.data.names import SPLIT_NAMES
from polyad.data.prepared import LeftOut


class _Image(NamedTuple):
    """An image, and the folders that contain it."""

    file: File
    name: str
    """The name of its class."""
    rest: Parts
    """Its path inside the class's folder."""
    domain: str = ""


def by_class(tree: Tree, left_out: LeftOut) -> Found:
    """Opens folders of classes.

    Args:
        tree: A tree with `train`, `val` or `validation`, and `test`, or with the classes
            themselves, possibly inside one more folder.
        left_out: Counts files that are not images, and images outside of class folders.

    Raises:
        DataError: There are no folders of classes, or the classes of splits differ.
    """
    around = _around(tree, 2)
    tops = _split_folders(tree, around)
    places = {split: (*around, top) for split, top in tops.items()} or {"train": around}
    split_at = {place: split for split, place in places.items()}
    images: dict[str, list[_Image]] = {split: [] for split in places}
    depth = len(around) + bool(tops)
    for file in sorted(tree.files):
        split = split_at.get(file.parts[:depth])
        in_class = split is not None and len(file.parts) > depth + 1
        if not is_image(file.parts[-1]):
            _leave_out(file, left_out)
        elif split is None:
            left_out.add("images outside a split folder")
        elif not in_class:
            left_out.add("images outside a class folder")
        else:
            images[split].append(_Image(file, file.parts[depth], file.parts[depth + 1 :]))
    classes = {
        split: sorted({*_below(tree, place), *(image.name for image in images[split])})
        for split, place in places.items()
    }
    for split in ("validation", "test"):  # such as a test split without labels
        if split in classes and not classes[split]:
            del classes[split], places[split]
    names = _same_classes(tree, classes)
    of_splits = {split: images[split] for split in places}
    return _found(tree, of_splits, list(places.values()), names, [], left_out)


def by_domain(tree: Tree, left_out: LeftOut) -> Found:
    """Opens folders of domains, in DomainBed's layout: DOMAIN/CLASS/image.

    Every folder at the top is a domain, whatever its name. The classes of domains may differ.

    Raises:
        DataError: The tree has another layout.
    """
    around = _around(tree, 3)
    depth = len(around)
    images = []
    for file in sorted(tree.files):
        parts = file.parts[depth:] if file.parts[:depth] == around else ()
        if not is_image(file.parts[-1]):
            _leave_out(file, left_out)
        elif len(parts) == 2:
            raise _no_domains(tree, f"{parts[0]} holds images, but no folders of classes")
        elif len(parts) < 2:
            left_out.add("images outside a domain folder")
        else:
            images.append(_Image(file, parts[1], parts[2:], parts[0]))
    domains = _below(tree, around)
    if not domains or not images:
        raise _no_domains(tree, "it has no images in such folders")
    splits = _named_splits(domains)
    if splits:
        raise _no_domains(tree, f"{listed(splits.values())} are splits, not domains")
    for domain in sorted(domains - {image.domain for image in images}):
        raise _no_domains(tree, f"{domain} holds no folder with images")
    if len(domains) == 1:
        raise _no_domains(tree, f"it has only one domain, {min(domains)!r}")
    names = sorted({image.name for image in images})
    return _found(tree, {"train": images}, [around], names, sorted(domains), left_out)


def _found(
    tree: Tree,
    images: Mapping[str, list[_Image]],
    places: Sequence[Parts],
    names: list[str],
    domains: list[str],
    left_out: LeftOut,
) -> Found:
    """Collects the images of each split, ordered by domain, class and path."""
    for name in (*names, *domains):
        if "\n" in name or name.encode("utf-8", "replace").decode() != name:
            raise DataError(
                f"{tree.root}: {name!r}: the name of a class must be UTF-8 without line breaks"
            )
    label = {name: number for number, name in enumerate(names)}
    splits: dict[str, Callable[[], Iterator[Entry]]] = {}
    for shard, (split, found) in enumerate(images.items()):
        found.sort(key=lambda image: (image.domain, label[image.name], "/".join(image.rest)))
        splits[split] = partial(_entries, found, label, domains, shard)
    return Found(
        shards=[Shard(path=str(tree.root.joinpath(*place)), kind="folder") for place in places],
        splits=splits,
        class_names=names,
        domain_names=domains,
        left_out=left_out,
        total_bytes=sum(image.file.size for found in images.values() for image in found),
    )


def _entries(
    images: list[_Image], label: Mapping[str, int], domains: list[str], shard: int
) -> Iterator[Entry]:
    """Yields the images of a split."""
    for file, name, rest, domain in images:
        number = domains.index(domain) if domains else None
        called = "/".join((*([domain] if domain else []), name, *rest))
        yield Entry(shard, 0, file.size, label[name], called, domain=number)


def _around(tree: Tree, depth: int) -> Parts:
    """Returns the outer folders that contain everything, if nesting is deeper than needed."""
    images = [file.parts for file in tree.files if is_image(file.parts[-1])]
    around: Parts = ()
    while True:
        inside = [parts for parts in images if parts[: len(around)] == around]
        tops = {parts[len(around)] for parts in inside if len(parts) > len(around) + 1}
        tops |= _below(tree, around)
        deepest = max((len(parts) for parts in inside), default=0)
        if len(tops) != 1 or deepest <= len(around) + depth or _named_splits(tops):
            return around
        around = (*around, tops.pop())


def _below(tree: Tree, place: Parts) -> set[str]:
    """Returns the names of the folders in a folder."""
    depth = len(place)
    return {f[depth] for f in tree.folders if len(f) == depth + 1 and f[:depth] == place}


def _leave_out(file: File, left_out: LeftOut) -> None:
    ending = PurePosixPath(file.parts[-1]).suffix.lower()
    left_out.add(f"files that end in {ending}" if ending else "files without an ending")


def _split_folders(tree: Tree, around: Parts) -> dict[str, str]:
    """Maps each split to its folder; empty if no folder is named like a split."""
    below = _below(tree, around)
    splits = _named_splits(below)
    for split in splits:
        same = sorted(each for each in below if SPLIT_NAMES.get(each.lower()) == split)
        if len(same) > 1:
            raise DataError(
                f"{tree.root}: {listed(same)} are both the {split} split; only one is allowed"
            )
    if splits and not _below(tree, (*around, splits["train"])):
        if not below - set(splits.values()):
            raise DataError(
                f"{tree.root}: {splits['train']} holds images, but no folders of classes"
            )
        return {}  # beside others a folder that holds no folders is a class, as of vehicles
    return splits


def _named_splits(names: Iterable[str]) -> dict[str, str]:
    """Maps each split to its folder, if one of the names is that of a training split."""
    found = {SPLIT_NAMES[n.lower()]: n for n in sorted(names) if n.lower() in SPLIT_NAMES}
    return found if "train" in found else {}


def _same_classes(tree: Tree, classes: Mapping[str, list[str]]) -> list[str]:
    """Returns the classes, which must be the same in every split."""
    names = classes["train"]
    if not names:
        raise DataError(f"{tree.root}: has no folders of classes with images")
    for split, others in classes.items():
        missing, more = sorted(set(names) - set(others)), sorted(set(others) - set(names))
        if more or missing:
            which = f"has {listed(more, 3)} more" if more else f"lacks {listed(missing, 3)}"
            raise DataError(
                f"{tree.root}: its {split} split {which}: all splits must have the same classes"
            )
    return names


def _no_domains(tree: Tree, reason: str) -> DataError:
    return DataError(f"--domains: {tree.root}: is not a tree of DOMAIN/CLASS/image: {reason}")
