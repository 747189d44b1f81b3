"""Saving, step by step: whatever moment the power is cut at, there is a complete checkpoint.

The operations are those of real saves by two processes. Every prefix of them is replayed on a
model of a disk that loses what was not flushed, and what is left is given to what a run reads.
"""

import errno
import hashlib
import os
import resource
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polyad.model.decoder import GPT2Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CheckpointError, verify_contents
from polyad.parallel.checkpoint.manage import (
    complete_checkpoints,
    put_back,
    remove_leftovers,
)
from polyad.parallel.checkpoint.save import SaveError
from tests.helpers.disk import Disk, audited, read_tree, recorded, write_tree
from tests.helpers.saving import change, saving
from tests.helpers.training import Case, build_engine

pytestmark = pytest.mark.distributed


def record_saves(case: Case, folder: str, steps: list[int], last: int, way: str) -> dict[str, Any]:
    """Saves several times; gives all operations, where each save ended, and what it left.

    The folder's parent is there and empty.
    """
    engine, _ = build_engine(case)
    path = Path(folder)
    ends, trees = [], []
    with (
        recorded() as recorder,
        audited(path.parent) as seen,
        saving(engine, path, last, way=way) as save,
    ):
        for number, step in enumerate(steps, start=1):
            change(engine, number)
            save(step)
            comm.barrier()
            ends.append(time.monotonic_ns())
            trees.append(read_tree(path))
            comm.barrier()
    return {"operations": recorder.operations, "ends": ends, "trees": trees, "audited": seen}


def failing_save(
    case: Case, folder: str, faults: list[tuple[int, int, int]], way: str
) -> list[Any]:
    """For each (rank, operation, errno) a save that meets it.

    Every save is of step 2 and begins with a good checkpoint of step 1.

    Returns:
        For each the error ("none" if none), the operation that failed, whether step 1 is still
        what it was, and what became of step 2: "absent", "whole" or "broken".
    """
    engine, _ = build_engine(case)
    path, results = Path(folder), []
    change(engine, 1)
    with saving(engine, path, None, way=way) as save:
        save(1)
    change(engine, 2)
    before = read_tree(path)
    for rank, number, error in faults:
        comm.barrier()
        with (
            recorded(number if comm.rank() == rank else None, error) as recorder,
            saving(engine, path, 2, way=way) as save,
        ):
            try:
                save(2)
                text = "none"
            except SaveError as caught:
                text = str(caught)
        comm.barrier()
        after = read_tree(path)
        old = all(after.get(name, 0) == before[name] for name in before if name != "latest")
        results.append((text, recorder.failed, old, _state_of(path / "step-00000002")))
        comm.barrier()
        if comm.rank() == 0:
            _only_step_1(path)
    return results


def _state_of(path: Path) -> str:
    if not path.exists():
        return "absent"
    try:
        verify_contents(path)
    except CheckpointError:
        return "broken"
    return "whole"


def _only_step_1(path: Path) -> None:
    for inner in path.iterdir():
        if inner.name not in ("step-00000001", "latest"):
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    (path / "latest").write_text("step-00000001\n")


def save_in_little_room(case: Case, folder: str, size: int, way: str) -> tuple[str, dict[str, Any]]:
    """A save in which the kernel itself refuses rank 0 files of more than `size` bytes."""
    engine, world = build_engine(case)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with saving(engine, Path(folder), None, way=way) as save:
        save(1)
        try:
            if world.is_main:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            save(2)
            text = "none"
        except SaveError as error:
            text = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.barrier()
    return text, read_tree(Path(folder))


LAST = 1
STEPS = {
    "the next": [1, 2],
    "the same": [1, 1],
}  # the second save removes the first, or replaces it
TINY = GPT2Config(num_layers=1, hidden_size=12, num_heads=2, sequence_length=9, vocab_size=31)
CASE = Case(stage=1, model=TINY)


class BrokenPromise(AssertionError):
    """A moment at which there was no complete checkpoint, or half of one."""


