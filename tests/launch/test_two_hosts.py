"""A run over two hosts, each with a torchrun agent of its own, one of which loses its worker."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import Host, several_hosts
from tests.helpers.started import losses, wait_for, write_run

Polyad = Callable[..., subprocess.CompletedProcess[str]]
STEPS, EVERY = 300, 50

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def hosts():
    with several_hosts(2) as made:
        yield made


@contextmanager
def agents_on(
    hosts: Sequence[Host],
    config: Path,
    *more: str,
    last: Sequence[str] = (),
    least: int | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the command on all hosts, the last one with more words; ends what still runs."""
    words = [more] * (len(hosts) - 1) + [(*more, *last)]
    agents = [
        host.start("train", config, hosts, *each, least=least)
        for host, each in zip(hosts, words, strict=True)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                for worker in psutil.Process(agent.pid).children(recursive=True):
                    worker.kill()  # which it would leave behind
                agent.kill()
                agent.wait()


@pytest.fixture
def configs(tmp_path, data):
    """Those of a run that is disturbed, and of one on one host that is not."""
    return [write_run(tmp_path / name, data, STEPS, EVERY) for name in ("two", "one")]


def losses_of_one_host(polyad: Polyad, config: Path) -> dict[int, float]:
    done = polyad("launch", config, "--processes-per-node", 2)
    assert done.returncode == 0, done.stderr
    return losses(config.parent / "run")


def test_a_run_over_two_hosts_survives_the_death_of_one_worker(hosts, configs, polyad):
    run = configs[0].parent / "run"
    manifest = run / "checkpoints" / f"step-{EVERY:08d}" / "manifest.json"
    with agents_on(hosts, configs[0]) as agents:
        wait_for(manifest.exists, *agents)
        saved = manifest.stat().st_mtime_ns
        (worker,) = psutil.Process(agents[1].pid).children()
        worker.send_signal(signal.SIGKILL)
        assert (run / "metrics.jsonl").read_text().count("\n") < STEPS
        ends = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ends
    assert f"{STEPS} steps done" in "".join(out for out, _ in ends)
    assert manifest.stat().st_mtime_ns == saved  # it went on from there, not from the start
    uninterrupted = losses_of_one_host(polyad, configs[1])
    assert sorted(uninterrupted) == list(range(1, STEPS + 1))
    assert losses(run) == uninterrupted  # bitwise, every step


def test_a_run_goes_on_with_the_hosts_that_are_left(hosts, configs, polyad):
    run = configs[0].parent / "run"
    manifest = run / "checkpoints" / f"step-{EVERY:08d}" / "manifest.json"
    with agents_on(hosts, configs[0], least=1) as agents:
        wait_for(manifest.exists, *agents)
        hosts[1].kill()
        out, said = agents[0].communicate(timeout=240)
    assert agents[0].returncode == 0, said
    assert f"{STEPS} steps done" in out
    there, expected = losses(run), losses_of_one_host(polyad, configs[1])
    assert sorted(there) == list(range(1, STEPS + 1))
    assert there[EVERY] == expected[EVERY]
    # The same batches; dropout depends on the number of processes.
    assert there[STEPS] == pytest.approx(expected[STEPS], rel=0.02)


def test_a_host_that_would_do_something_else_ends_all_at_once(hosts, configs):
    """The second host's key is another: one line on each, and no start again."""
    begun = time.monotonic()
    with agents_on(hosts, configs[0], last=["train.steps=9"]) as agents:
        ends = [agent.communicate(timeout=240)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [2, 2], ends
    assert time.monotonic() - begun < 90  # torchrun itself waits for 600 seconds
    for said, rank in zip(ends, ("", "rank 1: "), strict=True):
        (line,) = [line for line in said.splitlines() if line.startswith("polyad: error: ")]
        assert line.startswith(f"polyad: error: {rank}train.steps: {STEPS} on ")


def test_two_hosts_connect_on_the_interface_that_was_named(hosts, configs):
    code = (
        "import psutil\nfor each in psutil.net_connections('inet'):\n"
        "    if each.status == 'LISTEN': print(each.laddr.ip)"
    )
    with agents_on(hosts, configs[0], "train.steps=100000") as agents:
        wait_for((configs[0].parent / "run" / "metrics.jsonl").exists, *agents)
        for host in hosts:
            command = [*host.inside, sys.executable, "-c", code]
            found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert set(found.split()) - {"0.0.0.0", "::"} == {host.address}
