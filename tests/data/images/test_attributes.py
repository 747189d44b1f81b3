"""Images with any number of attributes, as CelebA is published and as parquet."""

import numpy as np
import pytest

from polyad.data.errors import DataError
from polyad.data.images.config import AttributeDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.prepare import prepare_images
from polyad.data.images.samples import EvaluationImages
from tests.helpers import images as made


def prepared(source, output):
    prepare_images(str(source), output, report=lambda line: None)
    return ImageData.open(output)


def test_the_published_folder(tmp_path):
    data = prepared(made.celeba(tmp_path / "celeba"), tmp_path / "out")
    manifest = data.manifest
    assert manifest.has_attributes
    assert manifest.held_out is None
    assert manifest.class_names == list(made.ATTRIBUTES)
    assert {name: split.images for name, split in manifest.splits.items()} == {
        "train": 40, "validation": 10, "test": 10,
    }  # fmt: skip
    train = data.split("train")
    expected = np.array([made.attributes_of(number) for number in range(40)])
    assert np.array_equal(train.labels, expected)
    assert manifest.splits["train"].per_class == expected.sum(0).tolist()
    assert data.split("test").labels.tolist() == [
        list(made.attributes_of(number)) for number in range(40, 60) if number // 2 % 2
    ]
    samples = EvaluationImages(train, AttributeDataConfig(path=str(tmp_path)), 8)
    assert samples[7].labels_B.tolist() == list(made.attributes_of(7))
    assert not list(data.faults(lambda count: None))


def test_columns_of_true_and_false(tmp_path):
    made.parquet_of_attributes(tmp_path / "train.parquet")
    data = prepared(tmp_path / "train.parquet", tmp_path / "out")
    assert data.manifest.class_names == list(made.ATTRIBUTES)
    numbers = [int(data.split("train").name_of(n).split(": ")[1][:-4]) for n in range(59)]
    expected = [made.attributes_of(number) for number in numbers]
    assert np.array_equal(data.split("train").labels, expected)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("list_attr_celeba.txt", ("1", "2"), "line 3: a file and 3 numbers, each 1 or -1"),
        ("list_attr_celeba.txt", ("000005.jpg", "nowhere.jpg"), "nowhere.jpg: is named in"),
        ("list_eval_partition.txt", (" 0", " 7"), "line 1: a file and 0, 1 or 2"),
    ],
)
def test_damaged_lists_are_one_line(tmp_path, file, change, message):
    path = made.celeba(tmp_path / "celeba") / file
    head, *rest = path.read_text().split("\n", 2 if "attr" in file else 0)
    text = "\n".join([head, *rest])
    lines = text.split("\n")
    first = 2 if "attr" in file else 0
    lines[first:] = [line.replace(*change) for line in lines[first:]]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path / "celeba", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_images_that_are_not_unpacked_are_named(tmp_path):
    root = made.celeba(tmp_path / "celeba")
    (root / "img_align_celeba").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"has no 000000\.jpg, the first image of its list"):
        prepared(root, tmp_path / "out")


def test_a_damaged_index_of_attributes_is_one_line(tmp_path):
    prepared(made.celeba(tmp_path / "celeba"), tmp_path / "out")
    path = tmp_path / "out" / "train.attributes.npy"
    np.save(path, np.load(path)[:, :2])
    with pytest.raises(DataError, match=r"train\.attributes\.npy: is damaged"):
        ImageData.open(tmp_path / "out").split("train")
