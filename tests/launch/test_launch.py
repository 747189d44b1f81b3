"""Runs in processes: what they print, what they leave behind, how they fail."""

import json

import pytest

pytestmark = pytest.mark.distributed


def test_launch_trains_in_processes_and_says_little(finished_run):
    folder, done = finished_run
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 steps done; last loss ")
    assert str(folder) in done.stdout
    # Nothing but our own lines: no warning, no banner of a library.
    exports, first, *steps = done.stderr.splitlines()
    assert exports == "exports to: Hugging Face's GPT-2"
    assert first == f"new run: 4 steps, in {folder}"
    assert len(steps) == 4, done.stderr
    assert all(line.startswith("step ") for line in steps)
    assert {path.name for path in folder.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "environment.json", "tensorboard", "checkpoints"),
        ".lock",
    }
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 2
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_fails_is_one_line_without_torchruns_report(config, polyad):
    # A learning rate that makes the second step infinite: known only once it runs.
    done = polyad(
        *("launch", config, "--processes-per-node", 2, "optimizer.kind=sgd"),
        *("optimizer.learning_rate=1e6", "optimizer.clip_grad_norm=0", "train.steps=9"),
        *("train.max_skipped_steps=2", "checkpoint.every=0"),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("polyad: error: step ")
    known = ("exports to: ", "new run: ", "first step ", "step ")
    assert all(line.startswith(known) for line in lines[:-1]), done.stderr


@pytest.mark.slow
def test_torchrun_by_hand_lets_rank_zero_alone_explain(config, polyad):
    options = ["--nproc-per-node", 2, "-m", "polyad.launch", "train", config, "train.stps=3"]
    done = polyad("--standalone", *options, module="torch.distributed.run")
    assert done.returncode == 1  # torchrun's own
    errors = [line for line in done.stderr.splitlines() if line.startswith("polyad: error:")]
    assert len(errors) == 1
    assert "train.stps" in errors[0]
