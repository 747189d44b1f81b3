"""Signals and failures under torchrun's agent, with real processes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polyad.launch.torchrun import _stopped, torchrun
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.train.errors import STOP_FILE, forget_stop, tell_launcher
from tests.helpers import started
from tests.helpers.everyday import everyday
from tests.helpers.started import steps, wait_for

pytestmark = pytest.mark.distributed


def test_word_of_a_stop_is_left_for_our_agent_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(STOP_FILE, raising=False)
    assert not tell_launcher(15)
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not tell_launcher(15)  # of an agent further up, whose worker this is not
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert _stopped() == 0
    assert tell_launcher(signal.SIGUSR1)
    assert _stopped() == 138
    forget_stop()  # the next start of the workers
    assert _stopped() == 0


@pytest.mark.slow
def test_workers_of_an_agent_that_is_the_first_process_of_a_container_start():
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-pf", "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("a process cannot be the first of its own here: it needs unshare and root")
    processes = ("--standalone", "--nproc-per-node", "1")
    words = [*processes, "-m", "polyad.launch", "train", "nothing.yaml"]
    done = subprocess.run(
        [unshare, "-pf", sys.executable, "-m", "polyad.launch.torchrun", *words],
        **{"check": False, "capture_output": True, "text": True},
        env={k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}},
    )
    assert "nothing.yaml: there is no such file" in done.stderr
    assert done.returncode == 2


def start(config: Path, *overrides: str, restarts: int = 3) -> subprocess.Popen[str]:
    words = ["evaluation.every=0", "log.trackers=[]", *overrides]
    command = torchrun(["train", str(config), *words], 2, restarts)
    return started.start(command, stdout=subprocess.DEVNULL)


def begun(config: Path, *overrides: str, restarts: int = 3) -> subprocess.Popen[str]:
    """A run that has made two steps, and does not end by itself."""
    words = ("train.steps=100000", "checkpoint.every=0", *overrides)
    agent = start(config, *words, restarts=restarts)
    wait_for(lambda: len(steps(config.parent / "run")) >= 2, agent)
    return agent


def assert_saved(run: Path, said: str, name: str) -> None:
    """Checks that a run which was stopped says so alone, and has saved its last step."""
    (newest,) = complete_checkpoints(run / "checkpoints")
    assert newest.name == f"step-{steps(run)[-1]:08d}"
    ends = [line for line in said.splitlines() if "error" in line or name in line]
    assert ends == [f"polyad: {name}; run the same command again to continue from {newest}"]


def workers_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(agent.pid).children()


@pytest.mark.slow
def test_what_a_run_of_one_host_listens_on_is_loopback_alone(config):
    """torch unpickles what comes in there, and nothing asks who sends it."""
    agent = begun(config)
    family = [psutil.Process(agent.pid), *workers_of(agent)]
    listening = [
        (each.pid, link.laddr.ip)
        for each in family
        for link in each.net_connections("inet")
        if link.status == psutil.CONN_LISTEN
    ]
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=60)
    assert {pid for pid, _ in listening} <= {each.pid for each in family[1:]}  # gloo's, no store
    assert {address for _, address in listening} == {"127.0.0.1"}


@everyday("rank", [0, 1], keep=[])
def test_a_process_that_alone_cannot_start_says_why_once(rank, config, tmp_path, monkeypatch):
    """torchrun ends the other one at once, which has not even heard of it."""
    (tmp_path / "broken.py").write_text(f"import os\nassert os.environ['RANK'] != '{rank}'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("POLYAD_PLUGINS", "broken")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    agent = start(config)
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 2
    first, *others = said.splitlines()
    assert "POLYAD_PLUGINS: broken: cannot be imported: AssertionError" in first
    # A slow machine may have let the other one begin.
    assert all("stopped by SIGTERM; no checkpoint was written" in line for line in others), others
    left = [*tmp_path.glob("torchelastic_*"), *tmp_path.glob("polyad-*")]
    assert not left


def loaders_of(worker: psutil.Process) -> list[psutil.Process]:
    loaders = []
    for each in worker.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another child that has ended meanwhile
            if "spawn_main" in " ".join(each.cmdline()):
                loaders.append(each)
    return loaders


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_one_line(config):
    agent = begun(config, "data.num_workers=2", restarts=0)
    killed, *others = (loader for each in workers_of(agent) for loader in loaders_of(each))
    killed.kill()
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 1
    ours = ("new run: ", "first step ", "step ")
    lines = [line for line in said.splitlines() if not line.startswith(ours)]
    assert "Traceback" not in said  # Python's resource tracker may warn
    (line,) = (line for line in lines if line.startswith("polyad: error: "))
    assert str(killed.pid) in line
    assert "data.num_workers" in line
    _, alive = psutil.wait_procs(others, timeout=20)
    assert not alive


@pytest.mark.slow
def test_loader_processes_whose_parent_ended_while_they_started_end_too(config):
    words = ["train.steps=100000", "checkpoint.every=0", "data.num_workers=1"]
    agent = start(config, *words, restarts=0)
    begun: list[psutil.Process] = []

    def started() -> bool:
        begun[:] = [loader for each in workers_of(agent) for loader in loaders_of(each)]
        return len(begun) == 2

    wait_for(started, agent)
    for process in (*workers_of(agent), psutil.Process(agent.pid)):
        process.kill()
    agent.communicate(timeout=60)
    _, alive = psutil.wait_procs(begun, timeout=60)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom"),
    [("SIGTERM", "agent"), ("SIGUSR1", "agent"), ("SIGUSR1", "worker"), ("SIGINT", "worker")],
)
def test_a_stop_is_not_taken_for_a_failure(config, number, whom):
    asked = signal.Signals[number]
    agent = begun(config)
    target = psutil.Process(agent.pid) if whom == "agent" else workers_of(agent)[1]
    target.send_signal(asked)
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 128 + asked
    name = "interrupted" if asked == signal.SIGINT else f"stopped by {number}"
    assert_saved(config.parent / "run", said, name)
    assert "continues from" not in said  # it was not started again


def stopped_after(seconds: float, number: signal.Signals, words: list[str]) -> None:
    """Starts a command, and checks how a signal ends it some seconds after it has handlers."""
    process = started.start([sys.executable, "-m", "polyad.launch", *words])
    status = Path(f"/proc/{process.pid}/status")
    caught = re.compile(r"^SigCgt:\s*(\w+)$", re.MULTILINE)
    wait_for(lambda: int(caught.findall(status.read_text())[0], 16) >> signal.SIGTERM - 1 & 1)
    time.sleep(seconds)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    name = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert sum(name in line for line in said.splitlines()) == 1, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(family, timeout=20)  # loaders look for their parent now and then
    assert not alive


def words_of(command: str, config: Path) -> list[str]:
    processes = ["--processes-per-node", "2"] if command == "launch" else []
    return [command, str(config), *processes, "train.steps=100000"]


@pytest.mark.parametrize(("seconds", "number"), [(0.1, signal.SIGTERM), (2.5, signal.SIGINT)])
def test_a_signal_while_a_launcher_starts_ends_it_at_once(config, seconds, number):
    """Also within an import, which an exception would break, or which would swallow it."""
    stopped_after(seconds, number, words_of("launch", config))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["launch", "train"])
def test_a_signal_at_any_moment_of_a_start_ends_it(config, command):
    for moment in range(20):
        number = (signal.SIGTERM, signal.SIGINT)[moment % 2]
        stopped_after(0.6 * moment, number, words_of(command, config))


@pytest.mark.slow
def test_signals_again_and_again_do_not_end_workers_that_save(config):
    """Ctrl-C more than once, or Slurm, which tells the agent and the workers."""
    agent = begun(config)
    workers = workers_of(agent)
    workers[1].send_signal(signal.SIGSTOP)  # so that no step comes to its end meanwhile
    for _ in range(4):
        for process in (psutil.Process(agent.pid), workers[0]):
            process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    workers[1].send_signal(signal.SIGCONT)
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 130
    assert not any(worker.is_running() for worker in workers)
    assert_saved(config.parent / "run", said, "interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_a_lost_worker_means_a_restart_that_goes_on_by_itself(config, kind):
    """A frozen one is missed in a collective; torchrun kills it after its 30 seconds."""
    run = config.parent / "run"
    # A busy machine may take some seconds for a step: only who is frozen takes twelve.
    minutes = 0.2 if kind == "frozen" else 30
    words = ["train.steps=40", "checkpoint.every=5", f"parallel.timeout_minutes={minutes}"]
    agent = start(config, *words)
    wait_for(lambda: complete_checkpoints(run / "checkpoints"), agent)
    workers_of(agent)[1].send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    _, said = agent.communicate(timeout=180)
    assert agent.returncode == 0, said
    assert steps(run) == list(range(1, 41))
    assert said.count("continues from") == 1
    stalled = "for parallel.timeout_minutes: 0.2; the stacks of all processes are above"
    assert (stalled in said and "most recent call first" in said) == (kind == "frozen")


@pytest.mark.slow
def test_workers_whose_agent_is_killed_save_a_checkpoint_and_end(config):
    agent = begun(config)
    workers = workers_of(agent)
    agent.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert len(complete_checkpoints(config.parent / "run" / "checkpoints")) == 1
