"""Images with any number of named attributes: CelebA as it is published.

    FOLDER/list_attr_celeba.txt       the number of images; the attributes' names; then of each
                                      image its file, and 1 or -1 of each attribute
    FOLDER/list_eval_partition.txt    of each image its file, and 0, 1 or 2: train, validation,
                                      test
    FOLDER/img_align_celeba/          the files

The lists may stand in folders of their own, as in the archive (Anno/, Eval/, Img/).

Source: Liu et al. 2015, "Deep learning face attributes in the wild".
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.images.shards import Entry, Shard
from polyad.data.images.sources.found import IMAGE_SUFFIXES, Found, is_image
from polyad.data.left_out import LeftOut, is_hidden

ATTRIBUTES = "list_attr_*.txt"
PARTITION = "list_eval_partition.txt"
PARTS = {"0": "train", "1": "validation", "2": "test"}


def attribute_list(root: Path) -> Path | None:
    """The file of the attributes of all images, if there is one below a folder."""
    return next(iter(sorted([*root.glob(ATTRIBUTES), *root.glob(f"*/{ATTRIBUTES}")])), None)


def open_attributes(root: Path, attributes: Path, left_out: LeftOut) -> Found:
    """Opens files with attributes.

    Args:
        root: The folder.
        attributes: The list of them.
        left_out: Counts images that it does not name.

    Raises:
        DataError: A list is damaged, or files that it names are not there.
    """
    root = root.resolve()
    names, values = _attributes(attributes)
    split_of = _partition(root)
    folder = _folder_of(root, next(iter(values)))
    for file in sorted(folder.iterdir()):
        if is_image(file.name) and not is_hidden(file.name) and file.name not in values:
            left_out.add(f"images that {attributes.name} does not name", file.name)

    def entries(split: str) -> Iterator[Entry]:
        for file, of_file in values.items():
            if split_of.get(file, "train") != split:
                continue
            try:
                size = (folder / file).stat().st_size
            except OSError:
                raise DataError(
                    f"{folder / file}: is named in {attributes}, and is not there"
                ) from None
            if split_of and file not in split_of:
                raise DataError(f"{root}: {PARTITION} has no line of {file}")
            yield Entry(0, 0, size, 0, file, of_file)

    here = {split_of.get(file, "train") for file in values}
    return Found(
        shards=[Shard(path=str(folder), kind="folder")],
        splits={
            split: lambda split=split: entries(split)  # type: ignore[misc]
            for split in PARTS.values()
            if split in here
        },
        class_names=names,
        has_attributes=True,
        left_out=left_out,
    )


def _attributes(path: Path) -> tuple[list[str], dict[str, npt.NDArray[np.uint8]]]:
    """The names, and of each file one number a name, 0 or 1."""
    lines = _lines(path)
    names = next(lines, (0, []))[1]
    if len(names) == 1 and names[0].isdigit():  # how many images there are
        names = next(lines, (0, []))[1]
    if not names:
        raise DataError(f"{path}: names no attributes")
    values: dict[str, npt.NDArray[np.uint8]] = {}
    for number, (file, *words) in lines:
        if len(words) != len(names) or not set(words) <= {"1", "-1", "0"}:
            raise DataError(
                f"{path}: line {number}: a file and {len(names)} numbers, each 1 or -1, are needed"
            )
        if file in values:
            raise DataError(f"{path}: line {number}: {file} stands in an earlier line, too")
        values[file] = np.array([word == "1" for word in words], dtype=np.uint8)
    if not values:
        raise DataError(f"{path}: names no images")
    return names, values


def _partition(root: Path) -> dict[str, str]:
    path = next(iter([*root.glob(PARTITION), *root.glob(f"*/{PARTITION}")]), None)
    if path is None:
        return {}
    parts = {}
    for number, words in _lines(path):
        if len(words) != 2 or words[1] not in PARTS:
            raise DataError(f"{path}: line {number}: a file and 0, 1 or 2 are needed")
        parts[words[0]] = PARTS[words[1]]
    return parts


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line.split()


def _folder_of(root: Path, file: str) -> Path:
    """The folder that the files stand in: the first that has one of them."""
    folders = [root, *sorted(entry for entry in root.rglob("*") if entry.is_dir())]
    found = next((folder for folder in folders if (folder / file).is_file()), None)
    if found is not None:
        return found
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    raise DataError(
        f"{root}: has no {file}, the first image of its list of attributes; unpack the images "
        f"({suffixes}) in it"
    )
