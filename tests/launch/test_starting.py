"""`polyad launch`: what it checks, and what it would start."""

import os
import shlex
import sys

import pytest

import polyad.launch.torchrun
from polyad.launch.cli import run
from tests.launch.test_cli import error_line

SLURM = ("--via", "slurm", "--dry-run")


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch):
    """A dry run prints what it would set, and sets it too."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], ["--nodes", "'0'", "at least 1"]),
        (["--nodes", "2"], ["--nodes: 2", "--via local", "--via slurm, or torchrun"]),
        (["--via", "mpi"], ["'mpi'", "'local', 'slurm'"]),
        ([*SLURM, "--nodes", "3"], ["--nodes 3", "--processes-per-node 1", "= 3", "4 is not"]),
        (
            [*SLURM, "--nodes", "3", "parallel.tensor_parallel_size=2"],
            ["--nodes 3", "= 3 processes", "parallel.tensor_parallel_size: 2", "does not divide"],
        ),
        (["--setup", "modules"], ["--setup: modules", "--via local", "with slurm"]),
        (["--sbatch", "time=1"], ["--sbatch: ['time=1']", "--via local", "with slurm"]),
        (["$(touch x)=1"], ["'$(touch x)=1'", "key=value"]),
    ],
)
def test_a_wrong_launch_is_one_line_before_anything_starts(arguments, words, config, refused):
    line = refused("launch", config, "--processes-per-node", 1, *arguments)
    assert all(word in line for word in words), line
    assert not (config.parent / "run").exists()


def test_a_dry_run_prints_this_hosts_command(config, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    folder = config.parent / "a b;run"
    words = ["--processes-per-node", "2", "--dry-run", "train.micro_batch_size=1"]
    override = f"run.folder={folder}"
    status = run(["launch", str(config), *words, override])
    captured = capfd.readouterr()
    assert (status, captured.err) == (0, "")
    assert len(captured.out.splitlines()) == 1
    assert shlex.split(captured.out) == [
        *("env", "OMP_NUM_THREADS=3", sys.executable, "-m", "polyad.launch.torchrun"),
        *("--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0"),
        *("-m", "polyad.launch", "train", str(config), "train.micro_batch_size=1", override),
    ]
    assert not folder.exists()


def test_torchrun_waits_as_long_as_a_run_may_take_to_save_and_no_longer(config, capfd):
    start = ["launch", str(config), "--processes-per-node", "2", "--dry-run"]
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    for seconds, expected in (("25", []), ("90.5", [f"{name}=96"]), ("5", [f"{name}=10"])):
        assert run([*start, f"monitor.grace_seconds={seconds}"]) == 0
        words = shlex.split(capfd.readouterr().out)
        assert [word for word in words if word.startswith("TORCH_")] == expected


def test_hosts_that_do_not_meet_are_one_line(monkeypatch, capfd):
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    def fail(*_: object, **__: object) -> None:
        raise RendezvousTimeoutError

    monkeypatch.setattr(polyad.launch.torchrun.runpy, "run_module", fail)
    monkeypatch.setattr(polyad.launch.torchrun.logging, "disable", lambda _: None)
    assert polyad.launch.torchrun.main() == 1
    line = error_line(capfd.readouterr().err)
    assert "the hosts did not meet: fewer than all came" in line
    assert "the output of the others says why" in line


def test_processes_that_start_again_do_not_share_a_store_with_those_before(monkeypatch):
    found: list[str] = []
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setattr(
        polyad.launch.torchrun.runpy, "run_module", lambda *_, **__: found.append(os.environ[name])
    )
    monkeypatch.setattr(polyad.launch.torchrun.logging, "disable", lambda _: None)
    assert polyad.launch.torchrun.main() == 0
    assert found == ["1"]
