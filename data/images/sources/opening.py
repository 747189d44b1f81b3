"""Recognizes the kind of a source."""

from pathlib import Path, PurePosixPath

import numpy as np

from polyad.data.errors import DataError, one_line, user_path
from polyad.data.files import writing
from polyad.data.images.shards import WHAT_TO_DO, png
from polyad.data.images.sources.archives import CLASSES_FILE, open_tars, read_tar, read_zip
from polyad.data.images.sources.classes import by_class, by_domain
from polyad.data.images.sources.found import Found, Tree, folder_tree, is_image
from polyad.data.images.sources.published import attribute_list, is_raw, open_attributes, open_raw
from polyad.data.images.sources.tables import open_arrow, open_parquet
from polyad.data.prepared import LeftOut

DIGITS, HUB = "digits", "hub:"
KNOWN = (
    "digits, hub:OWNER/NAME, or a folder of classes, a .zip or .tar of one, .tar files of "
    "WebDataset, .parquet files, a folder of `datasets`, or the files of MNIST, CIFAR or CelebA"
)
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
DATA = (".arrow", ".parquet", ".tar", ".zip")
"""Extensions of files that may contain images."""
READ_BESIDE = (CLASSES_FILE, "dataset_info.json", "dataset_dict.json", "state.json")
"""Files that describe the content of other files."""
OF_CACHE = "cache-"
"""Prefix of the files that `datasets` caches beside saved ones: results of `map` and the like."""


def open_images(source: str, output: Path, *, domains: bool = False) -> Found:
    """Opens a source.

    Raises:
        DataError: It does not exist, or is of no known kind.
    """
    left_out = LeftOut()
    if domains:
        return _open_domains(source, output, left_out)
    if source == DIGITS:
        return by_class(folder_tree(_digits(output / "files"), left_out), left_out)
    path = user_path(source.removeprefix(HUB))
    if source.startswith(HUB) and not path.is_dir():
        path = _downloaded(source.removeprefix(HUB))
    if not path.exists():
        raise DataError(f"--images: {source}: there is no such file or folder; allowed: {KNOWN}")
    if path.is_dir():
        return _open_folder(path, output, left_out)
    if not path.is_file():  # reading a pipe would never end
        raise DataError(f"--images: {source}: is neither a file nor a folder; allowed: {KNOWN}")
    return _open_file(path, output, left_out)


def _open_domains(source: str, output: Path, left_out: LeftOut) -> Found:
    path = user_path(source)
    if path.is_dir():
        return by_domain(folder_tree(path, left_out, output), left_out)
    readers = {".zip": read_zip, ".tar": read_tar}
    if path.is_file() and path.suffix.lower() in readers:
        return by_domain(readers[path.suffix.lower()](path, left_out), left_out)
    raise DataError(
        f"--domains: {source}: is not a tree of DOMAIN/CLASS/image: a folder of that form, or a "
        ".zip or .tar of one, is needed"
    )


def _open_file(path: Path, output: Path, left_out: LeftOut) -> Found:
    name = path.name.lower()
    if name.endswith(COMPRESSED_TARS):
        raise DataError(
            f"--images: {path}: is a compressed tar, from which single images cannot be read; "
            "decompress it to a .tar"
        )
    if name.endswith(".tar"):
        return open_tars([path], path, left_out)
    if name.endswith(".zip"):
        return by_class(read_zip(path, left_out), left_out)
    if name.endswith(".parquet"):
        return open_parquet([path], path, output, left_out)
    raise DataError(f"--images: {path}: is of an unknown kind; allowed: {KNOWN}")


def _open_folder(path: Path, output: Path, left_out: LeftOut) -> Found:
    if is_raw(path):
        return open_raw(path, output, left_out)
    attributes = attribute_list(path)
    if attributes is not None:
        return open_attributes(path, attributes, left_out)
    tree = folder_tree(path, left_out, output)
    for ending in (".arrow", ".parquet", ".tar"):
        files = sorted(
            tree.root.joinpath(*file.parts)
            for file in tree.files
            if file.parts[-1].lower().endswith(ending) and not file.parts[-1].startswith(OF_CACHE)
        )
        if files:
            _note_others(tree, ending, left_out)
            if ending == ".tar":
                return open_tars(files, tree.root, left_out)
            opened = open_arrow if ending == ".arrow" else open_parquet
            return opened(files, tree.root, output, left_out)
    for file in tree.files:
        if file.parts[-1].lower().endswith(COMPRESSED_TARS):
            return _open_file(tree.root.joinpath(*file.parts), output, left_out)
    return by_class(tree, left_out)


def _note_others(tree: Tree, ending: str, left_out: LeftOut) -> None:
    """Counts other files beside those of one kind; leaving data out is probably a mistake."""
    for file in tree.files:
        name = "/".join(file.parts)
        suffix = PurePosixPath(name).suffix.lower()
        if file.parts[-1].startswith(OF_CACHE):
            left_out.add("files of the cache of `datasets`", name, mistake=False)
        elif suffix != ending and file.parts[-1] not in READ_BESIDE:
            data = is_image(name) or name.lower().endswith((*DATA, *COMPRESSED_TARS))
            left_out.add(
                f"files that end in {suffix}" if suffix else "files without an ending",
                name,
                mistake=data,
            )


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
        if not target.is_file() or target.stat().st_size != len(grey):
            with writing(target, WHAT_TO_DO):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(grey)
    return folder
