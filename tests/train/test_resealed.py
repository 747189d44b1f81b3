"""Checkpoints whose manifest vouches for nonsense: one line and status 2, from every command.

A manifest with right digests can be written by anyone, so what the small files say is checked by
itself. A change that harms nothing may pass, and then nothing else is read than before.
"""

import math
import shutil

import pytest
import torch

from polyad.parallel.checkpoint.reading import Checkpoint
from tests.helpers.resealed import WEIGHT, changed, commands, said, without

pytestmark = pytest.mark.distributed


def chunk(tree, **values):
    tree["tensors"][WEIGHT]["master"]["chunks"][0] |= values


def tensor(tree, field="master", **values):
    tree["tensors"][WEIGHT][field] |= values


def twice(tree):
    """A box a second time in place of another one, so that a part of the tensor is nowhere."""
    chunks = max(
        (fields["exp_avg"]["chunks"] for fields in tree["tensors"].values() if "exp_avg" in fields),
        key=len,
    )
    small = min(chunks, key=lambda each: math.prod(each["size"]))
    chunks.insert(0, small)
    chunks.remove(max(chunks, key=lambda each: math.prod(each["size"])))


def shrunk(tree):
    """A smaller tensor, consistent in itself and with nothing else."""
    about = tree["tensors"][WEIGHT]["master"]
    tensor(tree, shape=[1, 32], chunks=[about["chunks"][0] | {"offset": [0, 0], "size": [1, 32]}])


INDEX = {
    "outside": lambda tree: chunk(tree, file="../../x.safetensors"),
    "absolute": lambda tree: chunk(tree, file="/tmp/x.safetensors"),
    "passwd": lambda tree: chunk(tree, file="/etc/passwd"),
    "another file": lambda tree: chunk(tree, file="config.yaml"),
    "no such file": lambda tree: chunk(tree, file="rank-00007.safetensors"),
    "control": lambda tree: chunk(tree, file="\x1b[2J\n\0"),
    "another shard": lambda tree: chunk(tree, file="rank-00001.safetensors"),
    "before": lambda tree: chunk(tree, begin=-1),
    "text": lambda tree: chunk(tree, begin="5"),
    "shifted": lambda tree: chunk(
        tree, begin=tree["tensors"][WEIGHT]["master"]["chunks"][0]["begin"] + 4
    ),
    "behind": lambda tree: chunk(tree, begin=10**15),
    "huge size": lambda tree: chunk(tree, size=[10**12, 10**12]),
    "huge shape": lambda tree: tensor(tree, shape=[2**62, 2**62]),
    "axes": lambda tree: chunk(tree, size=[400, 32, 1]),
    "twice": twice,
    "shrunk": shrunk,
    "no digest": lambda tree: without(
        tree, "tensors", WEIGHT, "master", "chunks", 0, "xxh3"
    ),
    "no tensors": lambda tree: tree.update(tensors=[]),
    "empty": lambda tree: tree.update(tensors={}),
    "F8": lambda tree: tensor(tree, dtype="F8"),
    "U8": lambda tree: tensor(tree, dtype="U8"),
    "no chunks": lambda tree: tensor(tree, chunks=[]),
    "chunks null": lambda tree: tensor(tree, chunks=None),
    "step": lambda tree: chunk(tree, step=-1.0),
    "steps": lambda tree: chunk(tree, step=5.0),
    "missing weight": lambda tree: without(tree, "tensors", WEIGHT),
    "missing buffer": lambda tree: [
        without(tree, "tensors", name)
        for name, fields in list(tree["tensors"].items())
        if "buffer" in fields
    ],
    "unknown key": lambda tree: tree.update(more=1),
}  # fmt: skip
STATE = {
    "step text": lambda tree: tree.update(step="x"),
    "step differs": lambda tree: tree.update(step=5),
    "tokens null": lambda tree: tree.update(tokens=None),
    "bool": lambda tree: tree.update(samples=True),
    "negative": lambda tree: tree.update(seconds=-1.0),
    "norm": lambda tree: tree.update(recent_losses=[1.0], recent_grad_norms=[0.0]),
    "lengths": lambda tree: tree.update(recent_losses=[1.0], recent_grad_norms=[]),
    "left out": lambda tree: tree.update(left_out=["x"]),
    "unfinished": lambda tree: tree.update(unfinished={"step": 6}),
    "time": lambda tree: tree.update(saved_at=1e300),
    "fingerprint": lambda tree: tree.update(tokenizer_fingerprint=5),
    "versions": lambda tree: tree.update(versions={"torch": None}),
}
MANIFEST = {
    "name": lambda tree: tree["files"].update({"../x": tree["files"]["index.json"]}),
    "bytes": lambda tree: tree["files"]["index.json"].update(bytes=-1),
    "no digests": lambda tree: tree["files"]["rank-00000.safetensors"].update(xxh3=[]),
    "digest": lambda tree: tree["files"]["index.json"].update(xxh3=[5]),
    "step": lambda tree: tree.update(step=2.5),
    "another step": lambda tree: tree.update(step=3),
    "block": lambda tree: tree.update(block_bytes="1"),
    "version": lambda tree: tree.update(version=True),
}
TABLE = [
    (name, what, change)
    for name, changes in (("index", INDEX), ("state", STATE), ("manifest", MANIFEST))
    for what, change in changes.items()
]
RESUME_ALONE = {
    "missing moments": ("index", lambda tree: without(tree, "tensors", WEIGHT, "exp_avg")),
    "random state": ("index", lambda tree: tree["tensors"]["rank-00000.torch"]["random"].update(
        shape=[0], chunks=tree["tensors"]["rank-00000.torch"]["random"]["chunks"])),
    "steps to come": ("index", lambda tree: [
        each.update(step=7.0)
        for field in ("master", "exp_avg", "exp_avg_sq")
        for each in tree["tensors"][WEIGHT][field]["chunks"]]),
    "no samples": ("state", lambda tree: without(tree, "samples")),
}  # fmt: skip


