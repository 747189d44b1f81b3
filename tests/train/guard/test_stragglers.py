"""Processes that all others wait for."""

import socket

import pytest

from polyad.parallel import comm, probe
from polyad.train.guard.stragglers import Stragglers
from tests.helpers.runs import records, write_config

MS = 1_000_000


def guard(every: int = 1) -> Stragglers:
    world = comm.World(0, 4, 0, probe.torch.device("cpu"))
    return Stragglers(every, ["node-1", "node-1", "node-2", "node-2"], world)


def test_the_slow_one_is_named_with_its_host_once():
    look = guard()
    record, lines = look.judge([10 * MS, 10 * MS, 11 * MS, 20 * MS], [0] * 4, 1.0)
    assert record == {"slowest_rank": 3, "slowdown": 2.0, "waiting_share": 0.5}
    assert lines == ["process 3 on node-2 takes 2.0 times as long as others, which wait for it"]
    assert look.judge([10 * MS] * 3 + [20 * MS], [0] * 4, 1.0)[1] == []  # it is known
    assert look.judge([10 * MS] * 4, [0] * 4, 1.0)[1] == []
    assert len(look.judge([10 * MS] * 3 + [20 * MS], [0] * 4, 1.0)[1]) == 1  # again


def test_two_slow_ones_of_four_are_both_named():
    _, lines = guard().judge([10 * MS, 16 * MS, 10 * MS, 14 * MS], [0] * 4, 1.0)
    assert [line.split(" takes")[0] for line in lines] == [
        "process 1 on node-1",
        "process 3 on node-2",
    ]


def test_one_that_waits_for_data_is_named():
    waits = [20 * MS, 0, 0, 350 * MS]
    _, lines = guard().judge([10 * MS] * 4, waits, 1.0)
    assert lines == [
        "process 3 on node-2 waits 0.35 s longer for data per step than others, which wait for it"
    ]
    assert guard().judge([10 * MS] * 4, waits, 10.0)[1] == []  # little, of a long step


def test_steps_between_looks_cost_and_say_nothing():
    look = guard(every=10)
    look.look(9)
    assert look.own(1.0) == (0, 0)
    assert look.judge([0] * 4, [0] * 4, 1.0) == ({}, [])
    look.look(10)
    product, wait = look.own(1.0)
    assert product > 0
    assert wait == 1_000_000_000
    off = guard(every=0)
    off.look(10)
    assert off.own(1.0) == (0, 0)


def larger_products(rank: int) -> None:
    if rank == 1:
        probe.MATRIX = dict(probe.MATRIX, cpu=1024)


@pytest.mark.distributed
def test_a_run_names_the_process_that_is_slow(forks, tmp_path, prepared_path):
    config = write_config(
        tmp_path / "config.yaml", prepared_path, train__steps=5, monitor__stragglers=2,
        evaluation__every=0,
    )  # fmt: skip
    process = forks.start(tmp_path, ["train", str(config)], before=larger_products)
    assert process.wait(120) == [0, 0], process.text()
    lines = [line for line in process.text().splitlines() if "which wait for it" in line]
    (line,) = [each for each in lines if "process 1" in each]
    assert f"polyad: warning: step 2: process 1 on {socket.gethostname()} takes" in line
    found = {line["step"]: line for line in records(tmp_path / "run")}
    assert [step for step, line in found.items() if "slowdown" in line] == [2, 4]
    assert found[2]["slowest_rank"] == 1
    assert found[2]["slowdown"] > 2  # eight times as many operations
