"""Every byte is verified once, by one of the processes, and all come to the same answer."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CheckpointError, Contents, read_contents
from polyad.parallel.checkpoint.load import newest_that_opens, newest_verified
from tests.helpers.prepared import flip
from tests.helpers.training import Case, train

pytestmark = pytest.mark.distributed


def verify_shares(folder: str) -> tuple[str, list[str]]:
    """What a run would go on from (or its error), and the files that this process verified of the
    first that was tried.
    """
    comm.initialize()
    seen: list[list[str]] = []
    original = Contents.verify

    def verify(self: Contents, names: Any = None, *others: Any) -> None:
        if others:  # rank 0 opens small files as well
            seen.append(list(names))
        original(self, names, *others)

    newest = newest_that_opens(Path(folder)) if comm.rank() == 0 else None
    with mock.patch.object(Contents, "verify", verify):
        try:
            chosen = newest_verified(newest, Path(folder))
        except CheckpointError as error:
            return f"{error.exit_status}: {error}", seen[0]
    return chosen.folder.name if chosen else "none", seen[0]


@pytest.fixture(scope="module")
def checkpoints(workers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        workers(2).run(train, Case(stage=1, last_step=step, save_to=str(folder)))
    return folder


def test_processes_share_the_work(workers, checkpoints):
    newest = checkpoints / "step-00000002"
    shares = workers(2).run(verify_shares, str(checkpoints))
    assert [chosen for chosen, _ in shares] == [newest.name] * 2
    assert sorted(name for _, share in shares for name in share) == sorted(
        read_contents(newest).files
    )
    assert all(len(share) >= 2 for _, share in shares)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_what_one_process_finds_all_go_by(workers, checkpoints, tmp_path, name):
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoints, folder)
    for step, expected in ((2, "step-00000001"), (1, None)):
        path = folder / f"step-0000000{step}" / name
        flip(path, path.stat().st_size // 2, 3)
        answers = {chosen for chosen, _ in workers(2).run(verify_shares, str(folder))}
        if expected is not None:
            assert answers == {expected}
    (line,) = answers
    assert line.startswith(f"{CheckpointError.exit_status}: {folder / 'step-00000002' / name}")
    assert f"{folder / 'step-00000001' / name}: damaged: " in line
