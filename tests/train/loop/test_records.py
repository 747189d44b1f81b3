"""Reading of records, and what they come to, by hand."""

import json
from typing import Any

import pytest

from polyad.launch.commands import runs
from polyad.train.errors import ConfigError
from polyad.train.loop.metrics import (
    drop_records_after,
    last_fluctuation,
    last_loss,
    last_routing,
    median_rate,
    peak_memory,
    read_records,
)

GOOD = [
    {"step": step, "loss": 1.0 / step, "routing/load": [0.5, None], "spike": {"a": "b"}}
    for step in (1, 2, 3)
]
OTHERS = [
    b'{"step": 3, "lo', b"[1, 2]", b"3", b"", b"\xff\xfe", b'{"step": "2", "loss": 1.0}',
    b'{"step": true, "loss": 1.0}', b'{"step": -1, "loss": 1.0}', b'{"loss": 1.0}',
]  # fmt: skip


@pytest.mark.parametrize("last", [True, False])
def test_a_line_that_is_no_record_is_left_out_by_every_reader(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    for other in OTHERS:
        lines = [json.dumps(record).encode() for record in GOOD]
        lines.insert(3 if last else 1, other)
        path.write_bytes(b"\n".join(lines) + (b"" if last else b"\n"))
        assert read_records(tmp_path) == GOOD, other
        assert runs.last_loss(path) == "last loss 0.3333; "
        drop_records_after(path, 2)
        assert [json.loads(line) for line in path.read_text().splitlines()] == GOOD[:2]
    path.write_bytes(OTHERS[0])
    with pytest.raises(ConfigError, match="contains no record of a step yet"):
        read_records(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        read_records(tmp_path)


def record(step: int, **more: Any) -> dict[str, Any]:
    values = {"step": step, "loss": float(step), "tokens_per_second": 100.0, "memory_bytes": step}
    return values | {key.replace("__", "/"): value for key, value in more.items()}


def test_figures_of_the_end_are_means_of_the_last_ten_records() -> None:
    records = [record(step, routing__unused=step / 10) for step in range(1, 21)]
    records[-1]["loss"] = None  # a step that was skipped
    assert last_loss(records) == 15.0  # 11 to 19
    assert last_routing(records) == {"routing/unused": pytest.approx(1.55)}  # 1.1 to 2.0
    assert (median_rate(records), peak_memory(records)) == (100.0, 20)
    assert last_routing([record(1)]) == {}  # of a model that does not route


def test_fluctuation_is_that_between_the_last_two_checkpoints() -> None:
    first = record(40, fluctuation__seconds=0.1)
    later = {
        step: record(step, fluctuation__seconds=0.1, fluctuation__top1=top1, fluctuation__set=0.5)
        for step, top1 in ((80, 0.4), (100, 0.3))
    }
    plain = [record(step) for step in (41, 99)]
    found = last_fluctuation([first, plain[0], later[80], plain[1], later[100]])
    assert found == {"fluctuation/top1": 0.3, "fluctuation/set": 0.5}
    assert last_fluctuation([first, *plain]) == {}  # nothing before it


def test_shared_experts_are_of_the_mean_load_over_steps_that_tell_it() -> None:
    # Layer a: each step takes one expert, both steps half of each of two: 2. Layer b: all four: 4.
    a, b = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], [0.25] * 4
    first, last = (record(1, routing__a__load=load, routing__b__load=b) for load in a)
    last["routing/effective_experts"] = 1.25  # what a token uses, another measure
    found = last_routing([first, record(2), last])  # the second had no line
    assert found == {
        "routing/shared_experts": pytest.approx(3.0), "routing/effective_experts": 1.25,
    }  # fmt: skip
