"""Commands in processes of their own, as studies start them."""

import os
import signal
import sys

import pytest

from polyad.launch.processes import run_polyad
from polyad.parallel.checkpoint.manage import complete_checkpoints
from tests.helpers.started import start, steps, wait_for

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_command_that_starts_processes_itself_does_not_end_them(config):
    # Workers of torchrun are no children of this process, and are not to end because of that.
    assert run_polyad("launch", str(config), "--processes-per-node", "2") == 0
    assert (config.parent / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists()


@pytest.mark.parametrize("all_processes", [False, True])
def test_a_signal_is_handed_on_and_the_run_saved(config, all_processes):
    options = ["train.steps=100000", "checkpoint.every=0", "log.trackers=[]"]
    code = (
        "from polyad.launch.processes import run_polyad\n"
        f"print(run_polyad('train', {str(config)!r}, *{options}))"
    )
    parent = start([sys.executable, "-c", code], start_new_session=True)
    run = config.parent / "run"
    wait_for(lambda: steps(run), parent)
    send = os.killpg if all_processes else os.kill
    send(parent.pid, signal.SIGTERM)
    out, err = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (0, "143\n"), err
    (newest,) = complete_checkpoints(run / "checkpoints")
    assert newest.name == f"step-{steps(run)[-1]:08d}"
    assert "stopped by" not in err  # the command that was started says so
