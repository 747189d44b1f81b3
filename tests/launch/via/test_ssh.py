"""Runs over hosts through a real sshd on each: what is refused, and what a lost host does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyad.launch.cli import run as command
from polyad.launch.via import remote, ssh
from polyad.parallel.checkpoint.keeping import complete_checkpoints
from tests.helpers.everyday import everyday
from tests.helpers.faults import lives
from tests.helpers.hosts import Host, SshServers, several_hosts
from tests.helpers.started import SMALL, losses, start, wait_for, write_run
from tests.launch.test_cli import error_line

Cluster = tuple[tuple[Host, ...], SshServers]
Polyad = Callable[..., subprocess.CompletedProcess[str]]

ONE = ("--processes-per-node", "1")
NET = ("--interface", "eth0")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with several_hosts(2, net=78) as hosts:
        yield hosts, SshServers(hosts, tmp_path_factory.mktemp("ssh"))


def words(cluster: Cluster, config: Path, *more: str) -> list[str]:
    hosts, servers = cluster
    file = config.parent / "hosts"
    if not file.exists():
        file.write_text("".join(f"{host.alias} slots=1\n" for host in hosts))
    return [
        *("launch", str(config), "--via", "ssh", "--hostfile", str(file)),
        *("--ssh-config", str(servers.client), *more),
    ]


def start_over(cluster: Cluster, config: Path, *more: str) -> subprocess.Popen[str]:
    """Starts a run over the hosts."""
    given = words(cluster, config, *NET, *more)
    return start([sys.executable, "-m", "polyad.launch", *given])


def manifest(config: Path, step: int) -> Path:
    return config.parent / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json"


def left_over(hosts: tuple[Host, ...]) -> list[str]:
    """What still runs on the hosts, but for their SSH servers."""
    found = []
    for process in (each for host in hosts for each in host.processes()):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "launch" in line:
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed_forward", "degrees"),
    [
        ({"kind": "dense"}, {}),
        (
            {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32},
            {"expert_parallel_size": 2},
        ),
    ],
    ids=["dense", "experts over hosts"],
)
def test_a_run_over_two_hosts_is_that_of_one_machine(
    cluster: Cluster,
    data: Path,
    polyad: Polyad,
    tmp_path: Path,
    feed_forward: dict[str, object],
    degrees: dict[str, object],
) -> None:
    sections = {
        "model": SMALL["model"] | {"dropout": 0.1, "feed_forward": feed_forward},
        "parallel": {"zero_stage": 1, "timeout_minutes": 2.0} | degrees,
    }
    config = write_run(tmp_path / "two", data, 6, **sections)
    whole = write_run(tmp_path / "one", data, 6, **sections)
    launcher = start_over(cluster, config)
    out, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, said
    assert out.startswith("6 steps done; last loss "), out
    first = cluster[0][0].alias
    lines = said.splitlines()
    assert all(line.startswith(f"{first} rank 0: ") for line in lines), said
    assert any("new run: 6 steps" in line for line in lines)
    done = polyad("launch", whole, "--processes-per-node", 2)
    assert done.returncode == 0, done.stderr
    assert losses(config.parent / "run") == losses(whole.parent / "run")
    assert left_over(cluster[0]) == []


@everyday(
    ("lines", "more", "expected"),
    [
        ("host-1 slots=1\n{0}9\n", ONE, ("{0}9 cannot be used",)),
        ("host-1 slots=1\n{0} slots=1\n", NET, ("host-1 and {0} are the same machine",)),
        (
            "loopback\nhost-2\n",
            (*ONE, *NET),
            ("loopback, the rendezvous host", "127.0.0.1 on host-2"),
        ),
        ("host-1\nhost-2\n", ONE, ("--interface: is missing", "127.0.1.1 there", "eth0")),
        ("host-1\nhost-2\n", (*ONE, *NET, "--port", "22"), ("--port: 22", "1024 to 65535")),
    ],
    keep=["port"],
    ids=["out of reach", "twice", "endpoint is loopback", "itself is loopback", "port"],
)
def test_hosts_that_cannot_run_are_refused_before_anything_starts(
    lines: str,
    more: tuple[str, ...],
    expected: tuple[str, ...],
    cluster: Cluster,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = write_run(tmp_path / "run", data, 6)
    address = cluster[0][0].address
    (config.parent / "hosts").write_text(lines.format(address))
    assert command([*words(cluster, config), *more]) == 2
    said = error_line(capfd.readouterr().err)
    for part in expected:
        assert part.format(address) in said
    assert not (config.parent / "run").exists()


@pytest.mark.slow
def test_a_taken_port_is_refused(
    cluster: Cluster, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path / "run", data, 6)
    listen = "import socket, time; s = socket.create_server(('', 29555)); print(1, flush=True); "
    holder = subprocess.Popen(
        [*cluster[0][0].inside, sys.executable, "-c", f"{listen}time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert command(words(cluster, config, *NET, "--port", "29555")) == 2
    finally:
        holder.kill()
        holder.wait()
    assert f"--port: 29555 is in use on {cluster[0][0].alias}" in capfd.readouterr().err


@pytest.mark.slow
def test_a_failure_names_its_host_and_ends_all(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    config = write_run(
        *(tmp_path / "run", data, 9),
        optimizer={"kind": "sgd", "learning_rate": 1e6, "clip_grad_norm": 0},
    )
    launcher = start_over(cluster, config, "--max-restarts", "0", "train.max_skipped_steps=2")
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 1, said
    assert "polyad: error: step " in said
    (ended,) = [line for line in said.splitlines() if " ended first: status 1" in line]
    assert ended.split()[1] in {host.alias for host in cluster[0]}
    assert left_over(cluster[0]) == []


def test_after_a_signal_nothing_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that is lost may be the reason for the signal: a node that goes down."""
    ended = {"a": ssh.LOST, "b": 143}

    def watch(start: Any) -> dict[str, int]:
        start.signals.append(signal.SIGTERM)
        return ended

    monkeypatch.setattr(ssh, "check_hosts", lambda run, hosts: None)
    monkeypatch.setattr(ssh._Start, "watch", watch)
    run = SimpleNamespace(hosts=["a", "b"], sizes=[2], restarts=3)
    assert ssh.run_over_ssh(run) == 143
    ended["a"] = 1
    assert ssh.run_over_ssh(run) == 1


