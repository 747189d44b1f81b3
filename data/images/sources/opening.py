"""Which kind of source a user means."""

from pathlib import Path

import numpy as np

from data.errors import DataError, user_path
from data.images.shards import png
from data.images.sources.arrow import open_arrow
from data.images.sources.attributes import attribute_list, open_attributes
from data.images.sources.domains import open_domains
from data.images.sources.folders import open_folder, open_zip
from data.images.sources.found import Found
from data.images.sources.parquet import open_parquet
from data.images.sources.raw import is_raw, open_raw
from data.images.sources.tars import open_tars

DIGITS, HUB = "digits", "hub:"
KNOWN = (
    "digits, hub:OWNER/NAME, or a folder of classes, a .zip of one, .tar files, .parquet files, a "
    "folder of `datasets`, or the files of MNIST, CIFAR or CelebA"
)


def open_images(source: str, output: Path, *, domains: bool = False) -> Found:
    """Opens a source.

    Args:
        source: What the user wrote.
        output: The prepared folder, for what has to be written first.
        domains: Whether it has a folder for each domain, and in these one for each class.

    Raises:
        DataError: It is not there, or of no known kind.
    """
    if domains:
        return open_domains(source)
    if source == DIGITS:
        return open_folder(_digits(output / "files"))
    if source.startswith(HUB) and not user_path(source.removeprefix(HUB)).is_dir():
        return open_parquet(_downloaded(source.removeprefix(HUB)))
    path = user_path(source.removeprefix(HUB))
    if not path.exists():
        raise DataError(f"--images: {source}: there is no such file or folder; {KNOWN} are allowed")
    return _open_file(path) if path.is_file() else _open_folder(path, output)


def _open_file(path: Path) -> Found:
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise DataError(
            f"--images: {path}: is a compressed tar, of which no image can be read alone; unpack "
            f"it to a .tar"
        )
    for ending, opened in ((".tar", open_tars), (".zip", open_zip), (".parquet", open_parquet)):
        if name.endswith(ending):
            return opened(path)
    raise DataError(f"--images: {path}: is of no known kind; {KNOWN} are allowed")


def _open_folder(path: Path, output: Path) -> Found:
    if is_raw(path):
        return open_raw(path, output)
    attributes = attribute_list(path)
    if attributes is not None:
        return open_attributes(path, attributes)
    for ending, opened in (("arrow", open_arrow), ("parquet", open_parquet), ("tar", open_tars)):
        if next(path.rglob(f"*.{ending}"), None) is not None:
            return opened(path)
    compressed = next(path.rglob("*.tar.gz"), None) or next(path.rglob("*.tgz"), None)
    if compressed is not None:
        return _open_file(compressed)
    return open_folder(path)


def _downloaded(name: str) -> Path:
    """The parquet files of a data set of the hub; what is there is not loaded again."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            allow_patterns=["*.parquet"],
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"--images: hub:{name}: cannot be loaded: {reason}") from None
    if next(Path(folder).rglob("*.parquet"), None) is None:
        raise DataError(f"--images: hub:{name}: has no parquet files")
    return Path(folder)


def _digits(folder: Path) -> Path:
    """scikit-learn's handwritten digits as PNG files in folders of classes."""
    from data.images.extra import digits

    images, labels = digits()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        target = place / f"{number:04}.png"
        if not target.is_file():
            grey = np.clip(np.asarray(image) * 255 / 16, 0, 255).round().astype(np.uint8)
            target.write_bytes(png(grey))
    return folder
