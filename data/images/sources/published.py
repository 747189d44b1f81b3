"""Data sets in their published form: MNIST, FashionMNIST, CIFAR and CelebA.

MNIST's idx files and CIFAR's binary version hold pixels without a format. CelebA's images have any
number of named attributes (Liu et al. 2015, "Deep learning face attributes in the wild"):

    FOLDER/list_attr_celeba.txt       the number of images; the attributes' names; then for each
                                      image its file, and 1 or -1 for each attribute
    FOLDER/list_eval_partition.txt    for each image its file, and 0, 1 or 2: train, validation,
                                      test
    FOLDER/img_align_celeba/          the files

The lists may be in folders of their own, as in the archive (Anno/, Eval/, Img/).
"""

import gzip
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.images.shards import Entry, Shard
from polyad.data.images.sources.found import IMAGE_SUFFIXES, Found, is_image
from polyad.data.prepared import LeftOut, is_hidden

MNIST = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR_10 = {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "test": ["test_batch.bin"]}
CIFAR_100 = {"train": ["train.bin"], "test": ["test.bin"]}
CIFAR_PIXELS = 3 * 32 * 32


def is_raw(root: Path) -> bool:
    """Returns whether a folder holds MNIST or CIFAR files."""
    return _mnist_file(root, MNIST["train"][0]) is not None or any(
        all((root / name).is_file() for name in names["train"]) for names in (CIFAR_10, CIFAR_100)
    )


def open_raw(root: Path, folder: Path, left_out: LeftOut) -> Found:
    """Opens a folder of MNIST or CIFAR files.

    Raises:
        DataError: A file is damaged, or has no labels beside it.
    """
    if _mnist_file(root, MNIST["train"][0]) is not None:
        return _open_mnist(root, folder, left_out)
    cifar_10 = (root / CIFAR_10["train"][0]).is_file()
    names, labels = (CIFAR_10, 1) if cifar_10 else (CIFAR_100, 2)
    return _open_cifar(root, names, labels, left_out)


def _plain(name: str) -> str:
    """Normalizes a file name that may be packed or spelled differently: torchvision keeps both."""
    return name.removesuffix(".gz").replace(".idx", "-idx")


def _note_others(root: Path, used: Iterable[Path], left_out: LeftOut) -> None:
    known = {_plain(path.name) for path in used}
    for file in sorted(root.iterdir()):
        if _plain(file.name) not in known and not is_hidden(file.name) and file.is_file():
            left_out.add(
                f"files that end in {file.suffix}" if file.suffix else "files without an ending"
            )


def _mnist_file(root: Path, name: str) -> Path | None:
    for candidate in (name, name.replace("-idx", ".idx"), f"{name}.gz"):
        if (root / candidate).is_file():
            return root / candidate
    return None


def _open_mnist(root: Path, folder: Path, left_out: LeftOut) -> Found:
    used: list[Path] = []
    shards: list[Shard] = []
    splits: dict[str, Callable[[], Iterator[Entry]]] = {}
    for split, names in MNIST.items():
        there = [file for file in (_mnist_file(root, name) for name in names) if file is not None]
        if not there:
            continue
        if len(there) == 1:
            raise DataError(f"{there[0]}: is incomplete: {' and '.join(names)} are all needed")
        used += there
        images, labels = (_unpacked(file, folder) for file in there)
        count, height, width = _header(images, 3)
        (known,) = _header(labels, 1)
        if known != count:
            raise DataError(f"{labels}: has {known:,} labels, {images} has {count:,} images")
        size = images.stat().st_size
        shards.append(Shard(path=str(images), kind="raw", size=size, shape=(1, height, width)))
        shard, numbers = len(shards) - 1, labels.read_bytes()[8 : 8 + count]

        def entries(
            shard: int = shard, numbers: bytes = numbers, pixels: int = height * width
        ) -> Iterator[Entry]:
            for row, number in enumerate(numbers):
                yield Entry(shard, 16 + row * pixels, pixels, number, f"row {row}")

        splits[split] = entries
    _note_others(root, used, left_out)
    return Found(shards=shards, splits=splits, class_names=None, left_out=left_out)


def _unpacked(file: Path, folder: Path) -> Path:
    if file.suffix != ".gz":
        return file.resolve()
    target = folder / file.stem
    try:
        with gzip.open(file) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be unpacked: {error}") from None
    return target


