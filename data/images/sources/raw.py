"""Pixels without a format: MNIST's and FashionMNIST's idx files, and CIFAR's binary version."""

import gzip
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from polyad.data.errors import DataError
from polyad.data.files import writing
from polyad.data.images.shards import WHAT_TO_DO, Entry, Shard
from polyad.data.images.sources.found import Found, is_image
from polyad.data.left_out import LeftOut, is_hidden
from polyad.data.prepared import partial_file

MNIST = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR_10 = {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "test": ["test_batch.bin"]}
CIFAR_100 = {"train": ["train.bin"], "test": ["test.bin"]}
CIFAR_PIXELS = 3 * 32 * 32
MOST_UNPACKED = 1 << 32
"""Bytes that a `.gz` may unpack to."""


def is_raw(root: Path) -> bool:
    """Whether a folder holds such files."""
    return _mnist_file(root, MNIST["train"][0]) is not None or any(
        all((root / name).is_file() for name in names["train"]) for names in (CIFAR_10, CIFAR_100)
    )


def open_raw(root: Path, output: Path, left_out: LeftOut) -> Found:
    """Opens a folder of such files.

    Args:
        root: The folder.
        output: Where `.gz` files are unpacked to: they cannot be read in the middle.
        left_out: Counts other files of images, and of pixels.

    Raises:
        DataError: A file is damaged, or has no labels beside it.
    """
    if _mnist_file(root, MNIST["train"][0]) is not None:
        return _open_mnist(root, output, left_out)
    cifar_10 = (root / CIFAR_10["train"][0]).is_file()
    names, labels = (CIFAR_10, 1) if cifar_10 else (CIFAR_100, 2)
    return _open_cifar(root, names, labels, left_out)


def _plain(name: str) -> str:
    """The name of a file, however it is packed or written: torchvision keeps both forms."""
    return name.removesuffix(".gz").replace(".idx", "-idx")


def _note_others(root: Path, used: Iterable[Path], left_out: LeftOut) -> None:
    known = {_plain(path.name) for path in used}
    for file in sorted(root.iterdir()):
        if _plain(file.name) not in known and not is_hidden(file.name) and file.is_file():
            mistake = is_image(file.name) or file.suffix in (".bin", ".gz") or "ubyte" in file.name
            why = f"files that end in {file.suffix or 'nothing'}"
            left_out.add(why, file.name, mistake=mistake)


def _mnist_file(root: Path, name: str) -> Path | None:
    for candidate in (name, name.replace("-idx", ".idx"), f"{name}.gz"):
        if (root / candidate).is_file():
            return root / candidate
    return None


def _open_mnist(root: Path, output: Path, left_out: LeftOut) -> Found:
    used: list[Path] = []
    shards: list[Shard] = []
    splits: dict[str, Callable[[], Iterator[Entry]]] = {}
    for split, names in MNIST.items():
        there = [file for file in (_mnist_file(root, name) for name in names) if file is not None]
        if not there:
            continue
        if len(there) == 1:
            raise DataError(f"{there[0]}: stands alone: {' and '.join(names)} are needed")
        used += there
        images, labels = (_unpacked(file, output) for file in there)
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


def _unpacked(file: Path, output: Path) -> Path:
    if file.suffix != ".gz":
        return file.resolve()
    target = output / file.stem
    with writing(target, WHAT_TO_DO):
        partial = partial_file(target)
        with partial.open("wb") as unpacked:
            for block in _blocks(file):
                unpacked.write(block)
    return partial.replace(target).resolve()


def _blocks(file: Path) -> Iterator[bytes]:
    left = MOST_UNPACKED
    try:
        with gzip.open(file) as packed:
            while block := packed.read(1 << 20):
                left -= len(block)
                if left < 0:
                    raise DataError(f"{file}: unpacks to more than {MOST_UNPACKED:,} bytes")
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be unpacked: {error}") from None


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
                raise DataError(f"{file}: has {size:,} bytes, no multiple of {length}")
            numbers.setdefault(split, []).append(len(shards))
            path = str(file.resolve())
            shards.append(Shard(path=path, kind="raw", size=size, shape=(3, 32, 32)))

    def entries(split: str) -> Iterator[Entry]:
        for shard in numbers[split]:
            content = Path(shards[shard].path).read_bytes()
            for row, at in enumerate(range(0, len(content), length)):
                label = content[at + labels - 1]  # the fine one of two
                yield Entry(shard, at + labels, CIFAR_PIXELS, label, f"row {row}")

    meta = next((root / n for n in ("batches.meta.txt", "fine_label_names.txt")
                 if (root / n).is_file()), None)  # fmt: skip
    named = meta.read_text(encoding="utf-8").split() if meta else None
    used = [*(Path(shard.path) for shard in shards), *([meta] if meta else [])]
    _note_others(root, used, left_out)
    return Found(
        shards=shards,
        splits={split: lambda split=split: entries(split) for split in numbers},  # type: ignore[misc]
        class_names=named,
        left_out=left_out,
    )
