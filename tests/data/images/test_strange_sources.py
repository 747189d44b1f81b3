"""Sources of images with what is no image of theirs, or with damage: left alone, or one line."""

import io
import os
import tarfile
import zipfile

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


def test_a_second_image_of_a_sample_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.jpg", "0.seg.png", "0.cls"):
            content = b"0" if name == "0.cls" else made.encoded(made.picture(0, 0))
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    with pytest.raises(DataError, match=r"seg.png: is a second image of its sample, besides 0.jpg"):
        prepared(tmp_path / "a.tar", tmp_path / "out")


def test_an_image_outside_of_classes_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        content = made.encoded(made.picture(0, 0))
        archive.writestr("data/logo.jpg", content)
        for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
            archive.writestr(f"data/{place}/0.jpg", content)
    with pytest.raises(DataError, match=r"images outside a split folder: 1 \(as data/logo.jpg\)"):
        prepared(tmp_path / "a.zip", tmp_path / "out")


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


def test_images_below_a_class_folder_are_read_from_files_as_from_a_zip(tmp_path):
    """As Tiny ImageNet has them: train/CLASS/images/0.jpg; what is hidden is left out."""
    content = made.encoded(made.picture(0, 0))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("ant", "bee"):
            for place in (f"{name}/0.jpg", f"{name}/images/1.jpg", f"{name}/images/more/2.jpg"):
                archive.writestr(place, content)
        archive.writestr("ant/._0.jpg", b"a fork")
        archive.extractall(tmp_path / "all")
    (tmp_path / "all" / "ant" / ".trash").mkdir()
    (tmp_path / "all" / "ant" / ".trash" / "3.jpg").write_bytes(content)
    files, archived = (
        prepared(tmp_path / source, tmp_path / f"{source} out") for source in ("all", "a.zip")
    )
    assert {name: split.images for name, split in files.manifest.splits.items()} == {
        name: split.images for name, split in archived.manifest.splits.items()
    }
    found = sorted(
        split.name_of(number)
        for split in map(files.split, files.manifest.splits)
        for number in range(len(split))
    )
    assert [name.rpartition("all/")[2] for name in found] == [
        f"{name}/{file}"
        for name in ("ant", "bee")
        for file in ("0.jpg", "images/1.jpg", "images/more/2.jpg")
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"cat\n\ndog\n", "line 2 is empty; it must be the name of a class"),
        ("caf\u00e9\ndog\n".encode("latin-1"), "is not UTF-8"),
    ],
)
def test_a_damaged_list_of_classes_beside_tars_is_one_line(tmp_path, content, said):
    (tmp_path / "in").mkdir()
    made.webdataset(tmp_path / "in" / "train.tar")
    (tmp_path / "in" / "classes.txt").write_bytes(content)
    with pytest.raises(DataError, match=said):
        prepared(tmp_path / "in", tmp_path / "out")


def test_what_a_split_has_opened_is_closed_with_it(tmp_path):
    data = prepared(made.webdataset(tmp_path / "train.tar"), tmp_path / "out")

    def opened():
        return [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]

    tar = str((tmp_path / "train.tar").resolve())
    for _ in range(3):
        split = data.split("train")
        split.decode(0)
        assert opened().count(tar) == 1
        del split
        assert tar not in opened()


def test_a_class_may_be_called_train(tmp_path):
    content = made.encoded(made.picture(0, 0))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("bus", "car", "train"):
            for number in range(3):
                archive.writestr(f"{name}/{number}.jpg", content)
        archive.extractall(tmp_path / "all")
    for source in ("a.zip", "all"):
        data = prepared(tmp_path / source, tmp_path / f"{source} out")
        assert data.manifest.class_names == ["bus", "car", "train"]
        assert sum(split.images for split in data.manifest.splits.values()) == 9


def test_images_without_classes_and_links_to_nothing_are_refused(tmp_path):
    content = made.encoded(made.picture(0, 0))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("train/0.jpg", "train/1.jpg", "val/2.jpg"):
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"a\.zip: train holds images, but no folders of classes"):
        prepared(tmp_path / "a.zip", tmp_path / "out")
    root = made.class_folders(tmp_path / "all")
    (root / "ant" / "gone.jpg").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.jpg: cannot be read: No such file"):
        prepared(root, tmp_path / "out")