def _header(file: Path, dimensions: int) -> tuple[int, ...]:
    size = 4 + 4 * dimensions
    with file.open("rb") as opened:
        head = opened.read(size)
    if len(head) < size or head[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{file}: is not an idx file of {dimensions} dimensions of bytes")
    sizes = struct.unpack(f">{dimensions}I", head[4:])
    product = 1
    for each in sizes:
        product *= each
    if file.stat().st_size != size + product:
        raise DataError(f"{file}: has {file.stat().st_size:,} bytes, {size + product:,} are needed")
    return sizes


def _open_cifar(root: Path, names: dict[str, list[str]], labels: int, left_out: LeftOut) -> Found:
    length = labels + CIFAR_PIXELS
    files = {split: [root / name for name in each] for split, each in names.items()}
    shards: list[Shard] = []
    numbers: dict[str, list[int]] = {}
    for split, each in files.items():
        for file in each:
            if not file.is_file() and split == "test":
                continue
            size = file.stat().st_size
            if size % length:
                raise DataError(f"{file}: has {size:,} bytes, which is not a multiple of {length}")
            numbers.setdefault(split, []).append(len(shards))
            path = str(file.resolve())
            shards.append(Shard(path=path, kind="raw", size=size, shape=(3, 32, 32)))

    def entries(split: str) -> Iterator[Entry]:
        for shard in numbers[split]:
            content = Path(shards[shard].path).read_bytes()
            for row, at in enumerate(range(0, len(content), length)):
                label = content[at + labels - 1]  # the fine label of two
                yield Entry(shard, at + labels, CIFAR_PIXELS, label, f"row {row}")

    meta = next((root / n for n in ("batches.meta.txt", "fine_label_names.txt")
                 if (root / n).is_file()), None)  # fmt: skip
    named = meta.read_text(encoding="utf-8").split() if meta else None
    used = [*(Path(shard.path) for shard in shards), *([meta] if meta else [])]
    _note_others(root, used, left_out)
    return Found(
        shards=shards,
        splits={split: partial(entries, split) for split in numbers},
        class_names=named,
        left_out=left_out,
    )


ATTRIBUTES = "list_attr_*.txt"
PARTITION = "list_eval_partition.txt"
PARTS = {"0": "train", "1": "validation", "2": "test"}


def attribute_list(root: Path) -> Path | None:
    """Returns the file with the attributes of all images, if one exists below a folder."""
    return next(iter(sorted([*root.glob(ATTRIBUTES), *root.glob(f"*/{ATTRIBUTES}")])), None)


def open_attributes(root: Path, attributes: Path, left_out: LeftOut) -> Found:
    """Opens images with attributes.

    Raises:
        DataError: A list is damaged, or files that it names are missing.
    """
    root = root.resolve()
    names, values = _attributes(attributes)
    split_of = _partition(root)
    folder = _folder_of(root, next(iter(values)))
    for file in sorted(folder.iterdir()):
        if is_image(file.name) and not is_hidden(file.name) and file.name not in values:
            left_out.add(f"images that {attributes.name} does not name")

    def entries(split: str) -> Iterator[Entry]:
        for file, of_file in values.items():
            if split_of.get(file, "train") != split:
                continue
            try:
                size = (folder / file).stat().st_size
            except OSError:
                raise DataError(
                    f"{folder / file}: is named in {attributes}, but does not exist"
                ) from None
            if split_of and file not in split_of:
                raise DataError(f"{root}: {PARTITION} has no line for {file}")
            yield Entry(0, 0, size, 0, file, of_file)

    here = {split_of.get(file, "train") for file in values}
    return Found(
        shards=[Shard(path=str(folder), kind="folder")],
        splits={split: partial(entries, split) for split in PARTS.values() if split in here},
        class_names=names,
        has_attributes=True,
        left_out=left_out,
    )


def _attributes(path: Path) -> tuple[list[str], dict[str, npt.NDArray[np.uint8]]]:
    """Returns the attribute names, and for each file one number per name, 0 or 1."""
    lines = _lines(path)
    names = next(lines, (0, []))[1]
    if len(names) == 1 and names[0].isdigit():  # the number of images
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
            raise DataError(f"{path}: line {number}: {file} also appears in an earlier line")
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
    """Returns the folder of the files: the first one that contains any of them."""
    folders = [root, *sorted(entry for entry in root.rglob("*") if entry.is_dir())]
    found = next((folder for folder in folders if (folder / file).is_file()), None)
    if found is not None:
        return found
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    raise DataError(
        f"{root}: has no {file}, the first image of its list of attributes; unpack the images "
        f"({suffixes}) in it"
    )
