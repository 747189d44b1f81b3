"""Processes meet before their first collective: who differs, who does not come, what listens."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from polyad.parallel.comm import STORE, comparison
from tests.helpers.everyday import everyday
from tests.helpers.started import wait_for

pytestmark = pytest.mark.distributed

JOIN = """
import signal, sys
from polyad.parallel import comm
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)  # never runs while torch waits
print("begins", flush=True)
try:
    comm.initialize(float(sys.argv[2]), facts={"seed": sys.argv[1]})
    print(comm.sum_over_ranks(__import__("torch").ones(1)).item())
    comm.shutdown()
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_status)
"""


def start(
    environment: Mapping[str, str], rank: int, seed: int = 1, size: int = 2, minutes: float = 1.0
) -> "subprocess.Popen[str]":
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, str(seed), str(minutes)],
        env=dict(os.environ) | {k: str(v) for k, v in names.items()} | dict(environment),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def place(store: str, tmp_path: Path) -> dict[str, str]:
    """Where processes meet, as variables: a port of rank 0, of one host or of several, or a file
    of the host."""
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if store == "file":
        there[STORE] = str(tmp_path / "store")
    if store == "one host":
        there["LOCAL_WORLD_SIZE"] = "2"
    return there


def ends(processes: "list[subprocess.Popen[str]]") -> list[tuple[int, str]]:
    found = []
    for each in processes:
        out, err = each.communicate(timeout=120)
        assert "Traceback" not in err, err
        found.append((each.returncode, out.removeprefix("begins").strip()))
    return found


@everyday("store", ["one host", "hosts", "file"], keep=["one host"])
def test_processes_that_agree_go_on(place: dict[str, str]) -> None:
    assert ends([start(place, rank) for rank in range(2)]) == [(0, "2.0"), (0, "2.0")]


@everyday("store", ["hosts", "file"], keep=["file"])
def test_processes_that_do_not_agree_all_refuse(place: dict[str, str]) -> None:
    seeds = (1, 1, 2)
    found = ends([start(place, rank, seed, 3) for rank, seed in enumerate(seeds)])
    host = socket.gethostname()
    values = f"1 on {host} (rank 0), {host} (rank 1), 2 on {host} (rank 2); "
    assert [status for status, _ in found] == [2, 2, 2]
    assert all(said.startswith(f"DisagreementError seed: {values}") for _, said in found), found


@everyday("store", ["one host", "hosts", "file"], keep=["hosts"])
@everyday("rank", [0, 1], keep=[0])
def test_a_process_that_waits_in_vain_ends_with_one_line(rank: int, place: dict[str, str]) -> None:
    ((status, said),) = ends([start(place, rank, minutes=0.05)])
    assert status == 1
    assert said.startswith(f"PeerError rank {rank} on {socket.gethostname()} did not find all 2 ")
    assert "0.05 min (parallel.timeout_minutes)" in said


@everyday("store", ["one host", "hosts", "file"], keep=["file"])
@everyday("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], keep=[signal.SIGTERM])
@everyday("rank", [0, 1], keep=[0])
def test_a_signal_ends_a_process_that_waits(
    rank: int, number: signal.Signals, place: dict[str, str]
) -> None:
    process = start(place, rank)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    wait_for(lambda: not catches(process, number), process)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number


def catches(process: "subprocess.Popen[str]", number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> number - 1 & 1)


@everyday("store", ["one host", "hosts"], keep=["one host"])
def test_a_port_that_is_taken_is_one_line(place: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", int(place["MASTER_PORT"]))):
        ((status, said),) = ends([start(place, 0)])
    assert status == 1
    assert f"127.0.0.1:{place['MASTER_PORT']}" in said
    assert "in use" in said


def test_the_store_of_one_host_listens_on_loopback(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    process = start(place | {"LOCAL_WORLD_SIZE": "2"}, 0)

    def listening() -> set[str]:
        links = psutil.Process(process.pid).net_connections("inet")
        return {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}

    wait_for(lambda: bool(listening()), process)
    assert listening() == {"127.0.0.1"}
    process.kill()
    process.communicate()


def test_what_differs_is_a_line_for_each_name() -> None:
    facts = [(f"host-{n}", {"steps": "6" if n else "9", "seed": "1"}) for n in range(9)]
    assert comparison(facts) == [
        "steps: 9 on host-0, 6 on host-1, host-2, host-3, host-4, host-5 and 3 more"
    ]
    assert comparison([("a", {"x": "1"}), ("b", {})]) == ["x: 1 on a, nothing on b"]
    assert comparison(facts[1:]) == []
