"""Collectives: how long they wait."""

import pytest

from parallel import comm
from tests.helpers.forking import ForkServer
from tests.helpers.training import Case, wait_in_vain
from tests.helpers.workers import WorkerPool

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_collective_of_the_engines_groups_waits_as_long_as_the_key_says(
    forks: ForkServer,
) -> None:
    pool = WorkerPool(2, forks)  # of its own: its groups are of no use afterwards
    try:
        waited, _ = pool.run(wait_in_vain, Case(stage=2, timeout_minutes=0.05))
    finally:
        pool.stop()
    assert 2 < waited < 10  # 3 seconds, not the 30 minutes that the world was made with


def test_a_peer_that_has_failed_is_seen_and_a_process_does_not_take_itself_for_one(
    tmp_path, monkeypatch
):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    ended = []
    monkeypatch.setattr(comm.os, "_exit", ended.append)
    comm.leave(0)
    comm.leave(143)  # stopped by a signal: no failure
    assert not list(tmp_path.glob("*/*"))
    comm.leave(2)
    assert not comm.peer_has_failed()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    assert comm.peer_has_failed()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert not comm.peer_has_failed()
    assert ended == [0, 143, 2]