@pytest.fixture(params=[pytest.param("synchronous", marks=pytest.mark.slow), "snapshot"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def recordings(workers, tmp_path_factory):
    @cache
    def record(way, steps="the next"):
        root = tmp_path_factory.mktemp("recorded")
        arguments = (CASE, str(root / "checkpoints"), STEPS[steps], LAST, way)
        ranks = workers(2).run(record_saves, *arguments)
        return {
            "root": root,
            "steps": STEPS[steps],
            "operations": sorted(o for rank in ranks for o in rank["operations"]),
            "ends": [max(rank["ends"][n] for rank in ranks) for n in range(2)],
            "trees": ranks[0]["trees"],
            "ranks": ranks,
        }

    return record


@pytest.fixture(
    params=["the next", *(pytest.param(each, marks=pytest.mark.slow) for each in [*STEPS][1:])]
)
def recording(recordings, way, request):
    return recordings(way, request.param)


def replay(recording, operations, folder, *, every_write):
    """Checks what is found after every prefix; returns how many different states there were.

    Args:
        recording: of the saves.
        operations: of it, all or some.
        folder: for what is found.
        every_write: also between two writes of a file that is not flushed, as a killed process
            leaves it: after a power cut nothing new is found there.
    """
    disk, seen = Disk(str(recording["root"])), set()
    saved = list(zip(recording["steps"], recording["trees"], strict=True))
    expected = [(step, contents_of(tree, step)) for step, tree in saved]
    for number, operation in enumerate(operations):
        disk.apply(operation)
        committed = sum(operation[0] >= end for end in recording["ends"])
        following = operations[number + 1][1] if number + 1 < len(operations) else ""
        if operation[1] == following == "write" and not every_write:
            continue
        for tree in (disk.alive(), *disk.after_power_cuts()):
            key = (committed, digest_of(tree))
            if key not in seen:
                seen.add(key)
                place = folder / f"{len(seen)}"
                write_tree(place, tree)
                check(place / "checkpoints", committed, expected)
                shutil.rmtree(place, ignore_errors=True)
    return len(seen)


def contents_of(tree, step):
    prefix = f"step-{step:08d}/"
    return {name[len(prefix) :]: data for name, data in tree.items() if name.startswith(prefix)}


def check(folder, committed, expected):
    """Whether a run would go on from a complete checkpoint, as new as was promised."""
    put_back(folder)
    found = complete_checkpoints(folder)
    steps = [int(path.name[5:]) for path in found]
    if committed and (not steps or steps[-1] < expected[committed - 1][0]):
        raise BrokenPromise(f"{committed} saves had ended, and {steps} are found")
    for path, step in zip(found, steps, strict=True):
        try:
            verify_contents(path)
        except CheckpointError as error:
            raise BrokenPromise(str(error)) from None
        content = {file.name: file.read_bytes() for file in path.iterdir()}
        if (step, content) not in expected[max(0, committed - 1) :]:
            raise BrokenPromise(f"{path} is another one than was saved")
    if folder.is_dir():
        remove_leftovers(folder)
        if complete_checkpoints(folder) != found or any(folder.glob(".step*")):
            raise BrokenPromise("what a crash left could not be cleared away")


def digest_of(tree):
    whole = hashlib.blake2b()
    for name, content in sorted(tree.items()):
        whole.update(f"{name}\0{content is None}{len(content or b'')}\0".encode())
        whole.update(content or b"")
    return whole.digest()


def test_after_a_power_cut_at_any_moment_there_is_a_complete_checkpoint(recording, tmp_path):
    kinds = {operation[1] for operation in recording["operations"]}
    assert {"create", "write", "sync", "sync_folder", "rename", "unlink", "rmdir"} <= kinds
    states = replay(recording, recording["operations"], tmp_path, every_write=False)
    assert states > 80


@pytest.mark.slow
def test_after_a_kill_between_any_two_writes_too(recording, tmp_path):
    states = replay(recording, recording["operations"], tmp_path, every_write=True)
    assert states > 200


def without_sync_of(*endings):
    return lambda operations: [
        o for o in operations if not (o[1].startswith("sync") and o[2].endswith(endings))
    ]


def removed_file_by_file(operations):
    return [
        (at, kind, path.replace(".step-00000001.deleted", "step-00000001"), what)
        for at, kind, path, what in operations
        if what is None or not str(what).endswith(".deleted")
    ]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(without_sync_of(".safetensors"), id="tensors are not flushed"),
        pytest.param(without_sync_of("index.json"), id="the index is not"),
        pytest.param(without_sync_of("manifest.json"), id="the manifest is not"),
        pytest.param(without_sync_of(".partial"), id="the names in the staging folder are not"),
        pytest.param(without_sync_of("checkpoints"), id="the rename is not"),
        pytest.param(removed_file_by_file, id="one is removed file by file"),
    ],
)
def test_the_proof_notices_what_is_left_out(recordings, tmp_path, change):
    recording = recordings("synchronous")
    operations = change(recording["operations"])
    assert len(operations) < len(recording["operations"])
    with pytest.raises(BrokenPromise):
        replay(recording, operations, tmp_path, every_write=False)


