import json

import pytest

from launch.bench.data import bench_data, data_table
from launch.cli import run


def test_both_ways_are_timed(texts):
    result = bench_data(
        source=str(texts),
        tokenizer="train:400",
        megabytes=0.1,
        repeats=1,
        sequence_length=64,
        consumption=100.0,
    )
    encoding, loader = result["encoding"], result["loader"]
    assert 100_000 <= result["bytes"] < 150_000
    for row in (encoding["polyad"], encoding["tokenizers"]):
        assert row["megabytes_per_second"] == pytest.approx(result["bytes"] / 1e6 / row["seconds"])
    expected = encoding["tokenizers"]["seconds"] / encoding["polyad"]["seconds"]
    assert encoding["ratio"] == pytest.approx(expected)
    assert encoding["reached"] == (expected >= 0.9)
    assert loader["ratio"] == pytest.approx(loader["tokens_per_second"] / 100)
    assert loader["reached"]
    assert "the goal is at least 0.9" in data_table(result)


def test_command_writes_json_alone(texts, capfd):
    arguments = ["bench", "data", "--source", str(texts), "--megabytes", "0.05", "--repeats", "1"]
    assert run([*arguments, "--tokenizer", "train:300", "--json", "-"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["encoding"]["goal"] == 0.9
    assert "ratio" not in result["loader"]


def test_unknown_bench_names_the_nearest(capfd):
    assert run(["bench", "dta"]) == 2
    assert "bench data" in capfd.readouterr().err
