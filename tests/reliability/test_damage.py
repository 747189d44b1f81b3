"""Every file of a checkpoint, damaged in every way at many places: refused and named, always."""

import random
import re
import shutil
from pathlib import Path

import pytest

from polyad.parallel.checkpoint.format import CheckpointError, DamagedCheckpoint, verify_contents
from polyad.parallel.checkpoint.load import Checkpoint
from tests.helpers.training import Case, train

pytestmark = pytest.mark.distributed

FILES = (
    "manifest.json", "index.json", "state.json", "config.yaml", "rank-00000.safetensors",
    "rank-00001.safetensors",
)  # fmt: skip


@pytest.fixture(scope="session")
def good_checkpoint(workers, tmp_path_factory):
    """A checkpoint of two processes, for copying."""
    folder = tmp_path_factory.mktemp("good")
    workers(2).run(train, Case(stage=1, last_step=1, save_to=str(folder)))
    return folder / "step-00000001"


@pytest.fixture
def copy(good_checkpoint, tmp_path):
    shutil.copytree(good_checkpoint, tmp_path / "step-00000001")
    assert sorted(path.name for path in good_checkpoint.iterdir()) == sorted(FILES)
    return tmp_path / "step-00000001"


def refused(folder: Path, name: str) -> None:
    """Whoever verifies or opens the folder is given a line that names the file."""
    with pytest.raises(CheckpointError) as caught:
        verify_contents(folder)
    line = str(caught.value)
    # What a manifest says is believed of it alone, so a damaged one is never taken for an old one.
    assert isinstance(caught.value, DamagedCheckpoint) or name == "manifest.json"
    assert line.startswith((f"{folder / name}: damaged: ", f"{folder}: is not a complete")), line
    assert "\n" not in line
    if not name.endswith(".safetensors"):  # whose content is looked at where it is read
        with pytest.raises(CheckpointError, match=re.escape(name)):
            Checkpoint(folder)


def places(size: int, count: int) -> list[int]:
    """The ends, and seeded ones between."""
    return sorted({0, size - 1, *random.Random(size).sample(range(size), min(count, size))})


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_zeroed_cut_or_longer_file_is_named(copy, name):
    path = copy / name
    good = path.read_bytes()
    for place in places(len(good), 15):
        bit = 1 << place % 8
        path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
        refused(copy, name)
        zeroed = good[:place] + bytes(min(4096, len(good) - place)) + good[place + 4096 :]
        if zeroed != good:  # fresh moments and padding are zeros already
            path.write_bytes(zeroed)
            refused(copy, name)
        path.write_bytes(good[:place])
        refused(copy, name)
        path.write_bytes(good[:place] + b"\0" + good[place:])
        refused(copy, name)
    path.write_bytes(good)
    verify_contents(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    refused(copy, name)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        Checkpoint(copy)


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff", b"", b'{"format": "other"}'])
def test_what_is_no_manifest_is_named(copy, content):
    (copy / "manifest.json").write_bytes(content)
    refused(copy, "manifest.json")


def test_two_files_that_changed_places_are_named(copy):
    first, second = copy / "rank-00000.safetensors", copy / "rank-00001.safetensors"
    first.rename(copy / "other")
    second.rename(first)
    (copy / "other").rename(second)
    refused(copy, "rank-00000.safetensors")


def test_reading_weights_refuses_a_file_in_which_any_chunk_is_damaged(copy):
    checkpoint = Checkpoint(copy)
    for name, fields in checkpoint.tensors.items():
        for field, about in fields.items():
            for chunk in about.chunks:
                path = copy / chunk.file
                with path.open("r+b") as file:
                    file.seek(chunk.begin)
                    byte = file.read(1)[0]
                    file.seek(chunk.begin)
                    file.write(bytes([byte ^ 128]))
                with pytest.raises(CheckpointError, match=f"{path.name}: damaged: its xxh3"):
                    Checkpoint(copy).whole(name, field)
                with path.open("r+b") as file:
                    file.seek(chunk.begin)
                    file.write(bytes([byte]))
