"""Every source of images is read as an independent reader reads it."""

import gzip
import io
import json
import os
import struct

import numpy as np
import pytest
from PIL import Image

from polyad.data.errors import DataError
from polyad.data.images.dataset import ImageData
from polyad.data.images.prepare import prepare_images
from tests.helpers import images as made
from tests.helpers.images import CLASSES


def prepared(source, output, **options):
    prepare_images(str(source), output, report=lambda line: None, **options)
    return ImageData.open(output)


def contents(data):
    """All pictures with their classes, of the splits together."""
    found = []
    for name in data.manifest.splits:
        split = data.split(name)
        pairs = ((split.decode(n).tobytes(), int(split.labels[n])) for n in range(len(split)))
        found += pairs
    return sorted(found)


SOURCES = {
    "folder": lambda path: made.class_folders(path / "all"),
    "parquet": lambda path: made.parquet(path / "train-0.parquet"),
    "snappy": lambda path: made.parquet(path / "train-0.parquet", compression="snappy"),
    "arrow": lambda path: made.arrow(path / "saved"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_holds_what_pillow_reads(tmp_path, kind):
    data = prepared(SOURCES[kind](tmp_path), tmp_path / "out", held_out=0.25)
    expected = sorted(
        (np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).tobytes(), label)
        for _, label, content in made.listed(8)
    )
    assert contents(data) == expected
    assert data.manifest.class_names == list(CLASSES)
    assert {name: about.images for name, about in data.manifest.splits.items()} == {
        "train": 18, "validation": 6,
    }  # fmt: skip
    assert data.manifest.held_out.startswith("validation: 6 of the 24 training images")
    assert (tmp_path / "out" / "images.bin").exists() == (kind != "folder")
    assert not list(data.faults())


def test_a_set_whose_validation_is_its_test_gets_another_one(tmp_path):
    root = tmp_path / "imagenet"
    made.class_folders(root / "train")
    made.class_folders(root / "val", 2)
    data = prepared(root, tmp_path / "out")
    sizes = {name: about.images for name, about in data.manifest.splits.items()}
    assert sizes == {"train": 23, "validation": 1, "test": 6}
    assert data.manifest.held_out.endswith("test: the data set's validation split")
    assert data.manifest.own_validation == "test"
    held, train = data.split("validation"), data.split("train")
    names = {train.name_of(n) for n in range(len(train))}
    assert held.name_of(0) not in names


def test_a_set_with_all_three_splits_keeps_them(tmp_path):
    for name in ("train", "validation", "test"):
        made.class_folders(tmp_path / "all" / name, 3)
    data = prepared(tmp_path / "all", tmp_path / "out")
    assert data.manifest.held_out is None
    assert [about.images for about in data.manifest.splits.values()] == [9, 9, 9]
    assert data.manifest.own_validation == "validation"
    other = prepared(tmp_path / "all", tmp_path / "other", held_out=0.2)
    assert other.manifest.own_validation is None


def test_raw_files_of_mnist_and_cifar_are_read_where_they_are(tmp_path):
    generator = np.random.default_rng(0)
    mnist = tmp_path / "mnist"
    mnist.mkdir()
    pixels = generator.integers(0, 256, (10, 28, 28), dtype=np.uint8)
    labels = np.arange(10, dtype=np.uint8)
    head = struct.pack(">4B3I", 0, 0, 8, 3, 10, 28, 28)
    (mnist / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes()))
    (mnist / "train-labels-idx1-ubyte").write_bytes(
        struct.pack(">4BI", 0, 0, 8, 1, 10) + labels.tobytes()
    )
    # torchvision leaves the packed file beside the other.
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(b"packed")
    data = prepared(mnist, tmp_path / "m", held_out=0.1)
    assert not data.manifest.left_out
    train = data.split("train")
    for number in range(len(train)):
        label = int(train.labels[number])
        expected = np.repeat(pixels[label][..., None], 3, -1)
        assert np.array_equal(train.decode(number), expected)
    cifar = tmp_path / "cifar"
    cifar.mkdir()
    rows = generator.integers(0, 256, (5, 4, 3072), dtype=np.uint8)
    for batch in range(5):
        content = b"".join(bytes([batch]) + row.tobytes() for row in rows[batch])
        (cifar / f"data_batch_{batch + 1}.bin").write_bytes(content)
    data = prepared(cifar, tmp_path / "c", held_out=0.1)
    whole = {row.reshape(3, 32, 32).transpose(1, 2, 0).tobytes() for row in rows.reshape(-1, 3072)}
    assert {content for content, _ in contents(data)} == whole


