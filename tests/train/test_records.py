"""Which lines of metrics.jsonl are records: to every reader the same."""

import json

import pytest

from polyad.launch.tables import _last_loss
from polyad.train.errors import ConfigError
from polyad.train.experts.report.history import read_history
from polyad.train.loop.metrics import drop_records_after
from polyad.train.records import read_records

GOOD = [
    {"step": step, "loss": 1.0 / step, "routing/load": [0.5, None], "spike": {"a": "b"}}
    for step in (1, 2, 3)
]
OTHERS = [
    b'{"step": 3, "lo',
    b"[1, 2]",
    b"3",
    b"",
    b"\xff\xfe",
    b'{"step": "2", "loss": 1.0}',
    b'{"step": true, "loss": 1.0}',
    b'{"step": -1, "loss": 1.0}',
    b'{"loss": 1.0}',
    b'{"step": 3, "loss": "x"}',
    b'{"step": 3, "loss": [1.0]}',
    b'{"step": 3, "loss": 1e999}',
    b'{"step": 3, "loss": 1.7e308}',
    b'{"step": 3, "loss": true}',
    b'{"step": 3, "loss": 1.0, "tokens": "many"}',
    b'{"step": 3, "loss": 1.0, "tokens": {"a": 1}}',
    b'{"step": 3, "loss": 1.0, "routing/a/load": ["x"]}',
    b'{"step": 3, "loss": 1.0, "grad_norm": [[1]]}',
    b'{"step": 3, "loss": ' + b"9" * 400 + b"}",
    b'{"step": 3, "loss": ' + b"9" * 5000 + b"}",
    b'{"step": ' + b"9" * 30 + b', "loss": 1.0}',
    b'{"step": 3, "x": ' + b"[" * 100_000 + b"}",
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda line: line[:24].decode(errors="replace"))
@pytest.mark.parametrize("last", [True, False])
def test_a_line_that_is_no_record_is_left_out_by_every_reader(tmp_path, capfd, other, last):
    lines = [json.dumps(record).encode() for record in GOOD]
    lines.insert(3 if last else 1, other)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"" if last else b"\n"))
    assert read_records(tmp_path) == GOOD
    history = read_history(tmp_path)
    assert history.scalars["loss"] == [1.0, 0.5, 1 / 3]
    assert history.unreadable == bool(other)
    assert _last_loss(path) == "last loss 0.3333; "
    drop_records_after(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == GOOD[:2]
    warned = "1 lines before the last held no record of a step" in capfd.readouterr().err
    assert warned == (not last)


def test_records_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        read_records(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(ConfigError, match="holds no record of a step yet"):
        read_records(tmp_path)
