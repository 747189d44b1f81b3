"""Images with domains: what each split holds is what a loop over the files says."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from tests.helpers import images as made
from tests.helpers.images import CLASSES

SIZES = {
    "grey": {"ant": 7, "bee": 4, "cat": 5},
    "inverted": {"ant": 3, "bee": 6},
    "plain": {"ant": 4, "bee": 5, "cat": 6},
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return made.domain_tree(tmp_path_factory.mktemp("domains") / "all", SIZES)


def opened(source, leave_out=None, held_out=0.2):
    return ImageData.open(
        ImageDataConfig(path=str(source), domains=True, held_out=held_out, leave_out=leave_out)
    )


def files_of(data, name):
    split = data.split(name)
    return [Path(split.name_of(number)) for number in range(len(split))]


def test_a_share_of_each_domain_is_held_out(tree):
    data = opened(tree)
    assert data.splits == ["train", "validation"]
    held = files_of(data, "validation")
    for domain, sizes in SIZES.items():
        total = sum(1 for _ in (tree / domain).rglob("*.png"))
        assert total == sum(sizes.values())
        mine = sum(file.parent.parent.name == domain for file in held)
        assert mine == round(0.2 * total), domain
    both = sorted([*held, *files_of(data, "train")])
    assert both == sorted(tree.rglob("*.png"))
    assert data.class_names == list(CLASSES)
    assert data.domain_names == sorted(SIZES)
    assert data.held_out == (
        "validation: 8 of the 40 training images, from each of 3 domains, drawn with the seed 0"
    )


@pytest.mark.parametrize("leave_out", [["grey"], ["plain", "inverted"]])
def test_what_is_left_out_is_the_test_split_and_nowhere_else(tree, leave_out):
    whole, data = opened(tree), opened(tree, leave_out)
    assert data.splits == ["train", "validation", "test"]
    inside = sorted(file for domain in leave_out for file in (tree / domain).rglob("*.png"))
    assert sorted(files_of(data, "test")) == inside
    for name in ("train", "validation"):
        expected = [f for f in files_of(whole, name) if f.parent.parent.name not in leave_out]
        assert files_of(data, name) == expected
    for name in data.splits:
        split = data.split(name)
        assert len(split) == len(split.labels) == len(split.domains)
        for number, file in enumerate(files_of(data, name)):
            assert CLASSES[split.labels[number]] == file.parent.name
            named = data.domain_names[split.domains[number]]
            assert named == file.parent.parent.name
            assert np.array_equal(split.decode(number), np.asarray(Image.open(file)))


def test_the_fingerprint_knows_what_is_left_out(tree):
    choices = (None, ["grey"], ["inverted"], ["grey", "inverted"])
    found = [opened(tree, each).contents("train") for each in choices]
    assert len(set(found)) == 4
    assert opened(tree, ["inverted", "grey"]).contents("train") == found[3]
