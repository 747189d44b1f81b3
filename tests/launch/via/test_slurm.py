"""Slurm jobs: what is refused, what the script says, and what it does with stand-ins for Slurm."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyad.launch.cli import run
from polyad.launch.via.hosts import LaunchError
from polyad.launch.via.slurm import SlurmJob, script_text, seconds
from tests.helpers.started import write_command
from tests.launch.test_cli import error_line
from tests.launch.via.test_hosts import ARGUMENTS, SHELL

SLURM = ("--via", "slurm", "--nodes", "2", "--processes-per-node", "1")
AGENT = (
    *("python", "-m", "polyad.launch.torchrun", "--nnodes", "2"),
    *("-m", "polyad.launch", "train", "x.yaml"),
)

# A job of two nodes: srun runs the command for each in turn, python prints its arguments.
STAND_INS = {
    "scontrol": """
        if [ "$1" = show ]; then printf 'node-1\\nnode-2\\n'; else echo "$@" >> "$LOG"; fi""",
    "srun": """
        while [ "${1#--}" != "$1" ]; do echo "$1" >> "$LOG"; shift; done
        trap 'echo passed on >> "$LOG"; kill -USR1 "$task"' USR1
        trap 'echo passed on >> "$LOG"; kill -TERM "$task"' TERM
        for node in 0 1; do
          SLURM_NODEID=$node SLURMD_NODENAME=node-$((node + 1)) "$@" & task=$!
          wait "$task"; status=$?
          while kill -0 "$task" 2> /dev/null; do wait "$task"; status=$?; done
          [ "$status" = 0 ] || exit "$status"
        done""",
    "python": """
        printf '%s\\0' "$@"; test -n "$WAIT" || exit 0
        trap 'sleep 0.2; echo saved >> "$LOG"; exit 138' USR1
        trap 'sleep 0.2; echo saved >> "$LOG"; exit 143' TERM
        touch "$WAIT"; sleep 20 & wait $!; exit 7""",
}


@pytest.fixture(scope="module")
def stand_ins() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="polyad-slurm-"))
    for name, text in STAND_INS.items():
        write_command(folder / name, text)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        **{"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log"), "WAIT": ""},
        **{"SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "node-[1-2]"},
        **more,
    }


def text_of(agent: tuple[str, ...] = AGENT, folder: str = "/runs/a", **asked: object) -> str:
    return script_text(Path(folder), SlurmJob(**asked), agent, 2, 1, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["partition", "account", "qos", "job_name"])
@pytest.mark.parametrize("value", [*SHELL, "-x", "gpu\n#SBATCH --wrap=id", "a%b"])
def test_a_name_with_special_characters_is_refused(option: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"^--{option.replace('_', '-')}: ") as caught:
        SlurmJob(**{option: value})  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("1-2", 93600), ("1-2:30", 95400)),
        ("1-2:30:05", 95405),
    ],
)
def test_times_are_those_of_slurm(text: str, number: int) -> None:
    assert seconds(text) == number


@pytest.mark.parametrize(
    "value", [*SHELL, "1h", "-5", "1:60:00", "1:2:3:4", "1-", "1-2:3:4:5", "UNLIMITED", "１"]
)
def test_another_time_is_refused(value: str) -> None:
    with pytest.raises(LaunchError, match=r"^--time: "):
        SlurmJob(time=value)


def test_a_limit_that_the_signal_does_not_fit_into_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--time: 3 is 180 s; .*--signal-seconds 120 \+ 60"):
        SlurmJob(time="3")
    SlurmJob(time="3", signal_seconds=60)


@pytest.mark.parametrize("value", [*SHELL, "480GB", "-1", "4.5G"])
def test_another_memory_is_refused(value: str) -> None:
    with pytest.raises(LaunchError, match=r"^--memory-per-node: "):
        SlurmJob(memory_per_node=value)


@pytest.mark.parametrize("name", ["gpus_per_node", "cpus_per_node", "signal_seconds"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(LaunchError, match=f"^--{name.replace('_', '-')}: 0 "):
        SlurmJob(**{name: 0})  # type: ignore[arg-type]


def test_counts_that_slurm_or_the_processes_have_no_room_for_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"^--signal-seconds: 65536 .*at most 65535"):
        SlurmJob(signal_seconds=65536)
    job = SlurmJob(gpus_per_node=3)
    with pytest.raises(LaunchError, match=r"^--gpus-per-node: 3 .*--processes-per-node 4"):
        script_text(Path("/runs/a"), job, AGENT, 2, 4, {})
    assert "--gpus-per-node=3\n" in script_text(Path("/runs/a"), job, AGENT, 2, 3, {})


@pytest.mark.parametrize("folder", ["/runs/a b", "/runs/a\n#SBATCH --wrap=id", "/r/$(id)", "/r/%j"])
def test_a_run_folder_that_cannot_stand_in_a_directive_is_refused(folder: str) -> None:
    with pytest.raises(LaunchError, match=r"^run\.folder: ") as caught:
        text_of(folder=folder)
    assert len(str(caught.value).splitlines()) == 1


def test_the_script_asks_for_what_was_asked() -> None:
    text = text_of(
        **{"time": "1-12", "partition": "gpu", "account": "lab.1", "qos": "long"},
        **{"gpus_per_node": 8, "cpus_per_node": 64, "memory_per_node": "480G"},
    )
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=a",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=64",
        "#SBATCH --mem=480G",
        "#SBATCH --time=1-12",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab.1",
        "#SBATCH --qos=long",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --output=/runs/a/launch/slurm-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    lines = text.splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert lines.index(directives[-1]) < commands[0]  # Slurm reads no directive after a command
    assert " --cpus-per-task=64 " in text  # srun does not inherit it


def test_whole_nodes_are_asked_for_unless_cores_are() -> None:
    text = text_of()
    assert "\n#SBATCH --exclusive\n" in text
    assert ' --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" ' in text


def test_the_script_starts_an_agent_on_every_node(stand_ins: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", text_of()], env=environment(stand_ins), capture_output=True, check=True
    )
    words = done.stdout.decode().split("\0")
    end = len(words) // 2
    for node, arguments in enumerate((words[:end], words[end:-1])):
        assert (
            arguments
            == [
                *("-m", "polyad.launch.torchrun", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", "node-1:10007", "--rdzv-id", "40007"),  # 10000 + 40007 % 20000
                *("--rdzv-conf", f"is_host={'false' if node else 'true'}"),
                *("--local-addr", f"node-{node + 1}", *AGENT[3:]),
            ]
        )


@given(overrides=st.lists(ARGUMENTS, max_size=3), place=ARGUMENTS.map(lambda t: t[:40]))
@settings(max_examples=40, deadline=None)
def test_any_override_comes_through_the_script_unchanged(
    stand_ins: Path, overrides: list[str], place: str
) -> None:
    text = script_text(
        *(Path("/runs/a"), SlurmJob(), (*AGENT, *overrides), 2, 1),
        {"EXTRA": place},
    )
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    done = subprocess.run(
        ["bash", "-c", text], env=environment(stand_ins), capture_output=True, check=True
    )
    words = done.stdout.decode().split("\0")[:-1]
    assert words[len(words) // 2 - len(overrides) : len(words) // 2] == overrides
    assert words[len(words) - len(overrides) :] == overrides


EXECUTED = ("$(touch {m})", "`touch {m}`", "; touch {m};", "x[$(touch {m})]", "a\n touch {m}\n")


@pytest.mark.parametrize("value", EXECUTED)
@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "SLURM_JOB_NODELIST", "OMP_NUM_THREADS"]
)
def test_nothing_in_the_environment_of_the_job_is_executed(
    stand_ins: Path, tmp_path: Path, name: str, value: str
) -> None:
    marker = tmp_path / "marker"
    done = subprocess.run(
        ["bash", "-c", text_of()],
        env=environment(stand_ins, **{name: value.format(m=marker)}),
        capture_output=True,
        text=True,
    )
    assert not marker.exists()
    if name in ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"):
        assert done.returncode == 2
        assert "is not a number" in done.stderr


@pytest.mark.parametrize("value", [*EXECUTED, "a b", "a'b", '"', "-n"])
def test_the_folder_that_a_job_is_launched_in_may_have_any_name(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / value.format(m="marker")
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = text_of()
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        ["bash", "-c", text + "\nexit"], env=environment(stand_ins), capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert not marker.exists()
    assert not (folder / "marker").exists()


@pytest.mark.parametrize(
    ("number", "status", "then"),
    [
        (signal.SIGUSR1, 138, ["requeue 40007"]),  # near the limit
        (signal.SIGTERM, 143, []),  # scancel
    ],
)
def test_a_signal_stops_the_processes_before_the_job_ends_or_requeues_itself(
    stand_ins: Path, tmp_path: Path, number: signal.Signals, status: int, then: list[str]
) -> None:
    log, begun = tmp_path / "log", tmp_path / "begun"
    said = tmp_path / "said"
    with said.open("w") as stderr:
        job = subprocess.Popen(
            ["bash", "-c", text_of()],
            env=environment(stand_ins, LOG=str(log), WAIT=str(begun)),
            **{"stdout": subprocess.DEVNULL, "stderr": stderr},
        )
    until = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.01)
    job.send_signal(number)
    assert job.wait(30) == status  # of the agents
    assert ("requeueing job 40007" in said.read_text()) == bool(then)
    steps = [line for line in log.read_text().splitlines() if not line.startswith("--")]
    assert steps == ["passed on", "saved", *then]


def test_without_sbatch_it_is_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(config.parent))
    assert run(["launch", str(config), *SLURM]) == 2
    line = error_line(capfd.readouterr().err)
    assert "sbatch" in line
    assert "--dry-run" in line
    assert not (config.parent / "run").exists()


def test_a_dry_run_writes_the_script_into_a_folder_that_stays_fresh(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SLURM, "--dry-run", "--interface", "ib0", "--time", "10:00:00", "seed=7"]
    assert run(["launch", str(config), *arguments]) == 0
    script = config.parent / "run" / "launch" / "job.sh"
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out == f"sbatch {shlex.quote(str(script))}\n"
    text = script.read_text()
    assert f"cd {Path.cwd()} || exit 1" in text
    assert "export GLOO_SOCKET_IFNAME=ib0\nexport NCCL_SOCKET_IFNAME==ib0\n" in text
    assert f"{sys.executable} -m polyad.launch.torchrun --nnodes 2 --nproc-per-node 1" in text
    assert f"--max-restarts 3 -m polyad.launch train {config} seed=7" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    # Neither another launch nor training takes it for something that is not a run.
    assert run(["launch", str(config), *arguments]) == 0
    assert run(["validate", str(config)]) == 0
    assert "(a new run)" in capfd.readouterr().out
    (config.parent / "run" / "notes.txt").write_text("mine")
    assert run(["validate", str(config)]) == 2


def test_the_script_is_submitted(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_command(config.parent / "sbatch", 'echo "Submitted batch job 7: $1"')
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    assert run(["launch", str(config), *SLURM]) == 0
    script = config.parent / "run" / "launch" / "job.sh"
    assert f"Submitted batch job 7: {script}\n" in capfd.readouterr().out
    write_command(config.parent / "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert run(["launch", str(config), *SLURM]) == 1
    line = error_line(capfd.readouterr().err)
    assert "sbatch refused" in line
    assert "invalid partition" in line
    write_command(config.parent / "sbatch", r"printf '\xff' >&2; exit 1")
    assert run(["launch", str(config), *SLURM]) == 1
    assert "sbatch refused" in error_line(capfd.readouterr().err)
    (config.parent / "sbatch").write_text("no program")
    assert run(["launch", str(config), *SLURM]) == 1
    assert "sbatch cannot be started: Exec format error" in error_line(capfd.readouterr().err)
