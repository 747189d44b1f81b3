"""Jobs of a real Slurm: from sbatch to a finished run, and back into the queue before the limit."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyad.parallel.checkpoint.manage import complete_checkpoints
from tests.helpers.hosts import several_hosts
from tests.helpers.slurm import Slurm, slurm
from tests.helpers.started import ROOT, losses, wait_for, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EARLY = ("--sbatch", "signal=B:USR1@30")
TWO = ("--nodes", "2", "--processes-per-node", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with several_hosts(2, net=80) as hosts:
        controller = f"{hosts[0].address.rpartition('.')[0]}.254"
        with slurm(hosts, controller, tmp_path_factory.mktemp("slurm")) as found:
            yield found


def submitted(cluster: Slurm, command: str, config: Path, *more: str) -> str:
    environment = cluster.environment | {"GLOO_SOCKET_IFNAME": "eth0"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "polyad.launch", command, str(config)),
            *("--via", "slurm", *TWO, *more),
        ],
        **{"cwd": ROOT, "env": environment, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    return re.search(r"Submitted batch job (\d+)", done.stdout)[1]  # type: ignore[index]


def output(config: Path, job: str) -> str:
    return (config.parent / "run" / "launch" / f"slurm-{job}.out").read_text()


def test_a_job_runs_to_its_end(cluster, data, tmp_path):
    config = write_run(tmp_path / "two", data, 6)
    job = submitted(cluster, "launch", config)
    found = cluster.wait(job, ("COMPLETED", "FAILED", "TIMEOUT"), 120)
    assert found["JobState"] == "COMPLETED", output(config, job)
    assert sorted(losses(config.parent / "run")) == list(range(1, 7))
    said = output(config, job)
    assert "6 steps done" in said
    assert "\x1b" not in said
    assert "\r" not in said
    environment = json.loads((config.parent / "run" / "environment.json").read_text())
    assert environment["world_size"] == 2


def test_a_job_goes_back_into_the_queue_before_its_limit_and_continues(cluster, data, tmp_path):
    config = write_run(tmp_path / "two", data, 1_000_000)
    job = submitted(cluster, "launch", config, "--sbatch", "time=1:35", *EARLY)
    cluster.wait(job, ("RUNNING",), 60)
    # Slurm rounds the limit up to two minutes, and sends the signal up to a minute early.
    said = functools.partial(output, config, job)
    wait_for(lambda: cluster.job(job)["Restarts"] != "0", said=said)
    assert f"job {job} goes back into the queue" in said()
    (saved,) = re.findall(
        r"stopped by SIGUSR1; run the same command again to continue from (\S+)", said()
    )
    step = int(Path(saved).name.removeprefix("step-"))
    assert complete_checkpoints(config.parent / "run" / "checkpoints")[-1].name == Path(saved).name
    assert max(losses(config.parent / "run")) == step
    cluster.wait(job, ("RUNNING",), 180)
    wait_for(lambda: max(losses(config.parent / "run")) > step + 20, said=said)
    assert sorted(losses(config.parent / "run")) == list(
        range(1, max(losses(config.parent / "run")) + 1)
    )
    cluster.ask("scancel", job)
    cluster.wait(job, ("CANCELLED",), 60)
    wait_for(lambda: "stopped by SIGTERM" in said(), said=said)
    newest = complete_checkpoints(config.parent / "run" / "checkpoints")[-1]
    assert int(newest.name.removeprefix("step-")) > step
    assert os.listdir(newest)
