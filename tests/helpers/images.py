"""Small real image files, in every form that is read."""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

CLASSES = ("ant", "bee", "cat")


def picture(label: int, number: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A picture of a class: its colour, with noise."""
    generator = np.random.default_rng((label, number))
    pixels = generator.integers(0, 80, (size[1], size[0], 3))
    pixels[..., label % 3] += 150
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    """A file of it."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def listed(each: int) -> Iterator[tuple[str, int, bytes]]:
    """Names, classes and contents of so many pictures of each class, in the order of a folder."""
    for label, name in enumerate(CLASSES):
        for number in range(each):
            yield f"{name}/{number:03}.jpg", label, encoded(picture(label, number))


def class_folders(root: Path, each: int = 8) -> Path:
    """A folder for each class."""
    for name, _, content in listed(each):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def _pictures() -> Any:
    """Eight pictures of each class, as `datasets` has them."""
    import datasets

    names, labels, contents = zip(*listed(8), strict=True)
    images = [{"bytes": c, "path": n} for c, n in zip(contents, names, strict=True)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    columns = {"image": images, "label": list(labels)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def parquet(path: Path) -> Path:
    """They as `datasets` writes them to the hub, in groups of five rows."""
    _pictures().to_parquet(str(path), batch_size=5)
    return path


def arrow(root: Path) -> Path:
    """They as `datasets` saves them to a disk."""
    import datasets

    datasets.DatasetDict({"train": _pictures()}).save_to_disk(str(root))
    return root


DOMAINS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "inverted": ImageOps.invert,
    "plain": lambda image: image,
}


def domain_tree(root: Path, sizes: Mapping[str, Mapping[str, int]]) -> Path:
    """A folder for each class below one for each domain, with images of 8 x 8 pixels.

    Args:
        root: The folder to make.
        sizes: How many images each class of each domain has.
    """
    for domain, classes in sizes.items():
        for label, count in classes.items():
            folder = root / domain / label
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = DOMAINS[domain](picture(CLASSES.index(label), number, (8, 8)))
                (folder / f"{number:03}.png").write_bytes(encoded(image, "PNG"))
    return root


ATTRIBUTES = ("Red", "Bright", "Wide")


def attributes_of(number: int) -> tuple[int, int, int]:
    """0 or 1 of each attribute of image `number`; few bright ones are red."""
    bright = number % 2
    return int(number % (10 if bright else 3) == 1), bright, int(number % 5 == 0)


def with_attributes(number: int) -> Image.Image:
    """A picture that shows them."""
    red, bright, wide = attributes_of(number)
    pixels = np.random.default_rng(number).integers(0, 60, (8, 8, 3))
    pixels[..., 0] += 120 * red
    pixels[..., 1:] += 120 * bright
    pixels[3:5] += 60 * wide
    return Image.fromarray(pixels.astype(np.uint8))


def celeba(root: Path, images: int = 60) -> Path:
    """Parquet files of images with attributes: two of three train, the others validate and test."""
    root.mkdir(parents=True)
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number in range(images):
        held = ("validation", "test")[number // 2 % 2]
        parts["train" if number < images * 2 // 3 else held].append(number)
    for split, numbers in parts.items():
        parquet_of_attributes(root / f"{split}.parquet", numbers)
    return root


def parquet_of_attributes(path: Path, numbers: list[int]) -> None:
    """Images in parquet, with a column of true and false for each attribute."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    contents = [encoded(with_attributes(number)) for number in numbers]
    names = pa.array([f"{number}.jpg" for number in numbers])
    image = pa.StructArray.from_arrays([pa.array(contents), names], ["bytes", "path"])
    columns = zip(*(attributes_of(number) for number in numbers), strict=True)
    bits = {n: pa.array(list(map(bool, c))) for n, c in zip(ATTRIBUTES, columns, strict=True)}
    pq.write_table(pa.table({"image": image, "number": pa.array(numbers), **bits}), path)