def test_the_next_hosts_that_answer_take_the_place_of_lost_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look, begun = remote.look("localhost", 29400, []), []

    def watch(start: Any) -> dict[str, int]:
        begun.append(start.hosts)
        return {host: ssh.LOST if host == "a" else 0 for host in start.hosts}

    monkeypatch.setattr(ssh, "check_hosts", lambda run, hosts: None)
    monkeypatch.setattr(ssh, "_wait_for_end", lambda run, lost: None)
    answers = {"a": "no answer", "b": look, "c": "no answer", "d": look}
    monkeypatch.setattr(ssh, "look_at", lambda run, hosts: {each: answers[each] for each in hosts})
    monkeypatch.setattr(ssh._Start, "watch", watch)
    options = SimpleNamespace(wait_minutes=0.0)
    run = SimpleNamespace(hosts=["a", "b", "c", "d"], sizes=[2], restarts=1, options=options)
    assert ssh.run_over_ssh(run) == 0
    assert begun == [["a", "b"], ["b", "d"]]


@pytest.mark.slow
def test_a_signal_saves_the_step_on_all_hosts(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", data, 2000)
    launcher = start_over(cluster, config)
    wait_for(manifest(config, 20).exists, launcher)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, said
    (last,) = [line for line in said.splitlines() if "stopped by SIGTERM" in line]
    assert (
        "rank 0: polyad: stopped by SIGTERM; run the same command again to continue from " in last
    )
    saved = complete_checkpoints(config.parent / "run" / "checkpoints")[-1]
    assert last.endswith(str(saved))
    assert int(saved.name.removeprefix("step-")) % 20  # the step it was in, not the last planned
    assert left_over(cluster[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_a_run_survives_the_loss_of_a_host(
    least: int, cluster: Cluster, data: Path, polyad: Polyad, tmp_path: Path
) -> None:
    """With --min-nodes 1 the other goes on alone; else the run waits until the host is back."""
    hosts, servers = cluster
    steps = 600
    config, whole = (
        write_run(tmp_path / "two", data, steps),
        write_run(tmp_path / "one", data, steps),
    )
    launcher = start_over(cluster, config, "--min-nodes", str(least))
    try:
        wait_for(manifest(config, 40).exists, launcher)
        hosts[0].kill()  # where the agents meet
        if least == 2:
            time.sleep(45)
            assert launcher.poll() is None, launcher.communicate()
            servers.start(hosts[0])
        _, said = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
        if least == 1:
            servers.start(hosts[0])
    assert launcher.returncode == 0, said
    assert f"polyad: lost {hosts[0].alias};" in said
    assert f"on {least} hosts" in said
    assert left_over(hosts) == []
    done = polyad("launch", whole, "--processes-per-node", 2)
    assert done.returncode == 0, done.stderr
    there, expected = losses(config.parent / "run"), losses(whole.parent / "run")
    assert sorted(there) == list(range(1, steps + 1))
    if least == 2:
        assert there == expected
    else:
        # The same batches; dropout depends on the number of processes.
        assert there[steps] == pytest.approx(expected[steps], rel=0.02)


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_that_is_lost(
    data: Path, polyad: Polyad, tmp_path: Path
) -> None:
    steps = 600
    config, whole = (
        write_run(tmp_path / "three", data, steps),
        write_run(tmp_path / "one", data, steps),
    )
    with several_hosts(3, net=77) as hosts:
        three = hosts, SshServers(hosts, tmp_path)
        launcher = start_over(three, config, "--spare-nodes", "1")
        try:
            wait_for(manifest(config, 40).exists, launcher)
            assert not hosts[2].running("polyad.launch", "train")
            hosts[0].kill()  # where the agents meet; it does not come back
            _, said = launcher.communicate(timeout=240)
        finally:
            launcher.kill()
        assert launcher.returncode == 0, said
        again = f"on 2 hosts: {hosts[1].alias}, {hosts[2].alias}"
        assert f"restarting from the newest checkpoint {again}" in said
        assert left_over(hosts) == []
    done = polyad("launch", whole, "--processes-per-node", 2)
    assert done.returncode == 0, done.stderr
    assert losses(config.parent / "run") == losses(whole.parent / "run")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["polyad.launch.torchrun", "polyad.launch.via.remote"])
def test_a_killed_agent_is_started_again_and_leaves_nothing_behind(
    module: str, cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    hosts, _ = cluster
    steps = 300
    config = write_run(tmp_path / "two", data, steps)
    launcher = start_over(cluster, config)
    try:
        wait_for(manifest(config, 40).exists, launcher)
        before = [each for host in hosts for each in host.running("polyad.launch", "train")]
        (agent,) = hosts[1].running(module)
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: not any(map(lives, before)), launcher)
        _, said = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, said
    assert f"polyad: lost {hosts[1].alias};" in said
    assert sorted(losses(config.parent / "run")) == list(range(1, steps + 1))
    assert left_over(hosts) == []


def test_the_agent_of_a_host_that_is_killed_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIG{}); time.sleep(9)"
    statuses = [remote.Agent(["-c", code.format(name)], {}, 1).watch() for name in ("KILL", "TERM")]
    os.close(writer)
    assert statuses == [remote.AGENT_KILLED, 143]
    assert "torchrun was ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "silence"),
    [([[]], 60.0), ([["run"], ["run"], ["another"]], 60.0), (["no answer"], 0.3)],
    ids=["nothing is left", "its agent still ends", "out of reach"],
)
def test_a_run_starts_again_once_a_lost_host_has_nothing_of_it_left(
    answers: list[Any],
    silence: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends = [{"a": 1, "b": remote.AGENT_KILLED}, {"a": 0, "b": 0}]
    look = remote.look("localhost", 29400, [])
    asked: list[Any] = []

    def look_at(run: Any, hosts: list[str]) -> dict[str, Any]:
        asked.append(hosts)
        answer = answers[min(len(asked), len(answers)) - 1]
        return {"b": answer if isinstance(answer, str) else replace(look, agents=answer)}

    monkeypatch.setattr(ssh, "check_hosts", lambda run, hosts: None)
    monkeypatch.setattr(ssh, "look_at", look_at)
    monkeypatch.setattr(ssh, "_enough_hosts", lambda run: run.hosts)
    monkeypatch.setattr(ssh._Start, "watch", lambda start: ends.pop(0))
    monkeypatch.setattr(ssh, "SILENCE", silence)
    monkeypatch.setattr(ssh, "TERMINATION", 0.0)
    monkeypatch.setattr(ssh, "LOOK_AGAIN", 0.01)
    begun = time.monotonic()
    run = SimpleNamespace(hosts=["a", "b"], sizes=[2], restarts=1, name="run")
    assert ssh.run_over_ssh(run) == 0
    if answers == ["no answer"]:
        assert time.monotonic() - begun >= silence
    else:
        assert asked == [["b"]] * len(answers)
    assert "polyad: lost b;" in capsys.readouterr().err


def test_a_host_says_which_agents_it_has() -> None:
    words = ["-c", "import time; time.sleep(60)", "-m", "polyad.launch.torchrun"]
    process = subprocess.Popen([sys.executable, *words, "--rdzv-id", "polyad-none"])
    try:
        assert "polyad-none" in remote.look("localhost", 29400, []).agents
    finally:
        process.kill()
        process.wait()
    assert "polyad-none" not in remote.look("localhost", 29400, []).agents


@pytest.mark.slow
def test_a_link_that_goes_down_and_comes_back(
    cluster: Cluster, data: Path, polyad: Polyad, tmp_path: Path
) -> None:
    hosts, _ = cluster
    steps = 600
    config, whole = (
        write_run(tmp_path / "two", data, steps),
        write_run(tmp_path / "one", data, steps),
    )
    launcher = start_over(cluster, config)
    try:
        wait_for(manifest(config, 40).exists, launcher)
        hosts[1].link("down")
        time.sleep(70)
        assert left_over((hosts[1],)) == []  # it ended by itself, for want of its launcher
        hosts[1].link("up")
        _, said = launcher.communicate(timeout=240)
    finally:
        launcher.kill()
        hosts[1].link("up")
    assert launcher.returncode == 0, said
    assert f"polyad: lost {hosts[1].alias};" in said
    done = polyad("launch", whole, "--processes-per-node", 2)
    assert done.returncode == 0, done.stderr
    assert losses(config.parent / "run") == losses(whole.parent / "run")