@pytest.mark.slow
def test_every_command_refuses_a_table_of_nonsense_in_one_line(resealed, capfd):
    refused_by_config = {"missing weight", "missing buffer", "shrunk"}
    for name, what, change in TABLE:
        changed(resealed, name, change)
        lines = {}
        for command, arguments in commands(resealed).items():
            if command == "verify" and what in refused_by_config - {"shrunk"}:
                continue  # whole in itself, and of another model
            lines[command] = said(arguments, capfd)
        assert lines["validate"] == lines["train"], what
        path = str(resealed.checkpoint)
        assert all(line.startswith(path) for line in lines.values()), (what, lines)


def test_what_only_a_run_needs_is_refused_by_validate_as_by_train(resealed, capfd):
    for what, (name, change) in RESUME_ALONE.items():
        changed(resealed, name, change)
        lines = [said(commands(resealed)[each], capfd) for each in ("validate", "train")]
        assert lines[0] == lines[1], what


def test_a_digest_that_is_another_is_found_where_the_bytes_are_read(resealed, capfd):
    changed(resealed, "index", lambda tree: chunk(tree, xxh3="0" * 16))
    for command in ("evaluate", "generate", "verify", "convert"):
        assert "the xxh3 of the chunk at byte" in said(commands(resealed)[command], capfd)


def test_symbolic_links_that_leave_the_folder_are_refused(resealed, tmp_path, capfd):
    for name in ("rank-00000.safetensors", "index.json", "tokenizer.json", "manifest.json"):
        path, outside = resealed.checkpoint / name, tmp_path / name
        path.rename(outside)
        path.symlink_to(outside)
        for arguments in commands(resealed).values():
            assert f"{name}: damaged: is a symbolic link that leaves" in said(arguments, capfd)
        path.unlink()
        outside.rename(path)
    # One that stays inside, and the user's own on the way to the folder.
    path = resealed.checkpoint / "rank-00000.safetensors"
    shutil.copytree(resealed.checkpoint, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert torch.equal(weight(tmp_path / "link"), weight(resealed.checkpoint))
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "leaves the folder" in said(commands(resealed)["verify"], capfd)


def weight(folder):
    return Checkpoint(folder).whole(WEIGHT)