@pytest.mark.slow
def test_the_proof_notices_a_replaced_checkpoint_that_is_not_put_back(
    recordings, tmp_path, monkeypatch
):
    recording = recordings("synchronous", "the same")
    monkeypatch.setitem(globals(), "put_back", lambda folder: None)
    with pytest.raises(BrokenPromise):
        replay(recording, recording["operations"], tmp_path, every_write=False)


def test_nothing_changes_the_disk_but_what_was_recorded(recording):
    for rank in recording["ranks"]:
        kinds = ("create", "rename", "unlink", "mkdir", "rmdir")
        ours = [(kind, path) for _, kind, path, _ in rank["operations"] if kind in kinds]
        assert rank["audited"] == ours


def operations_of(workers, folder, way):
    """What each process does in a save of step 2."""
    ranks = workers(2).run(record_saves, CASE, str(folder / "checkpoints"), [1, 2], 2, way)
    return [[o for o in rank["operations"] if o[0] > rank["ends"][0]] for rank in ranks]


def some_of(operations):
    """All operations but, of the writes of a file, the second and following ones."""
    seen = set()
    for number, (_, kind, path, _) in enumerate(operations):
        if kind != "write" or path not in seen:
            yield number
        seen.add(path)


def assert_refused_and_kept(workers, folder, faults, way):
    (folder / "failing").mkdir()
    ranks = workers(2).run(failing_save, CASE, str(folder / "failing" / "checkpoints"), faults, way)
    not_met = 0
    for (rank, _, error), *results in zip(faults, *ranks, strict=True):
        text, failed, old_is_whole, new = results[rank]
        if failed is None:  # another process was quicker to make the folder
            not_met += 1
            assert (text, new) == ("none", "whole")
            continue
        assert results[1 - rank][0] == text  # the same line everywhere
        assert "\n" not in text
        assert text.startswith(f"step 2 could not be saved: rank {rank}: {folder}")
        assert text.endswith(os.strerror(error))
        assert old_is_whole, failed
        assert new != "broken", failed
        # What failed after the rename was only the pointer, or telling the disk.
        assert new == "absent" or failed[1].endswith(("checkpoints", "latest", "latest.partial"))
    assert not_met < len(faults) / 5


def test_any_error_of_the_disk_is_one_line_and_leaves_what_was_there(workers, tmp_path, way):
    errors = (errno.ENOSPC, errno.EIO, errno.EACCES)
    faults = [
        (rank, number, errors[(rank + number) % 3])
        for rank, operations in enumerate(operations_of(workers, tmp_path, way))
        for number in some_of(operations)
    ]
    assert len(faults) > 15
    assert_refused_and_kept(workers, tmp_path, faults, way)


def test_a_file_that_the_kernel_finds_too_large_is_one_line(workers, tmp_path, way):
    folder = tmp_path / "checkpoints"
    (text, tree), (other, _) = workers(2).run(save_in_little_room, CASE, str(folder), 10_000, way)
    assert text == other
    assert text.startswith("step 2 could not be saved: rank 0: ")
    assert "rank-00000.safetensors: File too large" in text
    assert {name.partition("/")[0] for name in tree} == {"latest", "step-00000001"}
    verify_contents(folder / "step-00000001")
