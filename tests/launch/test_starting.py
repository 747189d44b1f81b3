"""`polyad launch`: what it checks, and what it would start."""

import os
import shlex
import sys

import pytest

import polyad.launch.torchrun
from polyad.launch.cli import run
from polyad.launch.launch import Launcher
from tests.launch.test_cli import error_line

TORCHRUN = ("--via", "torchrun", "--rdzv-endpoint", "node-1")


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch):
    """A dry run prints what it would set, and sets it too."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], ["--nodes", "'0'", "at least 1"]),
        (["--nodes", "2"], ["--nodes: 2", "--via local", "torchrun or slurm"]),
        (["--via", "mpi"], ["'mpi'", "'local', 'torchrun', 'slurm'"]),
        (["--via", "slurm", "--min-nodes", "2"], ["--min-nodes: 2", "--via torchrun"]),
        (["--nodes", "2", *TORCHRUN, "--min-nodes", "3"], ["--min-nodes: 3", "hosts, 2"]),
        (
            ["--nodes", "4", *TORCHRUN, "--min-nodes", "2", "train.micro_batch_size=1"],
            ["--min-nodes: 2", "with 3 hosts of 1 processes"],
        ),
        (["--nodes", "2", "--via", "torchrun"], ["--rdzv-endpoint", "missing", "2 nodes"]),
        (["--nodes", "3", *TORCHRUN], ["--nodes 3", "--processes-per-node 1", "= 3", "4 is not"]),
        (
            ["--nodes", "3", *TORCHRUN, "parallel.tensor_parallel_size=2"],
            ["--nodes 3", "= 3 processes", "parallel.tensor_parallel_size: 2", "does not divide"],
        ),
        ([*TORCHRUN[:3], "a;id"], ["--rdzv-endpoint", "'a;id'"]),
        ([*TORCHRUN, "--rdzv-id", "a b"], ["--rdzv-id", "'a b'"]),
        ([*TORCHRUN, "--local-addr", "`id`"], ["--local-addr", "'`id`'"]),
        ([*TORCHRUN, "--rdzv-is-host", "maybe"], ["--rdzv-is-host", "'true', 'false'"]),
        (["--interface", "eth0 eth1"], ["--interface", "'eth0 eth1'"]),
        (["--setup", "modules"], ["--setup: 'modules'", "--via local", "--via slurm"]),
        (["--rdzv-id", "x"], ["--rdzv-id", "'x'", "--via local", "--via torchrun"]),
        ([*TORCHRUN, "--sbatch", "time=1"], ["--sbatch", "--via slurm"]),
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
    arguments = ["--nodes", "2", "--processes-per-node", "2", *TORCHRUN, "--rdzv-is-host", "true"]
    more = ["--local-addr", "10.0.0.7", "--interface", "ib0", "--rdzv-id", "first", "--dry-run"]
    override = f"run.folder={folder}"
    status = run(["launch", str(config), *arguments, *more, "train.micro_batch_size=1", override])
    captured = capfd.readouterr()
    assert (status, captured.err) == (0, "")
    assert len(captured.out.splitlines()) == 1
    assert shlex.split(captured.out) == [
        *("env", "OMP_NUM_THREADS=3", "GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME==ib0"),
        *(sys.executable, "-m", "polyad.launch.torchrun"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-1:29400", "--rdzv-id", "first"),
        *("--rdzv-conf", "is_host=true", "--local-addr", "10.0.0.7"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("-m", "polyad.launch", "train", str(config), "train.micro_batch_size=1", override),
    ]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nodes", "2", "--min-nodes", "1", *TORCHRUN], "--nnodes 1:2"),
        ([], "--standalone --nproc-per-node 2 --max-restarts 0"),
    ],
)
def test_a_dry_run_says_how_torchrun_starts(words, expected, config, capfd):
    shape = [*words, "--processes-per-node", "2", "--dry-run", "train.micro_batch_size=1"]
    assert run(["launch", str(config), *shape]) == 0
    assert expected in capfd.readouterr().out


def test_torchrun_waits_as_long_as_a_run_may_take_to_save_and_no_longer(config, capfd):
    start = ["launch", str(config), "--processes-per-node", "2", "--dry-run"]
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    for seconds, expected in (("25", []), ("90.5", [f"{name}=96"]), ("5", [f"{name}=10"])):
        assert run([*start, f"monitor.grace_seconds={seconds}"]) == 0
        words = shlex.split(capfd.readouterr().out)
        assert [word for word in words if word.startswith("TORCH_")] == expected


def test_hosts_make_the_same_id_from_the_same_folder():
    here, there = (Launcher(None, [], via="torchrun", rdzv_endpoint="a") for _ in range(2))
    assert here.rendezvous("runs/x") == there.rendezvous("runs/x")
    assert here.rendezvous("runs/x") != here.rendezvous("runs/y")


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
