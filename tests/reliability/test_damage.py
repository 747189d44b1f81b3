"""Every file of a checkpoint, damaged in every way at many places: refused and named, always."""

import json
import random
import shutil
from pathlib import Path

import pytest

from polyad.parallel.checkpoint.format import BLOCK_BYTES, CheckpointError, DamagedCheckpoint
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.verification import Manifest
from polyad.parallel.weights import load_model

pytestmark = pytest.mark.distributed

FILES = (
    "manifest.json", "index.json", "state.json", "config.yaml", "rank-00000.safetensors",
    "rank-00001.safetensors",
)  # fmt: skip


@pytest.fixture
def copy(good_checkpoint, tmp_path):
    shutil.copytree(good_checkpoint, tmp_path / "step-00000001")
    assert sorted(path.name for path in good_checkpoint.iterdir()) == sorted(FILES)
    return tmp_path / "step-00000001"


def refused(folder: Path, name: str) -> str:
    """The line that a run is given that verifies the folder, which names the file."""
    with pytest.raises(CheckpointError) as caught:
        Manifest(folder).verify()
    line = str(caught.value)
    # What a manifest says is believed of it alone, so a damaged one is never taken for an old one.
    assert isinstance(caught.value, DamagedCheckpoint) or name == "manifest.json"
    assert line.startswith((f"{folder / name}: damaged: ", f"{folder}: is not a complete")), line
    assert "\n" not in line
    return line


def places(size: int, count: int) -> list[int]:
    """The ends, and seeded ones between."""
    return sorted({0, size - 1, *random.Random(size).sample(range(size), min(count, size))})


def damage_everywhere(folder: Path, name: str, count: int) -> int:
    path = folder / name
    good = path.read_bytes()
    for place in places(len(good), count):
        bit = 1 << place % 8
        path.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
        refused(folder, name)
        zeroed = good[:place] + bytes(min(4096, len(good) - place)) + good[place + 4096 :]
        if zeroed != good:  # fresh moments and padding are zeros already
            path.write_bytes(zeroed)
            refused(folder, name)
        path.write_bytes(good[:place])
        refused(folder, name)
        path.write_bytes(good[:place] + b"\0" + good[place:])
        refused(folder, name)
    path.write_bytes(good)
    Manifest(folder).verify()
    return 4 * count


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_zeroed_cut_or_longer_file_is_named(copy, name):
    assert damage_everywhere(copy, name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_at_very_many_places(copy, name):
    assert damage_everywhere(copy, name, 2000)


@pytest.mark.slow
def test_every_bit_of_a_manifest_counts(copy):
    path = copy / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            refused(copy, "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    refused(copy, name)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "shard of another run"])
def test_what_is_not_of_the_checkpoint_is_named(copy, kind):
    name = "rank-00002.safetensors" if kind.startswith("shard") else "notes.txt"
    if kind == "folder":
        (copy / name).mkdir()
    elif kind == "link":
        (copy / name).symlink_to(copy / "state.json")
    else:
        (copy / name).write_bytes((copy / "rank-00001.safetensors").read_bytes())
    assert "the manifest does not list it" in refused(copy, name)
    with pytest.raises(CheckpointError, match=name):
        load_model(copy)


def test_two_files_that_changed_places_are_named(copy):
    first, second = copy / "rank-00000.safetensors", copy / "rank-00001.safetensors"
    first.rename(copy / "other")
    second.rename(first)
    (copy / "other").rename(second)
    refused(copy, "rank-00000.safetensors")


def test_reading_weights_refuses_every_chunk_that_is_damaged(copy):
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
                with pytest.raises(CheckpointError, match=f"{path.name}: damaged: the xxh3 of the"):
                    Checkpoint(copy).whole(name, field)
                with path.open("r+b") as file:
                    file.seek(chunk.begin)
                    file.write(bytes([byte]))


def test_a_name_that_leads_out_of_the_folder_is_refused(copy):
    # With a digest of itself that is right: who writes it may be anyone.
    tree = json.loads((copy / "manifest.json").read_text())
    tree["files"]["../outside"] = tree["files"]["state.json"]
    del tree["xxh3"]
    shutil.copy(copy / "state.json", copy.parent / "outside")
    body = json.dumps(tree, indent=1)[:-2].encode()
    import xxhash

    ending = f',\n "xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()
    (copy / "manifest.json").write_bytes(body + ending)
    assert "it is not the manifest" in refused(copy, "manifest.json")


def test_a_file_of_several_blocks_is_verified_block_by_block(tmp_path):
    import xxhash

    from polyad.parallel.checkpoint.tensor_file import BlockDigests
    from polyad.parallel.checkpoint.verification import share_of

    size = 2 * BLOCK_BYTES + 5
    blocks = BlockDigests()
    for first in range(0, size, 7 * 2**20 + 1):  # pieces that cross blocks
        blocks.update(memoryview(bytes(min(7 * 2**20 + 1, size - first))))
    record = blocks.record()
    whole, rest = (xxhash.xxh3_64_hexdigest(bytes(n)) for n in (BLOCK_BYTES, 5))
    assert (record.bytes, record.xxh3) == (size, (whole, whole, rest))

    class Several(Manifest):
        def __init__(self, folder):
            self.folder = folder
            self._block_bytes, self.files = BLOCK_BYTES, {"file": record}

    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
        manifest = Several(tmp_path)
        manifest.verify()
        file.seek(BLOCK_BYTES + 9)
        file.write(b"!")
    shares = [share_of(manifest.blocks(), rank, 2) for rank in range(2)]
    assert sorted(block.begin for share in shares for block in share) == [
        0, BLOCK_BYTES, 2 * BLOCK_BYTES,
    ]  # fmt: skip
    with pytest.raises(DamagedCheckpoint, match=f"bytes {BLOCK_BYTES:,} to {2 * BLOCK_BYTES:,}"):
        manifest.verify()


@pytest.mark.parametrize(
    ("version", "reason"),
    [(1, "is older than 2, which this Polyad reads"), (3, "is newer than 2")],
)
def test_another_version_is_one_line(copy, version, reason):
    other = {"format": "polyad-checkpoint", "version": version, "step": 1, "files": {}}
    (copy / "manifest.json").write_text(json.dumps(other, indent=1))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(copy)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert str(caught.value).startswith(f"{copy}: format version {version} {reason}")
    assert "\n" not in str(caught.value)
