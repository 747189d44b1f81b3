"""`polyad doctor` in real processes."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from polyad.launch.cli import run
from polyad.launch.doctor import Link, findings, rounds
from tests.helpers.hosts import several_hosts

TWO = ("--processes-per-node", 2)

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_two_processes_are_looked_at_and_measured(config, polyad):
    done = polyad("doctor", config, *TWO, "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["errors"] == []
    assert result["processes"] == 2
    (link,) = result["links"]
    assert link[:2] == [0, 1]
    assert link[2] > 1e6
    first, second = result["ranks"]
    assert first["agreed"] == second["agreed"]
    assert first["agreed"]["data.path (train)"].startswith("contents ")
    assert first["folder"]["seen"] is second["folder"]["seen"] is True
    # Nothing is left behind, and the run's folder was not made.
    assert not (config.parent / "run").exists()
    assert not list(config.parent.glob(".polyad-*"))


@pytest.mark.slow
def test_data_that_is_not_there_ends_it_with_status_1(config, polyad):
    done = polyad("doctor", config, *TWO, "data.path=nowhere")
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("polyad: error: a run would fail or be slow here: ")
    assert "nowhere" in last
    assert "Traceback" not in done.stderr
    assert any(line.startswith("error: ") for line in done.stdout.splitlines())


def test_a_batch_job_of_it_does_not_overwrite_that_of_the_run(config, capfd):
    arguments = ["--via", "slurm", "--nodes", "2", "--dry-run", "train.global_batch_size=4"]
    assert run(["doctor", str(config), *arguments]) == 0
    script = config.parent / "run" / "launch" / "doctor.sh"
    assert str(script) in capfd.readouterr().out
    assert f"--max-restarts 0 -m polyad.launch doctor {config}" in script.read_text()


@pytest.mark.slow
def test_hosts_are_looked_at_and_a_slow_link_is_named(config):
    found = config.parent / "found.json"
    with several_hosts(3, net=79) as hosts:
        hosts[2].limit(50)
        words = ("--json", str(found), "train.global_batch_size=6")
        agents = [host.start("doctor", config, hosts, *words) for host in hosts]
        assert [agent.wait(120) for agent in agents] == [0, 0, 0]
    result = json.loads(found.read_text())
    assert len({each["host"] for each in result["ranks"]}) == 3
    speeds = {tuple(link[:2]): link[2] for link in result["links"]}
    assert speeds.keys() == {(0, 1), (0, 2), (1, 2)}
    assert max(speeds[0, 2], speeds[1, 2]) < 20e6 < speeds[0, 1]
    (slow,) = [text for text in result["warnings"] if text.startswith("every link of ")]
    assert "(node 2) is slow" in slow


Facts = list[dict[str, Any]]


def facts() -> Facts:
    """Two hosts of two processes with nothing wrong."""
    agreed = {"the version of torch": "2.13", "Polyad's commit": "aa", "train_steps": "6"}
    return [
        {
            **{"host": f"node-{host}", "local_rank": local, "device": "NVIDIA A100"},
            **{"agreed": agreed | {"data_path (train)": "contents ff"}, "data_error": None},
            "folder": {"seen": True, "seconds": 0.0},
        }
        for host in (1, 2)
        for local in (0, 1)
    ]


def change(path: str, value: Any, *ranks: int) -> Callable[[Facts], None]:
    def changed(found: Facts) -> None:
        for rank in ranks:
            *keys, last = path.split(".")
            place = found[rank]
            for key in keys:
                place = place[key]
            place[last] = value

    return changed


def test_nothing_is_wrong_with_hosts_that_are_alike():
    assert list(findings(facts(), [Link(0, 2, 2e10)])) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "breaks", "words"),
    [
        (
            change("agreed.the version of torch", "2.11", 2, 3),
            True,
            ["the version of torch: 2.13 on node-1, 2.11 on node-2"],
        ),
        (change("agreed.train_steps", "9", 1), True, ["train_steps: 6 on ", "9 on node-1"]),
        (change("device", "NVIDIA V100", 2, 3), False, ["the device", "V100 on node-2"]),
        (change("data_error", "data.path: d: is damaged", 2), True, ["node-2: data.path: d"]),
        (
            change("folder", {"error": "run.folder: d: cannot be written to"}, 0, 1, 2, 3),
            True,
            ["run.folder: d: cannot be written to"],
        ),
        (change("folder", {"seen": False}, 2, 3), True, ["run.folder: node-2 cannot see"]),
    ],
)
def test_a_fault_is_named_with_its_host(fault, breaks, words):
    found = copy.deepcopy(facts())
    fault(found)
    (finding,) = findings(found, [Link(0, 2, 2e10)])  # type: ignore[arg-type]
    assert finding.breaks is breaks
    assert all(word in finding.text for word in words), finding.text


def test_slow_links_are_named():
    found: Any = [*facts(), facts()[2] | {"host": "node-3"}]
    links = [Link(0, 2, 2e10), Link(0, 4, 2e10), Link(2, 4, 2e9)]
    (slow,) = findings(found, links)
    assert slow.text == "the link between node-2 and node-3 is slow: 2 GB/s, others 20 GB/s"
    links[0] = Link(0, 2, 3e9)
    (slow,) = findings(found, links)
    assert slow.text == "every link of node-2 is slow: 3 GB/s, others 20 GB/s"


@pytest.mark.parametrize("members", [2, 3, 8, 9, 64])
def test_each_meets_each_other_once_and_one_at_a_time(members):
    played = list(rounds(range(10, 10 + members)))
    assert len(played) == members - 1 + members % 2
    pairs = [frozenset(pair) for one in played for pair in one]
    assert len(set(pairs)) == len(pairs) == members * (members - 1) // 2
    for one in played:
        busy = [rank for pair in one for rank in pair]
        assert len(set(busy)) == len(busy)