def test_digits_need_no_network(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    data = prepared("digits", tmp_path / "out", held_out=0.2)
    expected = datasets.load_digits()
    assert sum(about.images for about in data.manifest.splits.values()) == len(expected.target)
    train = data.split("train")
    number = int(train.name_of(0).rsplit("/", 1)[1].removesuffix(".png"))
    grey = (expected.images[number] * 255 / 16).round().astype(np.uint8)
    assert np.array_equal(train.decode(0)[..., 0], grey)
    assert int(train.labels[0]) == expected.target[number]


def test_it_is_kept_and_not_replaced_by_another(tmp_path):
    source = made.class_folders(tmp_path / "all")
    prepared(source, tmp_path / "out")
    before = (tmp_path / "out" / "train.npy").stat().st_mtime_ns
    prepared(source, tmp_path / "out")
    assert (tmp_path / "out" / "train.npy").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"--output: .*holds other prepared data; --overwrite"):
        prepared(source, tmp_path / "out", held_out=0.5)
    prepared(source, tmp_path / "out", held_out=0.5, overwrite=True)
    assert (tmp_path / "out" / "train.npy").stat().st_mtime_ns != before
    # An image that has come is taken.
    image = next(path for path in source.rglob("*") if path.is_file())
    image.with_name(f"another{image.suffix}").write_bytes(image.read_bytes())
    more = prepared(source, tmp_path / "out", held_out=0.5)
    assert sum(each.images for each in more.manifest.splits.values()) == 25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "out"]


def test_files_of_a_user_are_not_replaced(tmp_path):
    source = made.class_folders(tmp_path / "all")
    (tmp_path / "mine").mkdir()
    for name in ("train.npy", "features.npy"):
        (tmp_path / "mine" / name).write_bytes(b"mine")
        with pytest.raises(DataError, match=rf"--output: .*/mine: holds {name}, and is not a"):
            prepared(source, tmp_path / "mine", overwrite=True)
        (tmp_path / "mine" / name).unlink()
    assert prepared(source, tmp_path / "mine").manifest.splits["train"].images


def test_damage_of_the_index_is_one_line(tmp_path):
    data = prepared(made.class_folders(tmp_path / "all"), tmp_path / "out")
    (tmp_path / "out" / "train.names").write_bytes(b"other\n")
    assert [name for name, _ in data.faults()] == ["train.names"]
    (tmp_path / "out" / "train.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.npy: is damaged"):
        data.split("train")
    (tmp_path / "out" / "validation.names").unlink()
    with pytest.raises(DataError, match=r"validation\.names: cannot be read"):
        data.split("validation")
    (tmp_path / "all").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="is not there any more"):
        ImageData.open(tmp_path / "out")


def test_other_labels_in_files_of_the_same_size_are_read(tmp_path):
    cifar = tmp_path / "cifar"
    cifar.mkdir()
    pixels = np.zeros((10, 3072), np.uint8)

    def write(first):
        labels = (np.arange(10, dtype=np.uint8)[:, None] + first) % 10
        for batch in range(1, 6):
            content = np.concatenate([labels, pixels], axis=1).tobytes()
            (cifar / f"data_batch_{batch}.bin").write_bytes(content)

    write(0)
    before = contents(prepared(cifar, tmp_path / "c", held_out=0.1))
    write(3)
    after = prepared(cifar, tmp_path / "c", held_out=0.1)
    assert sorted(label for _, label in contents(after)) == sorted(label for _, label in before)
    first = after.split("train")
    assert int(first.labels[0]) == (int(first.name_of(0).rsplit(" ", 1)[1]) + 3) % 10


