"""The start of a process, the duration of a step and its wait for data, by the clock."""

import json
import subprocess
import sys
import time

import pytest

from polyad.train.loop import timing
from polyad.train.loop.metrics import LogConfig, Metrics
from polyad.train.loop.timing import Startup, StepTimer, startup_line
from polyad.train.tasks.task import Unit
from tests.helpers.runs import records, run, run_with_slow_records, write_config


def test_a_step_ends_where_the_next_begins_and_scores_are_set_aside(monkeypatch):
    now = 100.0
    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    timer = StepTimer()
    now = 103.0
    assert timer.step() == 3.0
    now = 104.0
    with timer.aside():  # 1 second after the step, 5 seconds of scores, 2 seconds of step
        now = 109.0
    now = 111.0
    assert timer.step() == 3.0


@pytest.mark.distributed
def test_the_throughput_of_a_step_pays_for_the_record_before(workers, tmp_path, prepared_path):
    config = write_config(tmp_path / "config.yaml", prepared_path)
    workers(1).run(run_with_slow_records, config, 0.5, "train.steps=4")
    for line in records(tmp_path / "run")[2:]:  # a record is written while the next step runs
        assert line["step_seconds"] > 0.5
        assert line["tokens_per_second"] < 2 * 8 * 32  # tokens of a step in half a second


PARTS = ("imports", "data", "engine", "run_folder", "first_step")


@pytest.mark.slow
def test_the_age_of_a_process_is_what_its_parent_sees():
    code = (
        "import time; time.sleep(0.5)\n"
        "from polyad.train.loop.timing import process_seconds\n"
        "print(process_seconds(), flush=True); input()"
    )
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        age = float(child.stdout.readline())
        seen = time.monotonic() - started
        child.communicate("\n")
    assert 0.5 <= age <= seen + 0.02  # a tick is 10 ms


def test_parts_add_up_and_a_part_that_comes_again_goes_on(monkeypatch):
    now = iter([100.0, 103.0, 104.0, 106.5])
    monkeypatch.setattr("polyad.train.loop.timing.process_seconds", lambda: 2.0)
    monkeypatch.setattr("polyad.train.loop.timing.time.monotonic", lambda: next(now))
    startup = Startup()  # the process began at 98
    startup.lap("imports")
    startup.lap("data")
    startup.lap("imports")
    record = startup.record(0.25)
    assert record == {
        "startup_seconds": 8.75,
        "startup_imports_seconds": 7.5,
        "startup_data_seconds": 1.0,
        "startup_first_step_seconds": 0.25,
    }
    assert startup_line(record) == (
        "first step done 8.75 s after the process started: imports 7.50, data 1.00, first step 0.25"
    )


def test_the_first_record_of_a_process_has_it_and_the_console_says_it(tmp_path, capsys):
    startup = Startup()
    startup.lap("imports")
    metrics = Metrics(
        tmp_path,
        LogConfig(trackers=()),
        0,
        2,
        startup,
        unit=Unit("token", "tok"),
        validation_score="validation_loss",
    )
    record = {
        "loss": 3.0, "grad_norm": 0.5, "learning_rate": 6e-4, "tokens_per_second": 9.0,
        "memory_bytes": 2**30, "skipped": False, "skipped_steps": 0, "step_seconds": 0.5,
    }  # fmt: skip
    for step in (1, 2):
        metrics.write({"step": step} | record)
    metrics.close()
    first, second = records(tmp_path)
    assert first["startup_first_step_seconds"] == 0.5
    assert first["startup_seconds"] == pytest.approx(0.5 + first["startup_imports_seconds"])
    assert not any(key.startswith("startup") for key in second)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("first step done ")
    assert [line.split()[:2] for line in lines[1:]] == [["step", "1/2"], ["step", "2/2"]]


@pytest.mark.distributed
def test_a_run_says_it_at_each_start(workers, tmp_path, prepared_path):
    config = write_config(tmp_path / "config.yaml", prepared_path)
    workers(1).run(run, config, "train.steps=2")
    workers(1).run(run, config, "train.steps=4")
    lines = records(tmp_path / "run")
    assert ["startup_seconds" in line for line in lines] == [True, False, True, False]
    for line in (lines[0], lines[2]):
        parts = [line[f"startup_{part}_seconds"] for part in PARTS]
        assert line["startup_seconds"] == pytest.approx(sum(parts))
        assert line["startup_first_step_seconds"] == line["step_seconds"]


@pytest.mark.slow
def test_libraries_come_without_torch_s_compiler():
    code = (
        "import json, sys, torch\n"
        "from polyad.parallel.zero import import_libraries\n"
        "compiler = torch.compile\n"
        "import_libraries()\n"
        "assert torch.compile is compiler\n"
        "names = ['deepspeed.runtime.zero.muon.original_muon', 'torch._dynamo',\n"
        "         'megatron.core.datasets.indexed_dataset', 'torch._inductor.compile_fx']\n"
        "print(json.dumps([name in sys.modules for name in names]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, True, True, False]
