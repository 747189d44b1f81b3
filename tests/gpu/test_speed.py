"""The script that measures a GPU's speed: its runs are valid, and all of it runs without one."""

import json
import subprocess
import sys

import pytest

from polyad.train.config.run import load_config
from tests.gpu.check import ROOT
from tests.gpu.speed import BASES, GROUPS, NEEDS_CUDA, STEPS, compared, keys_of, parts


@pytest.mark.parametrize("tiny", [False, True])
def test_runs_have_valid_keys_and_as_many_tokens_as_their_base(tmp_path, tiny):
    runs = {name: trial for trials in GROUPS.values() for name, trial in trials.items()}
    assert runs.keys() == BASES.keys()
    samples = {}
    for name, trial in runs.items():
        config = load_config(ROOT / trial.config, keys_of(name, trial, tmp_path, tiny))
        samples[name] = config.train.global_batch_size
        assert config.log.profile.first_step < config.train.steps <= STEPS
    different = {name for name, base in BASES.items() if samples[name] != samples[base]}
    assert different == (set() if tiny else {"gpt2-one", "smoe-one"})


def test_a_run_is_compared_by_its_rate_and_its_losses():
    base = {"tokens_per_second": 100.0, "losses": [3.0, 2.0, 1.0]}
    run = {"tokens_per_second": 125.0, "losses": [3.0, 2.5]}
    assert compared(run, base) == {"speed": 1.25, "losses": 0.5}


@pytest.mark.slow
@pytest.mark.distributed
def test_all_of_it_runs_where_there_is_no_gpu(tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "tests.gpu.speed", "--tiny", "--seconds", "1500"]
    words += ["--out", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert [*result] == ["visit", *(part.name for part in parts(tmp_path, True))]
    runs = {}
    for group in GROUPS:
        runs |= result[group]["runs"]
    assert {name for name, run in runs.items() if run == {"status": NEEDS_CUDA}} == {
        "gpt2-graphs",
        "gpt2-autotuned",
    }
    assert all(run["losses"] for run in runs.values() if "status" not in run)
    assert runs["gpt2-12"]["compared"]["losses"] == 0.0  # small ones have the same batches
    assert result["card"]["measured"]["card"] == NEEDS_CUDA
    for name, values in result.items():
        rows = values.get("measured", {})
        errors = {key: row for key, row in rows.items() if isinstance(row, str) and "Error" in row}
        assert not errors, name
