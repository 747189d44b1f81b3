"""Images with domains: what each split holds is what a loop over the files says."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyad.data.errors import DataError
from polyad.data.images.dataset import ImageData
from polyad.data.images.prepare import prepare_images, prepared_rows
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


def prepared(source, output, *, leave_out=None, said=None, **options):
    report = (lambda line: None) if said is None else said.append
    prepare_images(str(source), output, domains=True, report=report, **options)
    return ImageData.open(output, leave_out)


def files_of(data, name):
    split = data.split(name)
    return [Path(split.name_of(number)) for number in range(len(split))]


def domains_of(data, name):
    return {file.parent.parent.name for file in files_of(data, name)}


def test_a_share_of_each_domain_is_held_out(tree, tmp_path):
    said = []
    data = prepared(tree, tmp_path / "out", held_out=0.2, said=said)
    assert data.splits == ["train", "validation"]
    held = files_of(data, "validation")
    for domain, sizes in SIZES.items():
        total = sum(1 for _ in (tree / domain).rglob("*.png"))
        assert total == sum(sizes.values())
        mine = sum(file.parent.parent.name == domain for file in held)
        assert mine == round(0.2 * total), domain
    both = sorted([*held, *files_of(data, "train")])
    assert both == sorted(tree.rglob("*.png"))
    assert data.manifest.class_names == list(CLASSES)
    assert data.manifest.domain_names == sorted(SIZES)
    assert data.manifest.held_out == (
        "validation: 8 of the 40 training images, from each of 3 domains, drawn with the seed 0"
    )
    assert "inverted: has no image of 'cat'" in said
    rows = dict(prepared_rows(data.manifest, tmp_path / "out", 1.0))
    assert rows["domains"] == "3: grey 16, inverted 9, plain 15"


@pytest.mark.parametrize("leave_out", [["grey"], ["plain", "inverted"]])
def test_what_is_left_out_is_the_test_split_and_nowhere_else(tree, tmp_path, leave_out):
    whole = prepared(tree, tmp_path / "out", held_out=0.2)
    data = ImageData.open(tmp_path / "out", leave_out)
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
            named = data.manifest.domain_names[split.domains[number]]
            assert named == file.parent.parent.name
            assert np.array_equal(split.decode(number), np.asarray(Image.open(file)))


def test_the_fingerprint_knows_what_is_left_out(tree, tmp_path):
    prepared(tree, tmp_path / "out", held_out=0.2)
    choices = (None, ["grey"], ["inverted"], ["grey", "inverted"])
    found = [ImageData.open(tmp_path / "out", each).fingerprint for each in choices]
    assert len(set(found)) == 4
    turned = ImageData.open(tmp_path / "out", ["inverted", "grey"])
    assert turned.fingerprint == found[3]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["fingerprint"] == found[0]


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        (["gray"], r"data\.leave_out: 'gray' is not a domain of .* \(did you mean 'grey'\?\); dom"),
        (["plain", "grey", "inverted"], r"data\.leave_out: all domains of .* are left out"),
    ],
)
def test_domains_that_cannot_be_left_out_are_one_line(tree, tmp_path, leave_out, said):
    prepared(tree, tmp_path / "out", held_out=0.2)
    with pytest.raises(DataError, match=said) as caught:
        ImageData.open(tmp_path / "out", leave_out)
    assert "\n" not in str(caught.value)


def test_a_class_of_a_left_out_domain_alone_is_one_line(tmp_path):
    root = made.domain_tree(
        tmp_path / "all", {"grey": {"ant": 5, "bee": 5}, "plain": {"ant": 5, "cat": 5}}
    )
    prepared(root, tmp_path / "out")
    with pytest.raises(
        DataError, match=r"data\.leave_out: 'plain' has the class 'cat', which the other domai"
    ):
        ImageData.open(tmp_path / "out", ["plain"])


def test_data_without_domains_leaves_none_out(tmp_path):
    prepare_images(str(made.class_folders(tmp_path / "all")), tmp_path / "out")
    assert ImageData.open(tmp_path / "out").split("train").domains is None
    with pytest.raises(DataError, match=r"data\.leave_out: 'grey' is not allowed: .* no domains"):
        ImageData.open(tmp_path / "out", ["grey"])


def no_tree(kind, root):
    """A source that is no DOMAIN/CLASS/image, and what is said of it."""
    if kind == "classes":
        return made.class_folders(root / "all"), "ant holds images, but no folders of classes"
    if kind == "splits":
        made.class_folders(root / "all" / "train", 2)
        return made.class_folders(root / "all" / "val", 2).parent, "'train', 'val' are splits"
    if kind == "deeper":
        made.class_folders(root / "all" / "grey" / "raw", 2)
        return root / "all", "it has only one domain, 'raw'"
    if kind == "empty":
        (root / "all").mkdir()
        return root / "all", "it has no images in such folders"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["classes", "splits", "deeper", "empty"])
def test_what_is_no_tree_of_domains_is_one_line(tmp_path, kind):
    source, said = no_tree(kind, tmp_path)
    with pytest.raises(
        DataError, match=f"--domains: .* is not a tree of DOMAIN/CLASS/image: .*{said}"
    ):
        prepared(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_domain_of_one_image_has_none_to_hold_out(tmp_path):
    root = made.domain_tree(tmp_path / "all", {"grey": {"ant": 1}, "plain": {"ant": 5}})
    with pytest.raises(DataError, match=r"--held-out: 0\.2 of 1 images of grey leaves none"):
        prepared(root, tmp_path / "out", held_out=0.2)
