"""The schedule of faults and its report; a short run over hosts that survives some of them."""

import json
from pathlib import Path

import pytest

from polyad.launch.command import UsageError
from polyad.train.results import json_value
from tests.helpers.faults import KINDS, schedule
from tests.reliability.bad_half_hour import Outcome, Report, bad_half_hour, rehearse, theatre

pytestmark = pytest.mark.distributed

STEPS = range(51, 950)


def test_a_schedule_comes_of_its_seed() -> None:
    one, same, other = (schedule(seed, 30, STEPS, hosts=4, workers=2) for seed in (1, 1, 2))
    assert one == same != other
    assert {fault.host for fault in one} == set(range(4))
    assert {fault.worker for fault in one} == {0, 1}


@pytest.mark.parametrize("count", [len(KINDS), 2 * len(KINDS)])
def test_every_kind_comes_before_one_comes_again(count: int) -> None:
    faults = schedule(3, count, STEPS, hosts=4, workers=1)
    for first in range(0, count, len(KINDS)):
        assert {fault.kind for fault in faults[first : first + len(KINDS)]} == set(KINDS)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert all(step in STEPS for step in steps)
    # Each has a part of the run of its own.
    assert [(step - 51) * count // len(STEPS) for step in steps] == list(range(count))
    for fault in faults:
        assert KINDS[fault.kind].least <= fault.seconds <= KINDS[fault.kind].most


def test_a_run_with_fewer_steps_than_faults_has_one_at_each() -> None:
    faults = schedule(3, 30, range(5, 9), hosts=1, workers=1, kinds=["worker killed"])
    assert [(fault.step, fault.kind) for fault in faults] == [
        (step, "worker killed") for step in range(5, 9)
    ]


def report(**changes: object) -> Report:
    faults = [
        Outcome(step=60, kind="a", what="x", detected=0.25, recovered=10.0, repeated=10),
        Outcome(step=90, kind="b", what="x", recovered=4.0),
        Outcome(step=95, kind="a", what="y", detected=0.75, recovered=30.0, repeated=45),
    ]
    numbers = {"seed": 7, "hosts": 4, "processes": 8, "steps": 100, "quiet_seconds": 30.0}
    return Report(**numbers | {"seconds": 120.0, "ended": True, "faults": faults} | changes)  # type: ignore[arg-type]


def test_a_report_counts_by_kind() -> None:
    found = report()
    lines = [line.split("  ") for line in found.text().splitlines()]
    cells = {line[0]: [each.strip() for each in line[1:] if each.strip()] for line in lines}
    assert cells["a"] == ["2", "2", "0.5 (at most 0.8)", "20.0 (at most 30.0)", "55"]
    assert cells["b"] == ["1", "1", "-", "4.0 (at most 4.0)", "0"]
    assert cells["all"][:2] == ["3", "3"]
    # 30 s of 120 would have been enough.
    assert "time: 2:00, of a quiet run 0:30: 75% lost; 55 steps were done again" in found.text()
    assert "losses of all 100 steps are those of the quiet run, bitwise" in found.text()
    assert found.good
    values = json.loads(json.dumps(json_value(found)))
    assert (values["survived"], values["repeated"], values["lost"]) == (3, 55, 0.75)
    assert values["faults"][1]["detected"] is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"different": [4, 5]}, "losses of 2 steps are not those of the quiet run, or are missing"),
        ({"ended": False}, "ended by itself at its last step: no"),
        ({"by_hand": ["status 2: x"]}, "started by hand: status 2: x"),
        ({"by_hand": ["status 2: x"]}, "ended by itself at its last step: no"),
    ],
    ids=["losses", "end", "hand", "by itself"],
)
def test_a_report_says_what_went_wrong(changes: dict[str, object], line: str) -> None:
    found = report(**changes)
    assert not found.good
    assert line in found.text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes: '0' is not a number of minutes"),
        (["--only", "flood"], "--only: 'flood' is not a kind of fault; there are worker killed, "),
        (["--processes", "6"], "--processes: 6 is not allowed; 4 or 8"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bad_half_hour(words)


@pytest.mark.slow
def test_a_short_run_survives_what_happens_to_it(tmp_path: Path) -> None:
    kinds = ["agent killed", "link down", "checkpoint damaged"]  # the last one kills a worker
    with theatre(2, 2, tmp_path / "all") as place:
        found = rehearse(place, seed=2, minutes=1, steps=200, count=3, kinds=kinds)
    said = found.text()
    assert found.ended, said
    assert found.by_hand == [], said
    assert {each.kind for each in found.faults} == set(kinds), said
    assert all(each.survived for each in found.faults), said
    assert found.different == [], said
