"""DomainBed's form: a folder for each class below one for each domain, of files or in a zip.

Every folder at the top is a domain, whatever it is called. Domains need not have the same classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from data.errors import DataError, listed, user_path
from data.images.shards import Entry, Shard
from data.images.sources.folders import (
    folder_images,
    is_folder,
    is_image,
    split_folders,
    zip_entry,
    zip_images,
    zip_shards,
)
from data.images.sources.found import Found


def open_domains(source: str) -> Found:
    """Opens folders of domains.

    Args:
        source: What the user wrote: a folder, or a .zip of one.

    Raises:
        DataError: It is not there, or is no tree of DOMAIN/CLASS/image.
    """
    path = user_path(source)
    if path.is_dir():
        return _open_folder(path.resolve())
    if path.is_file() and path.suffix.lower() == ".zip":
        return _open_zip(path)
    raise _refused(source, "a folder of that form, or a .zip of one, is allowed")


def _open_folder(root: Path) -> Found:
    domains = {}
    for domain in sorted(entry for entry in root.iterdir() if is_folder(entry)):
        if any(is_image(entry.name) for entry in domain.iterdir()):
            raise _refused(root, f"{domain.name} holds images, and no folders of classes")
        classes = [
            entry.name
            for entry in sorted(domain.iterdir())
            if is_folder(entry) and any(is_image(file.name) for file in entry.iterdir())
        ]
        if not classes:
            raise _refused(root, f"{domain.name} holds no folder with images")
        domains[domain.name] = classes
    names = _class_names(root, domains)

    def entries() -> Iterator[Entry]:
        for number, (domain, classes) in enumerate(domains.items()):
            for name in classes:
                label = names.index(name)
                for file, size in folder_images(root / domain / name):
                    yield Entry(0, 0, size, label, f"{domain}/{name}/{file}", domain=number)

    return Found(
        shards=[Shard(path=str(root), kind="folder")],
        splits={"train": entries},
        class_names=names,
        domain_names=list(domains),
    )


def _open_zip(path: Path) -> Found:
    members = zip_images(path)
    parts = {member.filename: PurePosixPath(member.filename).parts for member in members}
    depth = min((len(part) for part in parts.values()), default=0)
    if depth > 3 and len({part[0] for part in parts.values()}) == 1:
        parts = {name: part[1:] for name, part in parts.items()}  # one folder around everything
    domains: dict[str, list[str]] = {}
    for name, part in sorted(parts.items()):
        if len(part) != 3:
            raise _refused(path, f"{name} is no such image")
        if part[1] not in domains.setdefault(part[0], []):
            domains[part[0]].append(part[1])
    names, domain_names = _class_names(path, domains), sorted(domains)
    label = {name: number for number, name in enumerate(names)}
    number = {domain: number for number, domain in enumerate(domain_names)}

    def entries() -> Iterator[Entry]:
        with path.open("rb") as file:
            for member in members:
                domain, name, _ = parts[member.filename]
                yield zip_entry(file, member, path, label[name], number[domain])

    return Found(
        shards=zip_shards(path),
        splits={"train": entries},
        class_names=names,
        domain_names=domain_names,
        total_bytes=sum(member.file_size for member in members),
    )


def _class_names(path: Path, domains: Mapping[str, Sequence[str]]) -> list[str]:
    """The classes that any domain has."""
    if not domains:
        raise _refused(path, "it has no images in such folders")
    splits = split_folders(domains)
    if splits:
        raise _refused(path, f"{listed(splits.values())} are splits, and no domains")
    return sorted({name for classes in domains.values() for name in classes})


def _refused(path: Path | str, reason: str) -> DataError:
    return DataError(f"--domains: {path}: is no tree of DOMAIN/CLASS/image: {reason}")
