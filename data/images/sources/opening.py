"""Recognizes the kind of a source."""

from pathlib import Path, PurePosixPath

import numpy as np

from polyad.data.errors import DataError, one_line, user_path
from polyad.data.images.shards import png
from polyad.data.images.sources.classes import by_class, by_domain
from polyad.data.images.sources.found import Found, Tree, folder_tree, is_image
from polyad.data.images.sources.published import attribute_list, is_raw, open_attributes, open_raw
from polyad.data.images.sources.tables import open_arrow, open_parquet
from polyad.data.prepared import LeftOut

DIGITS, HUB = "digits", "hub:"
KNOWN = (
    "digits, hub:OWNER/NAME, or a folder of classes, .parquet files, a folder of `datasets`, or "
    "the files of MNIST, CIFAR or CelebA"
)
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
READ_BESIDE = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that describe the content of other files."""
OF_CACHE = "cache-"
"""Prefix of the files that `datasets` caches beside saved ones: results of `map` and the like."""


def open_images(source: str, folder: Path, output: Path, *, domains: bool = False) -> Found:
    """Opens a source.

    Args:
        source: What the user named.
        folder: The folder that is being prepared, for what has to be copied.
        output: What that will be renamed to, which is no part of the source.
        domains: Whether the source has one folder per domain.

    Raises:
        DataError: It does not exist, or is of no known kind.
    """
    left_out = LeftOut()
    if source == DIGITS and not domains:
        return by_class(folder_tree(_digits(folder / "files"), left_out), left_out)
    path = user_path(source.removeprefix(HUB))
    if source.startswith(HUB) and not path.is_dir():
        path = _downloaded(source.removeprefix(HUB))
    if not path.exists():
        raise DataError(f"--images: {source}: there is no such file or folder; allowed: {KNOWN}")
    if domains:
        return by_domain(folder_tree(path, left_out, output), left_out)
    if path.is_dir():
        return _open_folder(path, folder, output, left_out)
    if path.name.lower().endswith(".parquet"):
        return open_parquet([path], path, folder, left_out)
    raise _unknown(path)


def _unknown(path: Path) -> DataError:
    if path.name.lower().endswith(ARCHIVES):
        return DataError(
            f"--images: {path}: is an archive; unpack it and name the folder (of WebDataset, save "
            "it as docs/images.md shows)"
        )
    return DataError(f"--images: {path}: is of an unknown kind; allowed: {KNOWN}")


def _open_folder(path: Path, folder: Path, output: Path, left_out: LeftOut) -> Found:
    if is_raw(path):
        return open_raw(path, folder, left_out)
    attributes = attribute_list(path)
    if attributes is not None:
        return open_attributes(path, attributes, left_out)
    tree = folder_tree(path, left_out, output)
    for ending in (".arrow", ".parquet"):
        files = sorted(
            tree.root.joinpath(*file.parts)
            for file in tree.files
            if file.parts[-1].lower().endswith(ending) and not file.parts[-1].startswith(OF_CACHE)
        )
        if files:
            _note_others(tree, ending, left_out)
            opened = open_arrow if ending == ".arrow" else open_parquet
            return opened(files, tree.root, folder, left_out)
    archive = next((f for f in tree.files if f.parts[-1].lower().endswith(ARCHIVES)), None)
    if archive is not None and not any(is_image(file.parts[-1]) for file in tree.files):
        raise _unknown(tree.root.joinpath(*archive.parts))
    return by_class(tree, left_out)


def _note_others(tree: Tree, ending: str, left_out: LeftOut) -> None:
    """Counts other files beside those of one kind."""
    for file in tree.files:
        name = file.parts[-1]
        suffix = PurePosixPath(name).suffix.lower()
        if name.startswith(OF_CACHE):
            left_out.add("files of the cache of `datasets`")
        elif suffix != ending and name not in READ_BESIDE:
            left_out.add(f"files that end in {suffix}" if suffix else "files without an ending")


def _downloaded(name: str) -> Path:
    """Downloads the Parquet files of a data set of the hub, unless they are cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            allow_patterns=["*.parquet"],
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise DataError(f"--images: hub:{name}: cannot be loaded: {one_line(error, 160)}") from None
    if next(Path(folder).rglob("*.parquet"), None) is None:
        raise DataError(f"--images: hub:{name}: has no parquet files")
    return Path(folder)


def _digits(folder: Path) -> Path:
    """Writes scikit-learn's handwritten digits as PNG files in folders of classes."""
    from polyad.data.images.imagenet import digits

    images, labels = digits()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        target = folder / str(label) / f"{number:04}.png"
        grey = png(np.clip(np.asarray(image) * 255 / 16, 0, 255).round().astype(np.uint8))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(grey)
    return folder
