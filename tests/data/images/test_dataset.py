"""Every source of images is read as an independent reader reads it."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from tests.helpers import images as made
from tests.helpers.images import CLASSES


def opened(source, **settings):
    return ImageData.open(ImageDataConfig(path=str(source), **settings))


def sizes(data):
    return {name: len(data.split(name)) for name in data.splits}


def contents(data):
    """All pictures with the names of their classes, of the splits together."""
    found = []
    for name in data.splits:
        split = data.split(name)
        found += [
            (split.decode(n).tobytes(), data.class_names[split.labels[n]])
            for n in range(len(split))
        ]
    return sorted(found)


def webdataset(path):
    import tarfile

    with tarfile.open(path, "w") as archive:
        for number, (_, label, content) in enumerate(made.listed(8)):
            for ending, part in (("jpg", content), ("cls", str(label).encode())):
                about = tarfile.TarInfo(f"{number:04}.{ending}")
                about.size = len(part)
                archive.addfile(about, io.BytesIO(part))
    return path


SOURCES = {
    "folder": lambda path: made.class_folders(path / "all"),
    "folder in a folder": lambda path: made.class_folders(path / "all" / "unpacked").parent,
    "parquet": lambda path: made.parquet(path / "train-0.parquet"),
    "folder of parquet": lambda path: made.parquet(path / "train-0.parquet").parent,
    "saved": lambda path: made.arrow(path / "saved"),
    "webdataset": lambda path: webdataset(path / "train.tar"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_holds_what_pillow_reads(tmp_path, kind):
    data = opened(SOURCES[kind](tmp_path), held_out=0.25)
    names = ["0", "1", "2"] if kind == "webdataset" else list(CLASSES)
    assert data.class_names == names
    assert contents(data) == sorted(
        (np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).tobytes(), names[label])
        for _, label, content in made.listed(8)
    )
    assert sizes(data) == {"train": 18, "validation": 6}
    assert data.held_out.startswith("validation: 6 of the 24 training images")


def test_a_set_whose_validation_is_its_test_gets_another_one(tmp_path):
    made.class_folders(tmp_path / "train")
    made.class_folders(tmp_path / "val", 2)
    data = opened(tmp_path)
    assert sizes(data) == {"train": 23, "validation": 1, "test": 6}
    assert data.held_out.endswith("test: the data set's validation split")
    assert data.own_validation == "test"
    held, train = data.split("validation"), data.split("train")
    assert held.name_of(0) not in {train.name_of(n) for n in range(len(train))}


def test_a_set_with_all_three_splits_keeps_them(tmp_path):
    for name in ("train", "validation", "test"):
        made.class_folders(tmp_path / name, 3)
    data = opened(tmp_path)
    assert data.held_out is None
    assert sizes(data) == {"train": 9, "validation": 9, "test": 9}
    assert data.own_validation == "validation"
    assert opened(tmp_path, held_out=0.2).own_validation is None


def test_digits_need_no_network():
    datasets = pytest.importorskip("sklearn.datasets")
    data = opened("digits", held_out=0.2)
    expected = datasets.load_digits()
    assert sum(sizes(data).values()) == len(expected.target)
    train = data.split("train")
    row = int(train.name_of(0).removeprefix("digits: row "))
    number = np.argsort(expected.target, kind="stable")[row]
    grey = (expected.images[number] * 255 / 16).round().astype(np.uint8)
    assert np.array_equal(train.decode(0)[..., 0], grey)
    assert int(train.labels[0]) == expected.target[number]


def test_the_fingerprint_is_of_names_and_labels(tmp_path):
    root = made.class_folders(tmp_path / "all")
    first = opened(root).contents("train")
    root.rename(tmp_path / "moved")
    root = tmp_path / "moved"
    assert opened(root).contents("train") == first
    (root / "ant" / "000.jpg").rename(root / "ant" / "0000.jpg")
    assert opened(root).contents("train") != first
    (root / "ant" / "0000.jpg").rename(root / "bee" / "000a.jpg")
    assert opened(root).contents("train") != first


def write(root, *names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.encoded(made.picture(number % 3, number), "PNG"))
    return root


def test_a_tree_is_read_with_its_links_and_without_hidden_files(tmp_path):
    root = write(tmp_path, *(f"{label}/{n}.PNG" for label in ("a", "a b", "B") for n in range(2)))
    write(root, "a/images/more/9.png", "a/._0.png", ".git/0.png", "__MACOSX/a/0.png")
    (root / "a" / "soft.png").symlink_to("../B/1.PNG")
    (root / "cat").symlink_to("B")
    (root / "a" / "about.txt").touch()
    data = opened(root, held_out=0.1)
    assert data.class_names == ["B", "a", "a b", "cat"]
    assert data.notes == [f"data.path: {root}: 1 files are not images, and not read"]
    found = []
    for name in data.splits:
        split = data.split(name)
        for number in range(len(split)):
            path = Path(split.name_of(number))
            label = path.relative_to(root).parts[0]
            assert data.class_names[split.labels[number]] == label
            assert np.array_equal(split.decode(number), np.asarray(Image.open(path)))
            found.append(path)
    assert len(set(found)) == 10


def table(path, labels, names=None):
    """A parquet file of pictures with labels, and perhaps names of these."""
    import datasets

    kind = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    images = [{"bytes": made.encoded(made.picture(0, n)), "path": None} for n in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    rows = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    rows.to_parquet(str(path))


def words(data, name):
    return [data.class_names[label] for label in data.split(name).labels]


def test_splits_that_number_their_classes_differently_are_read_by_name(tmp_path):
    table(tmp_path / "train.parquet", [0, 1, 2, 1], ["ant", "bee", "cat"])
    table(tmp_path / "validation.parquet", [0, 1], ["cat", "ant"])
    table(tmp_path / "test.parquet", [-1, -1], ["ant", "bee", "cat"])  # hidden
    data = opened(tmp_path, held_out=None)
    assert data.splits == ["train", "validation", "test"]
    assert data.held_out.endswith("test: the data set's validation split")
    assert words(data, "test") == ["cat", "ant"]


def test_columns_of_true_and_false_are_attributes(tmp_path):
    data = opened(made.celeba(tmp_path / "celeba"))
    assert data.has_attributes
    assert data.held_out is None
    assert data.class_names == list(made.ATTRIBUTES)
    assert sizes(data) == {"train": 40, "validation": 10, "test": 10}
    train = data.split("train")
    assert np.array_equal(train.labels, [made.attributes_of(number) for number in range(40)])
