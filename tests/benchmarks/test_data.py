import json

import pytest

from tests.benchmarks import data
from tests.benchmarks.data import bench_data, data_table
from tests.benchmarks.script import run
from tests.helpers.runs import write_config


@pytest.mark.slow
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
    assert result["training"] is None
    assert "the goal is at least 0.9" in data_table(result)


@pytest.mark.slow
def test_what_training_takes_is_measured_in_the_same_run(texts, tmp_path, monkeypatch):
    counted = []

    def make_step(name, config, precision, **options):
        step = real(name, config, precision, **options)
        counted.append([name, config.num_layers, config.vocab_size, precision, options])

        def counting():
            counted.append("step")
            step()

        return counting

    real = data.make_step
    monkeypatch.setattr(data, "make_step", make_step)
    result = data.bench_data_of(
        write_config(tmp_path / "config.yaml", tmp_path, model__vocab_size=500),
        ("train.precision=bf16", "train.global_batch_size=12", "train.micro_batch_size=3"),
        source=str(texts),
        tokenizer="train:400",
        megabytes=0.05,
        repeats=1,
    )
    options = {"device": "cpu", "batch_size": 3, "sequence_length": 32, "compiled": False}
    assert counted == [["polyad", 2, 500, "bf16", options], *["step"] * 4]
    training, loader = result["training"], result["loader"]
    assert training["tokens_per_second"] == pytest.approx(96 / training["seconds"])
    assert loader["consumption"] == training["tokens_per_second"]
    assert loader["ratio"] == pytest.approx(loader["tokens_per_second"] / loader["consumption"])
    assert loader["reached"] == (loader["ratio"] >= 50)
    assert (loader["micro_batch_size"], loader["sequence_length"]) == (3, 32)
    assert "2 layers of width 32, 3 x 32 in bf16 on cpu, measured now" in data_table(result)


def test_command_writes_json_alone(texts, capfd, tmp_path):
    config = write_config(tmp_path / "config.yaml", tmp_path)
    arguments = ["--source", str(texts), "--megabytes", "0.05", "--repeats", "1"]
    arguments += ["--tokenizer", "train:300", "--json", "-", "--config", str(config)]
    assert run(data.data, [*arguments, "model.vocab_size=400"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["encoding"]["goal"] == 0.9
    assert result["training"]["model"]["vocab_size"] == 400


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--megabytes", "0"], "--megabytes: 0.0"),
        (["--consumption", "-1"], "--consumption: -1.0"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["train.steps=3"], "train.steps=3: a key of a configuration, which --config names"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_timed(options, words, capfd):
    assert run(data.data, options) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert words in line
