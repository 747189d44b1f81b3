"""Trackers: the same numbers under the same names in all, and none that ends a run."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyad.train.loop import metrics
from polyad.train.loop.metrics import LogConfig, Metrics
from polyad.train.tasks.task import Unit
from tests.helpers.runs import FEED_FORWARDS, in_tensorboard, records

RECORDS = [
    {"step": 1, "loss": 2.5, "grad_norm": math.nan, "routing/load": [0.25, 0.75]},
    {"step": 2, "loss": 2.0, "grad_norm": 0.5, "routing/load": [0.5, 0.5], "note": "text"},
]


LOAD = "routing/blocks.1.feed_forward/load"
HEADER, BLOCK = 7, 2**15
FULL, LAST = 1, 4


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of pieces, each with its length and kind."""
    whole, place = b"", 0
    while place + HEADER <= len(content):
        left = BLOCK - (place + HEADER) % BLOCK
        if left < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + HEADER])
        place += HEADER + size
        whole += content[place - size : place]
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def in_wandb(folder: Path) -> dict[str, dict[int, float]]:
    """Reads the file that an offline run leaves for `wandb sync`."""
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {}
    for data in log_records(path.read_bytes()[HEADER:]):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        assert row.get(f"{LOAD}/_type", "histogram") == "histogram"
        for name, value in row.items():
            if name.startswith(("loss", "routing/load_max", "validation")):
                found.setdefault(name, {})[row["_step"]] = value
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_all_have_the_same_numbers_of_a_run_under_the_same_names(run_of):
    pytest.importorskip("wandb", exc_type=ImportError)
    changes = {"model__feed_forward": FEED_FORWARDS["smoe"], "train__steps": 2}
    folder = run_of(2, log__trackers=["tensorboard", "wandb"], **changes)
    lines = records(folder)
    for found in (in_wandb(folder), in_tensorboard(folder)):
        for name in ("loss", "routing/load_max", "validation_loss"):
            expected = {line["step"]: line[name] for line in lines if name in line}
            assert found[name] == pytest.approx(expected, rel=1e-6)


class Failing:
    def __init__(self, name, folder, about):
        pass

    def log(self, step, numbers, lists):
        raise ConnectionError("no route to\nthe server")

    def close(self):
        raise AssertionError("it was left out")


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "Experiment", Failing)
    found = Metrics(
        tmp_path, LogConfig(trackers=("wandb", "tensorboard")), 0, 2,
        unit=Unit("token", "tok"), validation_score="validation_loss", about={},
    )  # fmt: skip
    for record in RECORDS:
        found._track(record)
    found.close()
    assert in_tensorboard(tmp_path) == {"loss": {1: 2.5, 2: 2.0}, "grad_norm": {2: 0.5}}
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.trackers: wandb failed" in line
    assert line.endswith("no route to the server")


def test_a_package_that_is_not_there_is_one_line_before_a_run(config, monkeypatch, refused):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    line = refused("train", config, "log.trackers=[wandb]")
    assert "log.trackers: wandb is not installed: pip install wandb" in line
