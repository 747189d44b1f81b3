"""What a run reports: rates, lines, and records that survive a crash."""

import math

import torch

from polyad.train.loop.metrics import (
    METRICS_FILE,
    LogConfig,
    Metrics,
    console_line,
    peak_flops,
    records_of,
)
from polyad.train.tasks.task import Unit

TOKEN = Unit("token", "tok")
RECORD = {
    "step": 5, "loss": 3.25, "grad_norm": 0.5, "learning_rate": 6e-4, "tokens_per_second": 1234.5,
    "memory_bytes": 2**30, "mfu": 0.125, "skipped": False, "skipped_steps": 0,
}  # fmt: skip


def test_a_line_has_progress_rate_and_time_left():
    line = console_line(RECORD | {"routing/load_max": 2.4}, 20, 75, TOKEN, "validation_loss")
    assert line.startswith("step  5/20 [####------------]  loss 3.2500")
    for part in ("1,234 tok/s", "mfu 12.5%", "1.00 GiB", "load 2.40x", "1:15 left"):
        assert part in line
    skipped = RECORD | {"skipped": True, "skipped_steps": 2, "mfu": None, "loss": math.nan}
    line = console_line(skipped, 20, math.nan, TOKEN, "validation_loss")
    assert "-:-- left" in line
    assert "SKIPPED (2 not finite so far)" in line
    assert "mfu" not in line


def metrics_of(folder, first, last, **log):
    words = {"unit": TOKEN, "validation_score": "validation_loss", "about": {}}
    return Metrics(folder, LogConfig(trackers=(), **log), first, last, **words)


def test_a_line_has_the_rate_since_the_one_before(tmp_path, capfd):
    metrics = metrics_of(tmp_path, 0, 4, every=2)
    for step, rate in enumerate((100.0, 300.0, 50.0, 50.0), start=1):
        metrics.write(RECORD | {"step": step, "tokens_per_second": rate})
    lines = capfd.readouterr().err.splitlines()
    assert ["150 tok/s" in lines[0], " 50 tok/s" in lines[1]] == [True, True]
    assert [each["tokens_per_second"] for each in records_of(tmp_path / METRICS_FILE)] == [
        100, 300, 50, 50,
    ]  # fmt: skip


def test_time_left_counts_this_processs_steps_alone(tmp_path, capfd, monkeypatch):
    now = iter([100.0, 110.0])
    monkeypatch.setattr("polyad.train.loop.metrics.time.monotonic", lambda: next(now))
    metrics = metrics_of(tmp_path, 10, 100)
    metrics.write(RECORD | {"step": 15})
    # 5 steps in 10 seconds after going on at 10: 2 seconds a step, 85 to go.
    assert "  2:50 left" in capfd.readouterr().err


def test_mfu_refers_to_the_named_device_or_number():
    assert peak_flops(LogConfig(device="a100"), "bf16") == 312e12
    assert peak_flops(LogConfig(device="a100"), "fp32") == 19.5e12
    assert peak_flops(LogConfig(peak_tflops=2.5), "fp32") == 2.5e12
    if not torch.cuda.is_available():
        assert peak_flops(LogConfig(), "bf16") is None
