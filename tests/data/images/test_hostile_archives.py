"""Archives whose numbers and names are anybody's: one line, in little time and memory."""

import io
import json
import os
import struct
import subprocess
import tarfile
import zipfile

import pytest

from polyad.data.errors import DataError
from tests.data.images.test_prepare_images import contents, prepared
from tests.helpers import images as made

CONTENT = made.encoded(made.picture(0, 0))


def header(name, size, kind=b"0"):
    """A block of a tar; a size may be bytes, as they stand there."""
    block = bytearray(512)
    block[: len(name)] = name.encode()
    block[100:108] = b"0000644\0"
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content):
    return content + bytes(-len(content) % 512)


IMAGE = header("0.jpg", len(CONTENT)) + padded(CONTENT)
LABEL = header("0.cls", 1) + padded(b"0")
END = bytes(1024)
BELOW_ZERO = (-512).to_bytes(12, "big", signed=True)


def pax(content):
    return header("x", len(content), b"x") + padded(content)


TARS = {
    "negative": (header("0.jpg", BELOW_ZERO) + END, "the header at byte 0 is damaged"),
    "negative behind": (IMAGE + header("1.jpg", BELOW_ZERO) + END, "is damaged"),
    "negative keys": (header("x", BELOW_ZERO, b"x") + IMAGE + END, "is damaged"),
    "digits": (pax(b"5" * 5000 + b" path=a\n") + IMAGE + END, "is damaged"),
    "a size of digits": (pax(b"4021 size=" + b"9" * 4010 + b"\n") + IMAGE + END, "is damaged"),
    "a large size": (pax(b"25 size=99999999999999999\n") + IMAGE + END, "is damaged|ends before"),
    "huge": (header("0.jpg", b"\x80" + b"\xff" * 11) + END, "ends before this member does|damaged"),
    "long keys": (header("x", 1 << 30, b"x") + IMAGE + END, "1,073,741,824 bytes of names"),
    "long name": (header("x", 1 << 30, b"L") + IMAGE + END, "1,073,741,824 bytes of names"),
    "a large label": (IMAGE + header("0.cls", 4000) + padded(b"0" * 4000) + END,
                      "0.cls: has 4,000 bytes, but a class may have at most 1,024"),
    "digits in a label": (IMAGE + header("0.cls", 1000) + padded(b"7" * 1000) + END,
                          "does not hold the number of a class"),
    "nested": (IMAGE + header("0.json", 200_000) + padded(b"[" * 200_000) + END,
               "0.json: is not read: its JSON is nested too deeply"),
    "many keys": (pax(b"30 path=" + b"a" * 21 + b"\n") * 3000 + IMAGE + END, "damaged|no class"),
    "damaged later": (IMAGE + LABEL + b"x" + header("1.jpg", 5)[1:] + END,
                      "the header at byte [0-9,]+ is damaged"),
    "joined": (IMAGE + LABEL + END + IMAGE + END, "continues after its end at byte"),
    "empty": (b"", "is empty, so it is not a tar"),
    "id": (IMAGE + header("0.cls", 10) + padded(b"2000000000") + END,
           "0.jpg of train has the label 2,000,000,000, and without names 1,000,000 classes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TARS)
def test_a_tar_that_lies_is_one_line(tmp_path, kind):
    content, said = TARS[kind]
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        prepared(tmp_path / "a.tar", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_members_with_holes_are_not_read_into_memory(tmp_path):
    """A file of 6 GB of zeros takes 1 KB on a disk."""
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(IMAGE + header("0.cls", 6 << 30))
        file.truncate(file.tell() + (6 << 30) + 1024)
    with pytest.raises(
        DataError, match=r"0\.cls: has 6,442,450,944 bytes, but a class may have at most 1,024"
    ):
        prepared(path, tmp_path / "out")


def zipped(path, name, content, **changes):
    """A zip whose directory says something else of its one image."""
    with zipfile.ZipFile(path, "w") as archive:
        for other in ("ant/1.jpg", "bee/0.jpg", "bee/1.jpg"):
            archive.writestr(other, CONTENT)
        archive.writestr(name, content)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    for place, (form, value) in changes.items():
        struct.pack_into(form, data, at + int(place.removeprefix("at")), value)
    path.write_bytes(bytes(data))
    return path


ZIPS = {
    "offset": (dict(at42=("<I", 0xFFFFFFF0)), "its header is damaged|cannot be read as a zip"),
    "size": (dict(at20=("<I", 0xFFFFFFF0), at24=("<I", 0xFFFFFFF0)), "ends before this member"),
    "two sizes": (dict(at24=("<I", 7)), "its header is damaged: it has two sizes"),
    "encrypted": (dict(at8=("<H", 1)), "is encrypted"),
    "way": (dict(at10=("<H", 97)), "is compressed in a way that Python does not read"),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_a_zip_that_lies_is_one_line(tmp_path, kind):
    changes, said = ZIPS[kind]
    path = zipped(tmp_path / "a.zip", "ant/0.jpg", CONTENT, **changes)
    with pytest.raises(DataError, match=said) as caught:
        prepared(path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_sizes_of_64_bits_in_a_zip_are_one_line(tmp_path):
    extra = struct.pack("<HHQQQ", 1, 24, 2**64 - 5, 2**64 - 5, 2**64 - 5)
    about = zipfile.ZipInfo("ant/0.jpg")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(about, CONTENT)
        about.extra = extra
    data = bytearray((tmp_path / "a.zip").read_bytes())
    at = data.rindex(b"PK\x01\x02")
    for place in (20, 24, 42):
        struct.pack_into("<I", data, at + place, 0xFFFFFFFF)
    (tmp_path / "a.zip").write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"damaged|ends before|cannot be read as a zip"):
        prepared(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.slow
def test_a_member_of_a_zip_that_unpacks_without_end_is_one_line(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("ant/0.jpg", "bee/0.jpg", "bee/1.jpg"):
            archive.writestr(name, CONTENT)
        with archive.open("ant/1.jpg", "w", force_zip64=True) as file:
            for _ in range(600):
                file.write(bytes(1 << 20))
    with pytest.raises(DataError, match=r"ant/1\.jpg: has 629,145,600 bytes, and 536,870,912 are"):
        contents(prepared(path, tmp_path / "out"))


def test_labels_of_a_json_may_be_text(tmp_path):
    def tar(labels, names=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with tarfile.open(folder / "a.tar", "w") as archive:
            for number, label in enumerate(labels):
                for name, data in (
                    (f"{number}.jpg", CONTENT),
                    (f"{number}.json", json.dumps({"label": label}).encode()),
                ):
                    about = tarfile.TarInfo(name)
                    about.size = len(data)
                    archive.addfile(about, io.BytesIO(data))
        if names:
            (folder / "classes.txt").write_text("\n".join(names))
        return folder

    assert prepared(tar(["0", "1", 1]), tmp_path / "a").manifest.class_names == ["0", "1"]
    named = prepared(tar(["bee", "ant", 1], ["ant", "bee"]), tmp_path / "b")
    assert named.manifest.class_names == ["ant", "bee"]
    assert sum(sum(each.per_class[1:]) for each in named.manifest.splits.values()) == 2
    for labels, names in ((["ant", "bee"], None), (["ant", "cow"], ["ant", "bee"])):
        with pytest.raises(
            DataError, match=r"does not hold the number of a class: '\w+'[;,] .*classes\.txt"
        ):
            prepared(tar(labels, names), tmp_path / "c")
    for label in (None, True, 1.5, [1], {"a": 1}):
        with pytest.raises(DataError, match="does not hold the number of a class"):
            prepared(tar([label]), tmp_path / "c")


def test_members_of_a_sample_agree_on_its_class(tmp_path):
    def tar(*labels):
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w") as archive:
            for name, data in (("0.jpg", CONTENT), *labels, ("1.jpg", CONTENT), ("1.cls", b"1")):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
        return path

    for other in (("0.json", b'{"label": 1}'), ("0.label", b"1")):
        for labels in ((("0.cls", b"0"), other), (other, ("0.cls", b"0"))):
            with pytest.raises(
                DataError, match=r"has the class [01], but another member of the sample has [01]"
            ):
                prepared(tar(*labels), tmp_path / "out")
    same = tar(("0.cls", b"0"), ("0.json", b'{"label": 0, "class": "of another list"}'))
    assert prepared(same, tmp_path / "out").manifest.class_names == ["0", "1"]


def test_sparse_members_are_told_wherever_they_stand(tmp_path):
    root = tmp_path / "all"
    for number in range(6):
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (root / "ab"[number % 2] / f"{number}.jpg").write_bytes(CONTENT)
    with (root / "b" / "9.jpg").open("wb") as file:
        file.truncate(1 << 20)
    for form in ("gnu", "pax"):
        path = tmp_path / f"{form}.tar"
        command = ["tar", "-Sc", f"--format={form}", "--sort=name", "-f", path, "-C", root, "."]
        subprocess.run(command, check=True)
        with pytest.raises(
            DataError, match=r"would leave out members stored as sparse files: 1 \(as .*9\.jpg"
        ):
            prepared(path, tmp_path / "out")


def test_tars_of_a_mac_have_its_images_alone(tmp_path):
    """Beside each member stands one of `._`, which is no image."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(4):
            for name, data in (
                (f"./._{number}.jpg", b"a fork"),
                (f"./{number}.jpg", CONTENT),
                (f"./._{number}.cls", b"a fork"),
                (f"./{number}.cls", str(number % 2).encode()),
            ):
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    data = prepared(tmp_path / "a.tar", tmp_path / "out")
    assert sum(each.images for each in data.manifest.splits.values()) == 4
    assert data.manifest.left_out == {"hidden files and folders": 8}


def test_hard_links_in_a_tar_are_images(tmp_path):
    """Links are how `tar` writes a file again: 6 of these 8 samples were left out."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(8):
            for ending, data in (("cls", str(number % 2).encode()), ("jpg", CONTENT)):
                about = tarfile.TarInfo(f"{number}.{ending}")
                if ending == "jpg" and number >= 2:
                    about.type, about.linkname = tarfile.LNKTYPE, f"{number % 2}.jpg"
                    archive.addfile(about)
                else:
                    about.size = len(data)
                    archive.addfile(about, io.BytesIO(data))
    data = prepared(tmp_path / "a.tar", tmp_path / "out")
    assert sum(each.images for each in data.manifest.splits.values()) == 8
    assert {pixels for pixels, _ in contents(data)} == {contents(data)[0][0]}


@pytest.mark.parametrize("labels", [range(1000, 1030), range(30)])
def test_a_column_of_ids_is_no_column_of_labels(tmp_path, labels):
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": CONTENT, "path": None}] * len(labels)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": images, "label": list(labels)}), path)
    with pytest.raises(
        DataError, match=r"30 training images have 30 classes: are the labels ids\?"
    ):
        prepared(path, tmp_path / "out")
    big = [10**9 + number for number in labels]
    pq.write_table(pa.table({"image": images, "label": big}), path)
    with pytest.raises(DataError, match=r"1,000,000 classes are allowed: are the labels ids\?"):
        prepared(path, tmp_path / "out")


def test_a_pipe_and_a_folder_are_no_json(tmp_path):
    from polyad.data.json_reader import read_json

    os.mkfifo(tmp_path / "pipe")
    for name, said in (("pipe", "is not a file"), ("gone", "cannot be read: No such file")):
        with pytest.raises(DataError, match=said):
            read_json(tmp_path / name)
    for content, said in (
        (b"[" * 100_000, "is not read: its JSON is nested too deeply"),
        (b"9" * 5000, "is not read: its JSON has a number of too many digits"),
        (b"\xff", "is not UTF-8: invalid start byte at byte 0"),
        (b"{", "is not JSON: .* at character 2"),
        (b" " * 101, "has more than 100 bytes, so it is not read"),
    ):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            read_json(tmp_path / "a.json", most_bytes=100 if b"  " in content else 1 << 20)
        assert "\n" not in str(caught.value)
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "a.json") == {}
