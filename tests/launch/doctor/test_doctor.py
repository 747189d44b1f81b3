"""`polyad doctor` in real processes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyad.launch.cli import run
from tests.helpers.hosts import several_hosts
from tests.helpers.started import start
from tests.launch.test_cli import error_line

Polyad = Callable[..., subprocess.CompletedProcess[str]]
TWO = ("--processes-per-node", 2)

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_two_processes_are_looked_at_and_measured(config: Path, polyad: Polyad) -> None:
    done = polyad("doctor", config, *TWO, "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["errors"] == []
    assert (result["processes"], result["device"]) == (2, "cpu")
    about = result["measured"]
    (link,) = about["within"]
    assert link[:2] == [0, 1]
    assert min(link[2], about["all_reduce"], about["all_to_all"], *about["flops"]) > 1e6
    assert about["between"] == []
    assert max(map(abs, about["clocks"])) < 0.5
    first, second = result["ranks"]
    assert first["agreed"] == second["agreed"]
    assert first["agreed"]["data.path (train)"].startswith("contents ")
    assert first["folder"]["seen"] is second["folder"]["seen"] is True
    assert (first["folder"]["lock"], first["folder"]["renamed"]) == ("taken", True)
    # Nothing is left behind, and the run's folder was not made.
    assert not (config.parent / "run").exists()
    assert not list(config.parent.glob(".polyad-*"))


@pytest.mark.slow
def test_data_that_is_not_there_ends_it_with_status_1(config: Path, polyad: Polyad) -> None:
    done = polyad("doctor", config, *TWO, "data.path=nowhere")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("polyad: error: a run would fail or be slow here: ")
    assert "nowhere" in last
    assert "Traceback" not in done.stderr
    assert any(line.startswith("error: ") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--via", "slurm"], ["CONFIG: is missing", "--via slurm"]),
        (["none.yaml"], ["none.yaml: there is no such file"]),
        (
            ["--via", "torchrun", "--nodes", "2", "--min-nodes", "5", "--rdzv-endpoint", "a:1"],
            ["--min-nodes: 5 is not allowed", "the number of hosts, 2"],
        ),
    ],
)
def test_what_it_cannot_look_at_is_one_line(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 2
    line = error_line(capfd.readouterr().err)
    assert all(word in line for word in words), line


def test_a_batch_job_of_it_does_not_overwrite_that_of_the_run(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--via", "slurm", "--nodes", "2", "--dry-run", "train.global_batch_size=4"]
    assert run(["doctor", str(config), *arguments]) == 0
    script = config.parent / "run" / "launch" / "doctor.sh"
    assert str(script) in capfd.readouterr().out
    assert f"--max-restarts 0 -m polyad.launch doctor {config}" in script.read_text()


@pytest.mark.slow
def test_hosts_are_looked_at_and_a_slow_link_is_named(config: Path) -> None:
    found = config.parent / "found.json"
    with several_hosts(3, net=79) as hosts:
        hosts[2].limit(50)
        agents = [
            start([
                *(*host.inside, sys.executable, "-m", "polyad.launch", "doctor", str(config)),
                *("--via", "torchrun", "--nodes", "3", "--processes-per-node", "1"),
                *("--rdzv-endpoint", f"{hosts[0].address}:29700", "--interface", "eth0"),
                *("--rdzv-is-host", str(host is hosts[0]).lower(), "--local-addr", host.address),
                *("--json", str(found), "train.global_batch_size=6"),
            ])
            for host in hosts
        ]  # fmt: skip
        assert [agent.wait(120) for agent in agents] == [0, 0, 0]
    result = json.loads(found.read_text())
    assert len({each["host"] for each in result["ranks"]}) == 3
    speeds = {tuple(link[:2]): link[2] for link in result["measured"]["between"]}
    assert speeds.keys() == {(0, 1), (0, 2), (1, 2)}
    assert max(speeds[0, 2], speeds[1, 2]) < 20e6 < speeds[0, 1]
    (slow,) = [text for text in result["warnings"] if text.startswith("every link of ")]
    assert "(node 2) is slow" in slow
