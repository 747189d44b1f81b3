"""Sources of images with what is no image of theirs, or with damage: left alone, or one line."""

import os

import pyarrow.parquet
import pytest

from polyad.data.errors import DataError
from tests.data.images.test_prepare_images import prepared
from tests.helpers import images as made


def test_what_datasets_keeps_beside_saved_images_is_not_read(tmp_path):
    import datasets

    root = made.arrow(tmp_path / "saved")
    before = prepared(root, tmp_path / "before")
    train = datasets.load_from_disk(str(root))["train"]
    train.map(lambda row: row)
    train.shuffle(seed=0)
    assert list(root.rglob("cache-*.arrow"))
    after = prepared(root, tmp_path / "after")
    assert after.manifest.splits == before.manifest.splits


def test_a_damaged_column_of_labels_is_one_line(tmp_path):
    path = made.parquet(tmp_path / "train.parquet", compression="snappy")
    group = pyarrow.parquet.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    label = next(column for column in columns if column.path_in_schema == "label")
    start, content = label.dictionary_page_offset or label.data_page_offset, path.read_bytes()
    damage = b"\xff" * label.total_compressed_size
    path.write_bytes(content[:start] + damage + content[start + len(damage) :])
    with pytest.raises(DataError, match=r"train.parquet: cannot be read as parquet"):
        prepared(path, tmp_path / "out")


def test_what_a_split_has_opened_is_closed_with_it(tmp_path):
    data = prepared(made.parquet(tmp_path / "train.parquet"), tmp_path / "out")

    def opened():
        return [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]

    packed = str((tmp_path / "out" / "images.bin").resolve())
    for _ in range(3):
        split = data.split("train")
        split.decode(0)
        assert opened().count(packed) == 1
        del split
        assert packed not in opened()


def files(root, *names):
    content = made.encoded(made.picture(0, 0))
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_images_below_a_class_folder_are_read(tmp_path):
    """As Tiny ImageNet has them: train/CLASS/images/0.jpg; what is hidden is left out."""
    inside = ("0.jpg", "images/1.jpg", "images/more/2.jpg")
    hidden = ("ant/._0.jpg", "ant/.trash/3.jpg")
    root = files(tmp_path / "all", *hidden, *(f"{n}/{i}" for n in ("ant", "bee") for i in inside))
    data = prepared(root, tmp_path / "out")
    splits = map(data.split, data.manifest.splits)
    found = sorted(split.name_of(n) for split in splits for n in range(len(split)))
    assert [name.rpartition("all/")[2] for name in found] == [
        f"{name}/{file}" for name in ("ant", "bee") for file in inside
    ]


def test_a_class_may_be_called_train(tmp_path):
    names = ("bus", "car", "train")
    root = files(tmp_path / "all", *(f"{name}/{n}.jpg" for name in names for n in range(3)))
    data = prepared(root, tmp_path / "out")
    assert data.manifest.class_names == list(names)
    assert sum(split.images for split in data.manifest.splits.values()) == 9


def test_images_without_classes_links_to_nothing_and_archives_are_refused(tmp_path):
    root = files(tmp_path / "flat", "train/0.jpg", "train/1.jpg", "val/2.jpg")
    with pytest.raises(DataError, match=r"flat: train holds images, but no folders of classes"):
        prepared(root, tmp_path / "out")
    root = made.class_folders(tmp_path / "all")
    (root / "ant" / "gone.jpg").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.jpg: cannot be read: No such file"):
        prepared(root, tmp_path / "out")
    (tmp_path / "in").mkdir()
    for name in ("a.zip", "a.tar", "in/a.tar.gz"):
        (tmp_path / name).touch()
        source = tmp_path / name if "/" not in name else tmp_path / "in"
        with pytest.raises(DataError, match=r"is an archive; unpack it and name the folder"):
            prepared(source, tmp_path / "out")
