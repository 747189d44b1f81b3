"""A Slurm of several nodes on one machine: slurmctld, and a slurmd in each network namespace."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.hosts import Host
from tests.helpers.started import wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
CORES = 2


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs jobs."""

    configuration: Path

    @property
    def environment(self) -> dict[str, str]:
        """With which Slurm's commands find it."""
        return {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {
            "SLURM_CONF": str(self.configuration)
        }

    def ask(self, *words: str) -> str:
        """What one of its commands says."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What it knows of a job."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, states: Sequence[str], seconds: float) -> dict[str, str]:
        """Waits until a job is in one of some states."""
        until = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, job
            time.sleep(0.5)
        return job


@contextmanager
def slurm(hosts: Sequence[Host], controller: str, folder: Path) -> Iterator[Slurm]:
    """Starts the daemons; skips the test where they are not installed.

    Args:
        hosts: the nodes.
        controller: this machine's address for them.
        folder: for their files.
    """
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"needs Slurm and munge (Debian's slurm-wlm): there is no {missing[0]}")
    folder.chmod(0o755)
    key, door, configuration = folder / "key", folder / "munge.socket", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    configuration.write_text(_configuration(hosts, controller, folder, door))
    # A namespace has no mounted control groups; nothing here constrains a job by them.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for host in hosts:
        (folder / f"spool-{host.alias}").mkdir()
    cluster, running = Slurm(configuration), []
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={door}"]
    munge += [f"--{name}-file={folder / name}" for name in ("pid", "log", "seed")]
    daemons = [munge, ["slurmctld", "-D", "-f", str(configuration)]]
    daemons += [[*h.inside, "slurmd", "-D", "-N", h.alias, "-f", str(configuration)] for h in hosts]
    environment = cluster.environment | {"PATH": path}

    def logs() -> str:
        return "".join(path.read_text()[-1500:] for path in sorted(folder.glob("daemon-*.out")))

    try:
        for number, words in enumerate(daemons):
            with (folder / f"daemon-{number}.out").open("w") as said:
                running.append(subprocess.Popen(words, env=environment, stdout=said, stderr=said))
            wait_for(lambda number=number: number or door.exists(), seconds=60, said=logs)
        wait_for(lambda: _states(cluster) == f"idle {len(hosts)}", seconds=60, said=logs)
        yield cluster
    finally:
        subprocess.run(["scancel", "--state=RUNNING"], env=environment, capture_output=True)
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


def _configuration(hosts: Sequence[Host], controller: str, folder: Path, door: Path) -> str:
    values = {
        "ClusterName": "polyad",
        "SlurmctldHost": f"{socket.gethostname()}({controller})",
        "SlurmUser": "root",
        # A job that is queued again waits until what it was started with has expired.
        "AuthInfo": f"socket={door},cred_expire=10",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldPort": 16817,
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "ReturnToService": 2,
        "KillWait": 30,
        "MpiDefault": "none",
    }
    lines = [f"{name}={value}" for name, value in values.items()]
    lines += [
        f"NodeName={host.alias} NodeHostname={socket.gethostname()} NodeAddr={host.address} "
        f"Port={16900 + number} CPUs={CORES} State=UNKNOWN"
        for number, host in enumerate(hosts)
    ]
    names = ",".join(host.alias for host in hosts)
    return "\n".join([*lines, f"PartitionName=all Nodes={names} Default=YES State=UP", ""])


def _states(cluster: Slurm) -> str:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%t %D"],
        env=cluster.environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()
