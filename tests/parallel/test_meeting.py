"""Processes meet before their first collective: who differs, who does not come, what listens."""

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import torch

from polyad.parallel import comm
from polyad.parallel.comm import STORE, comparison
from tests.helpers.everyday import everyday
from tests.helpers.forking import ForkedRun, free_port

pytestmark = pytest.mark.distributed


def join(log: Path, environment: dict[str, str], seed: int, minutes: float) -> None:
    """Joins the other processes, adds up over them, and ends with the status of what went wrong.

    Args:
        log: is written.
        environment: variables that say who it is and where they meet.
        seed: on which all have to agree.
        minutes: to wait.
    """
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ |= environment
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # never runs while torch waits
    print("begins", flush=True)
    status = 0
    try:
        comm.initialize(minutes, facts={"seed": str(seed)})
        print(comm.sum_over_ranks(torch.ones(1)).item(), flush=True)
        comm.shutdown()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        status = getattr(error, "exit_status", 70)
    os._exit(status)


@pytest.fixture
def start(forks, tmp_path):
    """Starts a process that joins the others; it writes a file of its own."""
    started = []

    def call(environment, rank, seed=1, size=2, minutes=1.0):
        log = tmp_path / f"log-{rank}"
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        variables = {name: str(value) for name, value in names.items()} | dict(environment)
        pid = forks.ask("call", join, (log, variables, seed, minutes))
        started.append(ForkedRun(forks, [pid], [log]))
        return started[-1]

    yield call
    for each in started:
        each.kill()


@pytest.fixture
def place(store, tmp_path):
    """Where processes meet, as variables: a port of rank 0, of one host or of several, or a file
    of the host."""
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if store == "file":
        there[STORE] = str(tmp_path / "store")
    if store == "one host":
        there["LOCAL_WORLD_SIZE"] = "2"
    return there


def ends(processes: list[ForkedRun]) -> list[tuple[int, str]]:
    """The status and the last line of each; before it stands what torch says of sockets."""
    results = []
    for each in processes:
        (status,) = each.wait(timeout=120)
        assert "Traceback" not in each.text(), each.text()
        results.append((status, each.text().splitlines()[-1]))
    return results


@everyday("store", ["one host", "hosts", "file"], keep=["one host"])
def test_processes_that_agree_go_on(place, start):
    assert ends([start(place, rank) for rank in range(2)]) == [(0, "2.0"), (0, "2.0")]


@everyday("store", ["hosts", "file"], keep=["file"])
def test_processes_that_do_not_agree_all_refuse(place, start):
    seeds = (1, 1, 2)
    results = ends([start(place, rank, seed, 3) for rank, seed in enumerate(seeds)])
    host = socket.gethostname()
    values = f"1 on {host} (rank 0), {host} (rank 1), 2 on {host} (rank 2); "
    assert [status for status, _ in results] == [2, 2, 2]
    line = f"DisagreementError seed: {values}"
    assert all(text.startswith(line) for _, text in results), results


@everyday("store", ["one host", "hosts", "file"], keep=["hosts"])
@everyday("rank", [0, 1], keep=[0])
def test_a_process_that_waits_in_vain_ends_with_one_line(rank, place, start):
    ((status, text),) = ends([start(place, rank, minutes=0.02)])
    assert status == 1
    assert text.startswith(f"PeerError rank {rank} on {socket.gethostname()} did not find all 2 ")
    assert "0.02 min (parallel.timeout_minutes)" in text


@everyday("store", ["one host", "hosts", "file"], keep=["file"])
@everyday("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], keep=[signal.SIGTERM])
@everyday("rank", [0, 1], keep=[0])
def test_a_signal_ends_a_process_that_waits(rank, number, place, start):
    process = start(place, rank)
    process.until(lambda: process.text() == "begins\n")
    process.until(lambda: not catches(process, number))
    process.signal(number)
    assert process.wait(timeout=20) == [128 + number]


def catches(process: ForkedRun, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process.pids[0]}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> number - 1 & 1)


@everyday("store", ["one host", "hosts"], keep=["one host"])
def test_a_port_that_is_taken_is_one_line(place, start):
    with socket.create_server(("127.0.0.1", int(place["MASTER_PORT"]))):
        ((status, text),) = ends([start(place, 0)])
    assert status == 1
    assert f"127.0.0.1:{place['MASTER_PORT']}" in text
    assert "in use" in text


def test_the_store_of_one_host_listens_on_loopback(start):
    place = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    process = start(place | {"LOCAL_WORLD_SIZE": "2"}, 0)

    def listening() -> set[str]:
        links = psutil.Process(process.pids[0]).net_connections("inet")
        return {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}

    process.until(lambda: bool(listening()))
    assert listening() == {"127.0.0.1"}


def test_what_differs_is_a_line_for_each_name():
    facts = [(f"host-{n}", {"steps": "6" if n else "9", "seed": "1"}) for n in range(9)]
    assert comparison(facts) == [
        "steps: 9 on host-0, 6 on host-1, host-2, host-3, host-4, host-5 and 3 more"
    ]
    assert comparison([("a", {"x": "1"}), ("b", {})]) == ["x: 1 on a, nothing on b"]
    assert comparison(facts[1:]) == []
