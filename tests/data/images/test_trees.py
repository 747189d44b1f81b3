"""Trees of folders: what is read, and what is left out and counted."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyad.data.errors import DataError
from polyad.data.images.prepare import prepare_images, prepared_rows
from tests.data.images.test_prepare_images import prepared
from tests.helpers import images as made


def write(root, *names):
    """Pictures of so many names, each another one."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.encoded(made.picture(number % 3, number), "PNG"))
    return root


def plain(root):
    write(root, *(f"{label}/{n}.png" for label in ("a", "a b", "a-b", "B") for n in range(3)))


def splits(root):
    write(root, *(f"{split}/{label}/{n}.png" for split in ("train", "val", "test")
                  for label in ("ant", "bee") for n in range(3)))  # fmt: skip


def deep(root):
    write(root, "data/ant/images/1.png", "data/ant/0.png", "data/bee/0.JPG", "data/bee/x/y/z.Png")


def endings(root):
    write(root, *(f"{label}/{n}.{ending}" for label in ("ant", "bee") for n, ending in enumerate(
        ("JPG", "jfif", "jpe", "PNG", "bmp", "tif", "webp", "gif", "jpeg"))))  # fmt: skip
    for label in ("ant", "bee"):
        for ending in ("pgm", "pbm", "ppm", "pnm"):
            picture = made.picture(1, 1).convert("1" if ending == "pbm" else "L")
            kind = made.encoded(picture, "PPM")
            (root / label / f"p.{ending}").write_bytes(kind)


def hidden(root):
    write(root, *(f"{label}/{n}.png" for label in ("ant", "bee") for n in range(3)))
    write(root, "ant/._0.png", ".git/0.png", "__MACOSX/ant/0.png", "bee/Thumbs.db", "bee/.DS_Store")


def linked(root):
    write(root, *(f"{label}/{n}.png" for label in ("ant", "bee") for n in range(2)), "bee/in/9.png")
    os.link(root / "ant" / "0.png", root / "bee" / "hard.png")
    (root / "ant" / "soft.png").symlink_to("../bee/1.png")
    (root / "cat").symlink_to("bee")


TREES = {plain: 12, splits: 18, deep: 4, endings: 26, hidden: 6, linked: 11}
"""Trees, and how many images each has."""


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_a_tree_is_read_with_its_links_and_without_hidden_files(tmp_path, tree):
    tree(tmp_path / "all")
    data = prepared(tmp_path / "all", tmp_path / "out")
    found = 0
    for name in data.manifest.splits:
        split = data.split(name)
        for number in range(len(split)):
            path = Path(split.name_of(number))
            label = path.relative_to(tmp_path / "all").parts[2 if tree is splits else 0]
            assert tree is deep or data.manifest.class_names[split.labels[number]] in (
                label,
                path.parent.name,
            )
            assert np.array_equal(split.decode(number), np.asarray(Image.open(path).convert("RGB")))
            found += 1
    assert found == TREES[tree]


@pytest.mark.parametrize("kind", ["circle", "pipe", "empty file", "ending", "beside"])
def test_what_is_no_image_is_left_out_and_counted(tmp_path, kind):
    root = tmp_path / "all"
    write(root, *(f"{label}/{n}.png" for label in ("ant", "bee") for n in range(3)))
    if kind == "circle":
        (root / "ant" / "again").symlink_to("..")
        reason = "links to a folder that contains them"
    elif kind == "pipe":
        os.mkfifo(root / "ant" / "3.png")
        reason = "pipes, sockets and devices"
    elif kind == "empty file":
        (root / "ant" / "3.png").touch()
        reason = "images of 0 bytes"
    elif kind == "ending":
        write(root, "ant/3.heic")
        reason = "files that end in .heic"
    else:
        write(root, "logo.png")
        reason = "images outside a class folder"
    data = prepared(root, tmp_path / "out")
    assert data.manifest.left_out == {reason: 1}
    assert sum(each.images for each in data.manifest.splits.values()) == 6


def test_what_was_left_out_is_said_by_reason_and_number(tmp_path):
    root = tmp_path / "all"
    hidden(root)
    write(root, "README.md", "ant/about.txt")
    manifest = prepare_images(str(root), tmp_path / "out", report=lambda line: None)
    rows = dict(prepared_rows(manifest, tmp_path / "out", 1.0))
    assert rows["left out"] == (
        "hidden files and folders: 5; files that end in .md: 1; files that end in .txt: 1"
    )
    assert rows["note"] == (
        "validation has 1 image: each counts for 100% of a score; --held-out 0.2 would hold out 1 "
        "of the 6"
    )


def test_two_folders_of_one_split_are_refused(tmp_path):
    root = tmp_path / "all"
    splits(root)
    (root / "test").rename(root / "valid")
    with pytest.raises(DataError, match="'val', 'valid' are both the validation split"):
        prepared(root, tmp_path / "out")


@pytest.mark.parametrize("kind", ["index", "packed"])
def test_a_full_disk_is_one_line(tmp_path, kind):
    """A limit of the size of a file is what a full disk is to a write."""
    if kind == "index":
        source = made.class_folders(tmp_path / "all", 60)
    else:
        source = made.parquet(tmp_path / "a.parquet", 60, compression="snappy")
    code = (
        "import resource, sys\n"
        "from polyad.data.images.prepare import prepare_images\n"
        "from polyad.data.errors import DataError\n"
        "import pyarrow.parquet, pyarrow.compute\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "try: prepare_images(sys.argv[1], sys.argv[2], report=lambda line: None)\n"
        "except DataError as error: print(error); sys.exit(error.exit_status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert ": cannot be written: " in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert prepared(source, tmp_path / "out").manifest.splits["train"].images
