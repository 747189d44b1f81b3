"""What is wrong with hosts, from what their processes have seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from polyad.launch.doctor.findings import findings
from polyad.parallel.probe import Link, Measured, rounds

Facts = list[dict[str, Any]]


def facts() -> Facts:
    """Two hosts of two processes with nothing wrong."""
    device = {
        **{"cores": 64, "load": 1.0, "memory_bytes": 2**39, "memory_free_bytes": 2**38, "gpus": 2},
        **{"gpu": "NVIDIA A100", "gpu_memory_bytes": 80, "gpu_memory_free_bytes": 79},
        **{"throttled": 0, "ecc_errors": 0, "xid": []},
    }
    agreed = {
        **{"the version of torch": "2.13", "Polyad's code": "aa", "train_steps": "6"},
        "data_path (train)": "contents ff",
    }
    seen = {"seen": True, "seconds": 0.0, "renamed": True}
    return [
        {
            **{"host": f"node-{host}", "local_rank": local, "local_processes": 2},
            **{"agreed": dict(agreed), "data_error": None, "device": dict(device)},
            "folder": seen | {"lock": "held" if (host, local) != (1, 0) else "taken"},
        }
        for host in (1, 2)
        for local in (0, 1)
    ]


def measured() -> Measured:
    return Measured(
        **{"all_reduce": 1e9, "all_to_all": 1e9, "flops": [1e12] * 4, "clocks": [0.0] * 4},
        within=[Link(0, 1, 2e11), Link(2, 3, 2e11)],
        between=[Link(0, 2, 2e10)],
    )


def change(path: str, value: Any, *ranks: int) -> Callable[[Facts], None]:
    def changed(found: Facts) -> None:
        for rank in ranks:
            *keys, last = path.split(".")
            place = found[rank]
            for key in keys:
                place = place[key]
            place[last] = value

    return changed


def test_nothing_is_wrong_with_hosts_that_are_alike() -> None:
    assert findings(facts(), measured()) == []


@pytest.mark.parametrize(
    ("fault", "breaks", "words"),
    [
        (
            change("agreed.the version of torch", "2.11", 2, 3),
            True,
            ["the version of torch: 2.13 on node-1, 2.11 on node-2"],
        ),
        (change("agreed.Polyad's code", "bb", 3), True, ["Polyad's code: aa on ", "bb on node-2"]),
        (change("agreed.train_steps", "9", 1), True, ["train_steps: 6 on ", "9 on node-1"]),
        (change("device.gpu", "NVIDIA V100", 2, 3), False, ["kind of GPU", "V100 on node-2"]),
        (change("device.gpus", 1, 2, 3), True, ["node-2 has 1 GPU for 2 processes"]),
        (
            change("device.gpu_memory_free_bytes", 40, 3),
            False,
            ["node-2, GPU 1", "another program"],
        ),
        (change("device.throttled", 0x40, 1), False, ["node-1, GPU 1", "0x40"]),
        (change("device.ecc_errors", 3, 0), True, ["node-1, GPU 0: 3 uncorrected"]),
        (change("device.xid", ["NVRM: Xid (1): 79"], 0), False, ["node-1: NVRM: Xid"]),
        (change("data_error", "data.path: d: is damaged", 2), True, ["node-2: data.path: d"]),
        (
            change("agreed.data_path (train)", "contents gg", 2),
            True,
            ["data_path (train): contents ff on", "gg on node-2"],
        ),
        (
            change("folder", {"error": "run.folder: d: cannot be written to"}, 0, 1, 2, 3),
            True,
            ["run.folder: d: cannot be written to"],
        ),
        (change("folder", {"seen": False}, 2, 3), True, ["run.folder: node-2 cannot see"]),
        (change("folder.renamed", False, 2), True, ["renamed file is not visible on node-2"]),
        (change("folder.lock", "taken", 2), False, ["lock of node-1 has no effect on node-2"]),
    ],
)
def test_a_fault_is_named_with_its_host(
    fault: Callable[[Facts], None], breaks: bool, words: list[str]
) -> None:
    found = copy.deepcopy(facts())
    fault(found)
    (finding,) = findings(found, measured())
    assert finding.breaks is breaks
    assert all(word in finding.text for word in words), finding.text


def test_a_busy_host_without_gpus_is_named() -> None:
    found = facts()
    for each in found:
        each["device"] = {"cores": 64, "load": 1.0, "gpus": 0}
    found[2]["device"]["load"] = 40.0
    assert [each.text for each in findings(found, measured())] == [
        "node-2 is busy: a load of 40.0 on 64 cores"
    ]


def test_slow_links_devices_and_clocks_are_named() -> None:
    about = measured()
    about.flops[3], about.clocks[2] = 0.5e12, 7.5
    about.within[0] = Link(0, 1, 2e10)
    about.between = [Link(0, 2, 2e10), Link(0, 4, 2e10), Link(2, 4, 2e9)]
    found = [*facts(), facts()[2] | {"host": "node-3"}]
    about.flops.append(1e12)
    about.clocks.append(0.0)
    texts = [each.text for each in findings(found, about)]
    assert texts == [
        "clocks differ: node-2 is 7.5 s ahead of node-1",
        "node-2, process 1 computes at 0.5 TFLOP/s, others at 1",
        "the link between process 0 of node-1 and process 1 of node-1 is slow: 20 GB/s, others "
        "200 GB/s",
        "the link between node-2 and node-3 is slow: 2 GB/s, others 20 GB/s",
    ]
    about.between[0] = Link(0, 2, 3e9)
    assert [each.text for each in findings(found, about)][-1] == (
        "every link of node-2 is slow: 3 GB/s, others 20 GB/s"
    )


def test_what_breaks_a_run_comes_first() -> None:
    found = facts()
    change("device.throttled", 8, 0)(found)
    change("agreed.train_steps", "9", 1)(found)
    assert [each.breaks for each in findings(found, measured())] == [True, False]


@pytest.mark.parametrize("members", [2, 3, 8, 9, 64])
def test_each_meets_each_other_once_and_one_at_a_time(members: int) -> None:
    played = list(rounds(range(10, 10 + members)))
    assert len(played) == members - 1 + members % 2
    pairs = [frozenset(pair) for one in played for pair in one]
    assert len(set(pairs)) == len(pairs) == members * (members - 1) // 2
    for one in played:
        busy = [rank for pair in one for rank in pair]
        assert len(set(busy)) == len(busy)
