"""`polyad bench`: what a step of a configuration takes, on random samples."""

import json

import pytest

from polyad.launch.cli import run
from polyad.train import bench as measured
from tests.launch.test_cli import error_line

pytestmark = pytest.mark.distributed

GPT2 = "configs/gpt2/124m.yaml"
SMALL = (
    *("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *("model.sequence_length=16", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("model.compile=false", "train.precision=fp32"),
)
WORDS = "model.vocab_size=64"
"""Makes data unnecessary."""


@pytest.mark.slow
def test_a_step_is_timed_without_data(polyad, tmp_path):
    path = tmp_path / "bench.json"
    asked = ("--steps", 5, "log.peak_tflops=0.5", "--json", path)
    done = polyad("bench", GPT2, *SMALL, WORDS, *asked)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["seconds"] > 1e-3  # every step is a whole one
    assert result["units_per_second"] == pytest.approx(8 * 16 / result["seconds"])
    # 6 FLOPs a weight of 12 x 16^2 in the block and 64 x 16 in the head, and attention's two
    # products of 16 keys and 16 numbers: 6 x (3072 + 1024 + 2 x 256).
    assert result["mfu"] == pytest.approx(result["units_per_second"] * 6 * 4608 / 0.5e12)
    assert result["peak_memory_bytes"] > 1e8
    assert (result["unit"], result["steps"], result["processes"]) == ("token", 5, 1)
    lines = done.stdout.splitlines()
    assert "8 samples per step in micro-batches of 2" in lines[0]
    assert "tokens/s" in lines[2]
    assert lines[3].split()[:2] == ["eager", f"{result['seconds']:.4f}"]


@pytest.mark.slow
def test_a_table_counts_images(polyad):
    small = ("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2")
    small += ("model.feed_forward.placement=[1]", "model.num_classes=10")
    small += ("train.global_batch_size=4", "train.micro_batch_size=2")
    small += ("parallel.expert_parallel_size=1",)
    done = polyad("bench", "configs/quickstart/vmoe.yaml", *small, "--steps", 1)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("vmoe.yaml: ")
    assert "images/s" in lines[2]


@pytest.mark.slow
def test_forced_loads_of_two_processes_with_the_compiler(polyad, tmp_path):
    sparse = ("model.feed_forward.num_experts=4", "model.feed_forward.expert_hidden_size=16")
    sparse += ("parallel.expert_parallel_size=2",)
    asked = ("--steps", 1, "--forced-balance", "--processes", 2, "model.compile=true")
    asked += ("--json", tmp_path / "bench.json")
    done = polyad("bench", "configs/gpt2/124m-smoe-16.yaml", *SMALL, WORDS, *sparse, *asked)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["forced_balance"]
    assert (result["processes"], result["data_parallel_size"]) == (2, 2)
    assert "expert loads are forced to be equal" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:2] == ["compiled", f"{result['seconds']:.4f}"]


def test_memory_that_runs_out_says_what_to_lower(monkeypatch, capfd):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(measured, "random_steps", fail)
    assert run(["bench", GPT2, *SMALL, WORDS]) == 1
    assert "lower train.micro_batch_size" in error_line(capfd.readouterr().err)
