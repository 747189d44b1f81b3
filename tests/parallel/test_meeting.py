"""Processes meet before their first collective: who fails, who does not come, what listens."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from polyad.parallel.addresses import STORE, listener
from polyad.parallel.meeting import comparison
from tests.helpers.everyday import everyday

pytestmark = pytest.mark.distributed

JOIN = """
import sys, time
from polyad.parallel import comm, meeting
rank, what, minutes = sys.argv[1:]
meeting.LINGER = 3.0
time.sleep(float(what.partition("later ")[2] or 0))
if what.startswith("fail"):
    meeting.report_failure("data.path: gone: no such folder", 2, printed=True)
    sys.exit(2)
try:
    comm.initialize(float(minutes), facts={"seed": "1" if what != "other" else "2"})
    print(comm.sum_over_ranks(__import__("torch").ones(1)).item())
    comm.shutdown()
except Exception as error:
    print(type(error).__name__, error)
    meeting.report_failure(str(error), error.exit_status, printed=True)
    sys.exit(error.exit_status)
"""


def start(
    environment: Mapping[str, str], rank: int, what: str, size: int = 2, minutes: float = 1.0
) -> "subprocess.Popen[str]":
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, str(rank), what, str(minutes)],
        env=dict(os.environ) | {k: str(v) for k, v in names.items()} | dict(environment),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def place(store: str, tmp_path: Path) -> dict[str, str]:
    """Where processes meet, as variables: a port of rank 0, or a file of the host."""
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return there | ({STORE: str(tmp_path / "store")} if store == "file" else {})


def ends(processes: "list[subprocess.Popen[str]]") -> list[tuple[int, str]]:
    found = []
    for each in processes:
        out, err = each.communicate(timeout=120)
        assert "Traceback" not in err, err
        found.append((each.returncode, out.strip()))
    return found


@everyday("store", ["tcp", "file"], keep=["tcp"])
def test_processes_that_agree_go_on(place: dict[str, str]) -> None:
    assert ends([start(place, rank, "") for rank in range(2)]) == [(0, "2.0"), (0, "2.0")]


@everyday("store", ["tcp", "file"], keep=["file"])
def test_processes_that_do_not_agree_all_refuse(place: dict[str, str]) -> None:
    found = ends([start(place, rank, "other" if rank == 2 else "", 3) for rank in range(3)])
    host = socket.gethostname()
    line = f"DisagreementError seed: 1 on {host} (rank 0), 2 on {host} (rank 2); "
    assert [status for status, _ in found] == [2, 2, 2]
    assert all(said.startswith(line) for _, said in found), found


@everyday("store", ["tcp", "file"], keep=["tcp"])
@everyday("failing", [0, 1], keep=[1])
def test_a_process_that_fails_ends_those_that_wait(failing: int, place: dict[str, str]) -> None:
    started = time.monotonic()
    found = ends([start(place, rank, "fail" * (rank == failing), minutes=30) for rank in range(2)])
    assert time.monotonic() - started < 60
    assert found[failing] == (2, "")
    status, said = found[1 - failing]
    assert status == 2
    assert f"(rank {failing}) ended before the first step: data.path: gone" in said


@everyday("store", ["tcp", "file"], keep=[])
def test_a_process_that_does_not_come_is_named_at_the_deadline(place: dict[str, str]) -> None:
    ((status, said),) = ends([start(place, 0, "", size=3, minutes=0.05)])
    assert status == 1
    assert (
        "2 of 3 processes did not come within 0.05 min (parallel.timeout_minutes): ranks 1, 2"
        in said
    )


@pytest.mark.slow
def test_rank_zero_that_does_not_come_is_named_with_its_address() -> None:
    port = free_port()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ((status, said),) = ends([start(where, 1, "", minutes=0.05)])
    assert status == 1
    assert f"rank 0 was not at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)" in said


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ((status, said),) = ends([start(where, 0, "")])
    assert status == 1
    assert f"MASTER_PORT: {port}: rank 0 cannot listen there" in said


def test_a_store_listens_on_one_address_where_the_others_come_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for host in ("127.0.0.1", "localhost"):
        listening = listener(host, 0)
        assert listening is not None
        assert listening.getsockname()[0] == "127.0.0.1"
        listening.close()
    assert listener("192.0.2.1", 0) is None  # of no host
    assert listener(socket.gethostname(), 0) is None  # perhaps another address for others
    interface, address = next(
        (name, each.address)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0)), (0, 0, 0, "", ("::9", 0))]
    )
    listening = listener("first-host", 0)
    assert listening is not None
    assert listening.getsockname()[0] == address
    listening.close()


def test_what_differs_is_a_line_for_each_name() -> None:
    told = [(f"host-{n}", {"steps": "6" if n else "9", "seed": "1"}) for n in range(9)]
    assert comparison(told) == [
        "steps: 9 on host-0, 6 on host-1, host-2, host-3, host-4, host-5 and 3 more"
    ]
    assert comparison([("a", {"x": "1"}), ("b", {})]) == ["x: 1 on a, nothing on b"]
    assert comparison(told[1:]) == []
