"""The same tree gives the same index as a folder, a zip and a tar; what is left out is said."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest

from polyad.data.errors import DataError
from polyad.data.images.prepare import prepare_images, prepared_rows
from tests.data.images.test_prepare_images import prepared
from tests.helpers import images as made

CONTENT = made.encoded(made.picture(0, 0), "PNG")


def write(root, *names):
    """Pictures of so many names, each another one."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.encoded(made.picture(number % 3, number), "PNG"))
    return root


def as_zip(root, path):
    """A zip as `zip -r` makes it: links are followed, and folders are members."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, folders, names in os.walk(root, followlinks=True):
            for name in (*folders, *names):
                file = os.path.join(place, name)
                archive.write(file, os.path.relpath(file, root.parent))
    return path


def as_tar(root, path, **options):
    """A tar as `tar` makes it: links stay links, and a file that is there again is a hard link."""
    with tarfile.open(path, "w", **options) as archive:
        archive.add(root, root.name)
    return path


def index_of(data):
    """Classes, splits, and of each image in its order class, domain and pixels."""
    found = {}
    for name in data.manifest.splits:
        split = data.split(name)
        domains = split.domains if split.domains is not None else [0] * len(split)
        found[name] = [
            (int(split.labels[n]), int(domains[n]), split.decode(n).tobytes())
            for n in range(len(split))
        ]
    return data.manifest.class_names, data.manifest.domain_names, found


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


TREES = [plain, splits, deep, endings, hidden, linked]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_a_tree_gives_one_index_as_folder_zip_and_tar(tmp_path, tree):
    root = tmp_path / "all"
    tree(root)
    expected = prepared(root, tmp_path / "folder")
    images = sum(each.images for each in expected.manifest.splits.values())
    assert images == {"plain": 12, "splits": 18, "deep": 4, "endings": 26, "hidden": 6,
                      "linked": 11}[tree.__name__]  # fmt: skip
    for name, source in (
        ("zip", as_zip(root, tmp_path / "a.zip")),
        ("gnu", as_tar(root, tmp_path / "gnu.tar", format=tarfile.GNU_FORMAT)),
        ("pax", as_tar(root, tmp_path / "pax.TAR", format=tarfile.PAX_FORMAT)),
    ):
        assert index_of(prepared(source, tmp_path / name)) == index_of(expected), name


def test_domains_are_the_same_as_folder_zip_and_tar(tmp_path):
    root = made.domain_tree(tmp_path / "all", {"grey": {"ant": 4, "bee": 3}, "plain": {"ant": 5}})
    expected = index_of(prepared(root, tmp_path / "folder", domains=True))
    for name, source in (
        ("zip", as_zip(root, tmp_path / "a.zip")),
        ("tar", as_tar(root, tmp_path / "a.tar")),
    ):
        assert index_of(prepared(source, tmp_path / name, domains=True)) == expected


def mistaken(root, kind):
    """A tree that is probably not what is meant, and what is said of it."""
    write(root, *(f"{label}/{n}.png" for label in ("ant", "bee") for n in range(3)))
    if kind == "ending":
        write(root, "ant/3.heic", "bee/4.HEIC")
        return (
            r"would leave out files that end in \.heic: 2 \(as ant/3\.heic\); if that is intended,"
        )
    if kind == "no ending":
        write(root, "ant/3")
        return r"would leave out files without an ending: 1 \(as ant/3\)"
    if kind == "empty class":
        (root / "cat").mkdir()
        return "one class has no training image: 'cat'; if that is intended, add --accept"
    if kind == "one class":
        shutil.rmtree(root / "bee")
        return "there is only one class, 'ant'"
    if kind == "beside":
        write(root, "logo.png")
        return r"images outside a class folder: 1 \(as logo\.png\)"
    if kind == "labels":
        for name, other in (("ant", "images"), ("bee", "labels")):
            (root / name).rename(root / other)
        return "'images', 'labels' are no classes: name the folder that has them"
    if kind == "called as splits":
        (root / "ant").rename(root / "training_set")
        (root / "bee").rename(root / "test2017")
        return "'test2017', 'training_set' are called as splits, and would be classes"
    if kind == "split alone":
        other = write(root.with_name("test"), "ant/0.png", "ant/1.png", "bee/2.png")
        shutil.rmtree(root)
        root.mkdir()
        other.rename(root / "test")
        return "the folder test of a test split would be trained on"
    if kind == "written twice":
        write(root, "Ant /0.png", "Ant /1.png", "Ant /2.png")
        (root / "bee").rename(root / "be\u0301")
        write(root, "b\u00e9/0.png", "b\u00e9/1.png", "b\u00e9/2.png")
        return r"'Ant ' and 'ant' would be two classes, .*; 'be\\u0301' and 'b\\xe9' would be"
    if kind == "no labels":
        (root / "ant").rename(root / "train")
        (root / "bee").rename(root / "val")
        return "train holds images, but no folders of classes"
    if kind == "empty file":
        (root / "ant" / "3.png").touch()
        return r"images of 0 bytes: 1 \(as .*ant/3\.png\)"
    if kind == "circle":
        (root / "ant" / "again").symlink_to("..")
        return r"links to a folder that contains them: 1 \(as ant/again\)"
    if kind == "pipe":
        os.mkfifo(root / "ant" / "3.png")
        return r"pipes, sockets and devices: 1 \(as ant/3\.png\)"
    for name in ("train", "extra", "test"):
        write(root, *(f"{name}/{label}/{n}.png" for label in ("ant", "bee") for n in range(3)))
    for name in ("ant", "bee"):
        shutil.rmtree(root / name)
    if kind == "test without labels":
        shutil.rmtree(root / "extra")
        shutil.rmtree(root / "test")
        write(root, "test/0.png", "test/1.png")
        return r"images outside a class folder: 2 \(as test/0\.png\)"
    return r"images outside a split folder: 6 \(as extra/ant/0\.png\)"


@pytest.mark.parametrize(
    "kind",
    [
        *("ending", "no ending", "empty class", "one class", "beside", "labels", "no labels"),
        *("called as splits", "split alone", "written twice"),
        *("circle", "pipe", "empty file", "test without labels", "beside splits"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "tar"])
def test_what_is_probably_a_mistake_is_refused_or_accepted(tmp_path, kind, form):
    root = tmp_path / "all"
    said = mistaken(root, kind)
    source = root
    if form == "tar":
        source = as_tar(root, tmp_path / "a.tar")
        said = said.replace("(as ", "(as (all/)?")
    with pytest.raises(DataError, match=said) as caught:
        prepared(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    if kind != "no labels":
        data = prepared(source, tmp_path / "out", accept=True)
        assert sum(each.images for each in data.manifest.splits.values()) in (3, 6, 12)


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


def test_images_beside_tables_are_not_left_out_without_a_word(tmp_path):
    root = write(tmp_path / "all", "ant/0.png", "bee/0.png")
    made.parquet(root / "train.parquet")
    with pytest.raises(DataError, match=r"would leave out files that end in \.png: 2"):
        prepared(root, tmp_path / "out")
    data = prepared(root, tmp_path / "out", accept=True)
    assert sum(each.images for each in data.manifest.splits.values()) == 24


def test_two_folders_of_one_split_are_refused(tmp_path):
    root = tmp_path / "all"
    splits(root)
    (root / "test").rename(root / "valid")
    with pytest.raises(DataError, match="'val', 'valid' are both the validation split"):
        prepared(root, tmp_path / "out")


def test_the_last_of_members_with_one_name_is_taken(tmp_path):
    """As unpacking leaves it."""
    contents = [made.encoded(made.picture(2, number), "PNG") for number in range(4)]
    names = ["ant/0.png", "bee/0.png", "ant/0.png", "bee/1.png"]
    with (
        tarfile.open(tmp_path / "a.tar", "w") as tar,
        zipfile.ZipFile(tmp_path / "a.zip", "w") as archive,
    ):
        for name, content in zip(names, contents, strict=True):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
            with pytest.warns() if name in archive.namelist() else open(os.devnull):
                archive.writestr(name, content)
    for kind in ("tar", "zip"):
        data = prepared(tmp_path / f"a.{kind}", tmp_path / kind)
        pixels = sorted(pixels for each in index_of(data)[2].values() for *_, pixels in each)
        assert pixels == sorted(np.asarray(made.picture(2, n)).tobytes() for n in (1, 2, 3))
        assert data.manifest.left_out == {"members replaced by a later one of the same name": 1}


def test_two_that_prepare_one_folder_do_not_damage_it(tmp_path):
    """One of two was ended with a damaged folder and the exit status 0."""
    made.class_folders(tmp_path / "all", 40)
    code = (
        "import sys; from polyad.data.images.prepare import prepare_images\n"
        "from polyad.data.errors import DataError\n"
        "try: prepare_images(sys.argv[1], sys.argv[2], held_out=float(sys.argv[3]))\n"
        "except DataError as error: print(error); sys.exit(2)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "all"), str(tmp_path / "out"), share],
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in ("0.1", "0.3", "0.5")
    ]
    ended = [(run.communicate()[0], run.returncode) for run in runs]
    assert sorted(status for _, status in ended) == [0, 2, 2]
    for said, status in ended:
        assert status == 0 or "another process is preparing it" in said or "holds other" in said
    share = (0.1, 0.3, 0.5)[[status for _, status in ended].index(0)]
    data = prepared(tmp_path / "all", tmp_path / "out", held_out=share)
    assert data.manifest.splits["validation"].images == round(120 * share)
    assert not list(data.faults(lambda count: None))


@pytest.mark.parametrize("kind", ["index", "packed"])
def test_a_full_disk_names_the_file_and_what_to_do(tmp_path, kind):
    """A limit of the size of a file is what a full disk is to a write; it was a traceback."""
    if kind == "index":
        source, name = made.class_folders(tmp_path / "all", 60), "train.npy"
    else:
        source, name = made.parquet(tmp_path / "a.parquet", 60, compression="snappy"), "images.bin"
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
    assert done.stdout == (
        f"{tmp_path}/out/{name}: cannot be written: File too large; make room there, and run the "
        f"same command again\n"
    )
    assert not (tmp_path / "out").exists()
    assert prepared(source, tmp_path / "out").manifest.splits["train"].images


def test_what_was_accepted_is_so_from_then_on(tmp_path):
    """As a study prepares the folder that its user has prepared before."""
    root = write(tmp_path / "all", "ant/0.png", "ant/1.png", "bee/0.png", "bee/note.heic")
    prepared(root, tmp_path / "out", accept=True)
    assert prepared(root, tmp_path / "out").manifest.left_out == {"files that end in .heic": 1}
    with pytest.raises(DataError, match="add --accept"):
        prepared(root, tmp_path / "out", held_out=0.5, overwrite=True)