def test_what_datasets_writes_is_read_by_byte_offsets(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = made.arrow(tmp_path / "saved")
    file = tmp_path / "train.parquet"
    datasets.load_from_disk(str(saved))["train"].to_parquet(str(file))
    data = prepared(file, tmp_path / "out", held_out=0.25)
    assert data.manifest.class_names == list(CLASSES)
    assert len(contents(data)) == 24


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nothing", "there is no such file or folder"),
        (lambda p: (p / "a.rar").touch() or p / "a.rar", "is of an unknown kind"),
        (lambda p: (p / "a.parquet").touch() or p / "a.parquet", "cannot be read as parquet"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "has no folders of classes"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, make, message):
    source = make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        prepared(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_arrow_files_of_other_columns_are_one_line(tmp_path):
    datasets = pytest.importorskip("datasets")
    image = {"bytes": made.encoded(made.picture(0, 0)), "path": "a.jpg"}
    words = {"image": [image], "label": ["cat"]}
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    saved = datasets.Dataset.from_dict(words, features=datasets.Features(features))
    saved.save_to_disk(str(tmp_path / "words"))
    with pytest.raises(DataError, match="the column label holds string, not numbers of"):
        prepared(tmp_path / "words", tmp_path / "out")
    datasets.Dataset.from_dict({"image": ["a"], "label": [1]}).save_to_disk(str(tmp_path / "paths"))
    with pytest.raises(DataError, match="the column image holds string, not images"):
        prepared(tmp_path / "paths", tmp_path / "out")


def test_names_of_another_column_of_labels_are_not_taken(tmp_path):
    datasets = pytest.importorskip("datasets")
    image = {"bytes": made.encoded(made.picture(0, 0)), "path": "a.jpg"}
    rows = {"image": [image] * 4, "label": [0, 1] * 2, "labels": [1, 0] * 2}
    kinds = {"image": datasets.Image(), "label": datasets.Value("int64")}
    kinds["labels"] = datasets.ClassLabel(names=["ant", "bee"])
    saved = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    saved.save_to_disk(str(tmp_path / "saved"))
    about = prepared(tmp_path / "saved", tmp_path / "out").manifest
    assert about.class_names == ["0", "1"]
    assert not about.left_out  # what describes the file is read


def test_labels_of_minus_one_are_refused_in_train_and_left_out_in_test(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(made.parquet(tmp_path / "train-0.parquet"))
    unknown = pa.array([-1] * len(table), pa.int64())
    pq.write_table(table.set_column(1, "label", unknown), tmp_path / "test-0.parquet")
    data = prepared(tmp_path, tmp_path / "out")
    assert set(data.manifest.splits) == {"train", "validation"}
    pq.write_table(table.set_column(1, "label", unknown), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match="has the label -1, and classes are 0 to 2"):
        prepared(tmp_path, tmp_path / "other")


def named_images(path, names, words):
    """Images of `datasets` with a class each; the class is the colour."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    pictures = [Image.new("RGB", (4, 4), word) for word in words]
    table = datasets.Dataset.from_dict({"image": pictures, "label": words}, features=features)
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        table.to_parquet(path)
    return table


RED_BLUE, BLUE_RED = ["red", "blue"], ["blue", "red"]
COLOURS = {"red": [255, 0, 0], "blue": [0, 0, 255]}


def assert_named_right(data, images):
    names = data.manifest.class_names
    shown = 0
    for split in data.splits:
        opened = data.split(split)
        for number in range(len(opened)):
            word = names[int(opened.labels[number])]
            assert opened.decode(number)[0, 0].tolist() == COLOURS[word]
            shown += 1
    assert shown == images


@pytest.mark.parametrize(
    ("form", "split"),
    [("parquet", "test"), ("parquet", "validation"), ("parquet", "train"), ("saved", "test"),
     ("saved", "validation")],
)  # fmt: skip
def test_classes_are_told_by_their_names_whatever_their_numbers(tmp_path, form, split):
    import datasets

    source = tmp_path / "source"
    places = {
        "parquet": (source / "train-0.parquet", source / f"{split}-1.parquet"),
        "saved": (None, None),
    }[form]
    first = named_images(places[0], RED_BLUE, ["red", "blue", "red", "red"] * 2)
    second = named_images(places[1], BLUE_RED, ["blue", "blue", "red"] * 2)
    if form == "saved":
        datasets.DatasetDict({"train": first, split: second}).save_to_disk(str(source))
    data = prepared(source, tmp_path / "out")
    assert data.manifest.class_names == RED_BLUE
    assert_named_right(data, 14)


def test_a_class_that_no_training_file_names_is_refused(tmp_path):
    source = tmp_path / "parquet"
    named_images(source / "train.parquet", RED_BLUE, ["red", "blue"])
    named_images(source / "test.parquet", ["red", "green", "blue"], ["red", "green", "blue"])
    with pytest.raises(DataError, match=r"row 1 of test has the class 'green', which no file of"):
        prepared(source, tmp_path / "out")
    named_images(source / "test.parquet", ["green", *BLUE_RED], ["red", "blue"])
    assert prepared(source, tmp_path / "out").manifest.class_names == RED_BLUE


def test_class_folders_that_differ_between_splits_are_refused(tmp_path):
    made.class_folders(tmp_path / "all" / "train")
    made.class_folders(tmp_path / "all" / "val")
    (tmp_path / "all" / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"its validation split has 'dog' more"):
        prepared(tmp_path / "all", tmp_path / "out")


def test_a_folder_of_text_is_said_to_be_one(prepared_path):
    with pytest.raises(DataError, match="holds prepared text"):
        ImageData.open(prepared_path)


def test_a_damaged_manifest_is_one_line(tmp_path):
    prepared(made.class_folders(tmp_path / "all"), tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"version": 2}))
    with pytest.raises(DataError, match="format version 2, but this Polyad reads version 3: prep"):
        ImageData.open(tmp_path / "out")
    path.write_text(json.dumps(tree | {"class_names": 3}))
    with pytest.raises(DataError, match="is damaged: class_names"):
        ImageData.open(tmp_path / "out")
    path.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        ImageData.open(tmp_path / "out")


def test_columns_that_cannot_be_null_and_folders_of_splits_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(made.parquet(tmp_path / "x.parquet"))
    inside = [pa.field("bytes", pa.binary(), False), pa.field("path", pa.string())]
    image = pa.field("image", pa.struct(inside), False)
    columns = [table["image"].combine_chunks().cast(image.type), table["label"]]
    required = pa.table(columns, schema=pa.schema([image, pa.field("label", pa.int64())]))
    for split in ("train", "test"):
        folder = tmp_path / "all" / "default" / split
        folder.mkdir(parents=True)
        pq.write_table(required, folder / "0000.parquet", compression="none", use_dictionary=False)
    data = prepared(tmp_path / "all", tmp_path / "out")
    assert {n: about.images for n, about in data.manifest.splits.items()} == {
        "train": 23, "validation": 1, "test": 24,
    }  # fmt: skip
    assert len(contents(data)) == 48


def test_names_of_any_bytes_and_hidden_folders(tmp_path):
    root = made.class_folders(tmp_path / "all")
    os.rename(os.fsencode(root / "ant" / "000.jpg"), os.fsencode(root / "ant") + b"/\xe9.jpg")
    (root / ".ipynb_checkpoints").mkdir()
    data = prepared(root, tmp_path / "out")
    assert data.manifest.class_names == list(CLASSES)
    assert len(contents(data)) == 24
