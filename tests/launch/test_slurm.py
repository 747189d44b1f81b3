"""Slurm jobs: what is refused, what the script says, and what it does with stand-ins for Slurm."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyad.launch.cli import run
from polyad.launch.slurm import LaunchError, check_job, script_text
from tests.helpers.refusals import line_of
from tests.helpers.started import wait_for, write_command
from tests.launch.test_cli import error_line

ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
SLURM = ("--via", "slurm", "--nodes", "2", "--processes-per-node", "1")
AGENT = (
    *("python", "-m", "polyad.launch.torchrun", "--nnodes", "2"),
    *("-m", "polyad.launch", "train", "x.yaml"),
)

# A job of two nodes: srun runs the command for each in turn, python prints its arguments.
STAND_INS = {
    "scontrol": """
        case "$1 $2" in
          "show job") echo "JobId=$3 JobState=${STATE:-RUNNING} Reason=None" ;;
          "show "*) printf 'node-1\\nnode-2\\n' ;;
          *) echo "$@" >> "$LOG" ;;
        esac""",
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
        printf '%s\\0' "$@"; test -n "$WAIT" || exit ${STATUS:-0}
        trap 'sleep 0.2; echo saved >> "$LOG"; exit 138' USR1
        trap 'sleep 0.2; echo saved >> "$LOG"; exit 143' TERM
        touch "$WAIT"; sleep 20 & wait $!; exit 7""",
}


@pytest.fixture(scope="module")
def stand_ins():
    folder = Path(tempfile.mkdtemp(prefix="polyad-slurm-"))
    for name, text in STAND_INS.items():
        write_command(folder / name, text)
    return folder


def environment(folder: Path, **more: object) -> dict[str, str]:
    return os.environ | {
        **{"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(folder / "log"), "WAIT": ""},
        **{"SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "node-[1-2]"},
        **{name: str(value) for name, value in more.items()},
    }


@pytest.fixture(scope="module")
def execute(stand_ins):
    """Runs a script as the batch step of a job, with some variables."""

    def run_script(text: str, **variables: object) -> subprocess.CompletedProcess[str]:
        words, variables = ["bash", "-c", text], environment(stand_ins, **variables)
        return subprocess.run(words, env=variables, capture_output=True, text=True)

    return run_script


def text_of(
    agent: tuple[str, ...] = AGENT, folder: str = "/runs/a", least: float = 0, **asked: Any
) -> str:
    return script_text(Path(folder) / "launch", agent, 2, 1, {}, least_seconds=least, **asked)


def log_of(path: Path) -> list[str]:
    """What was done, without the options of srun."""
    return [line for line in path.read_text().splitlines() if not line.startswith("--")]


@pytest.mark.parametrize(
    "text",
    [
        *("--time=1", "time=", "Time=1", "time=1 2", "comment='a'", "a#b=1", "", "=1"),
        *("time=1\n#SBATCH --wrap=id", "nodes=3", "output=x", "requeue", "array=1-3"),
    ],
)
def test_an_option_that_cannot_stand_in_a_directive_or_is_the_scripts_is_refused(text):
    assert line_of(LaunchError, check_job, [text], None).startswith("--sbatch: ")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"^--setup: .*there is no such file"):
        check_job([], tmp_path / "none")


@pytest.mark.parametrize("folder", ["/runs/a b", "/runs/a\n#SBATCH --wrap=id", "/r/$(id)", "/r/%j"])
def test_a_run_folder_that_cannot_stand_in_a_directive_is_refused(folder):
    with pytest.raises(LaunchError, match=r"^run\.folder: .*$"):
        text_of(folder=folder)


def test_the_script_asks_for_what_was_asked():
    asked = ["time=1-12", "gpus-per-node=8", "cpus-per-task=64", "signal=B:USR1@600", "hold"]
    text = text_of(sbatch=asked)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = [*asked, "nodes=2", "ntasks-per-node=1", "requeue"]
    assert {f"#SBATCH --{each}" for each in wanted} < {*directives}
    assert "#SBATCH --output=/runs/a/launch/slurm-%j.out" in directives
    lines = text.splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert lines.index(directives[-1]) < commands[0]  # Slurm reads no directive after a command
    assert "\n#SBATCH --exclusive\n" not in text
    assert "\n#SBATCH --exclusive\n" in text_of()  # whole nodes, unless cores are asked for


def test_the_script_starts_an_agent_on_every_node(execute):
    words = execute(text_of()).stdout.split("\0")
    end = len(words) // 2
    for node, arguments in enumerate((words[:end], words[end:-1])):
        expected = [
            *("-m", "polyad.launch.torchrun", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "node-1:10007", "--rdzv-id", "40007"),  # 10000 + 40007 % 20000
            *("--rdzv-conf", f"is_host={'false' if node else 'true'}"),
            *("--local-addr", f"node-{node + 1}", "--log-dir", "/runs/a/launch/logs"),
            *("--redirects", "3", "--tee", "3", *AGENT[3:]),
        ]
        assert arguments == expected


@given(overrides=st.lists(ARGUMENTS, max_size=3), place=ARGUMENTS.map(lambda t: t[:40]))
@settings(max_examples=40, deadline=None)
def test_any_override_comes_through_the_script_unchanged(stand_ins, overrides, place):
    text = script_text(Path("/runs/a/launch"), (*AGENT, *overrides), 2, 1, {"EXTRA": place})
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
def test_nothing_in_the_environment_of_the_job_is_executed(execute, tmp_path, name, value):
    marker = tmp_path / "marker"
    done = execute(text_of(), **{name: value.format(m=marker)})
    assert not marker.exists()
    if name in ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"):
        assert done.returncode == 2
        assert "is not a number" in done.stderr


@pytest.mark.parametrize("value", [*EXECUTED, "a b", "a'b", '"', "-n"])
def test_the_folder_that_a_job_is_launched_in_may_have_any_name(
    execute, tmp_path, monkeypatch, value
):
    marker = tmp_path / "marker"
    folder = tmp_path / value.format(m="marker")
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = text_of()
    monkeypatch.chdir(tmp_path)
    done = execute(text + "\nexit")
    assert (done.returncode, done.stderr) == (0, "")
    assert not marker.exists()
    assert not (folder / "marker").exists()


REQUEUED = ["requeue 40007"]


@pytest.mark.parametrize(
    ("number", "state", "status", "then"),
    [
        (signal.SIGUSR1, "RUNNING", 138, REQUEUED),  # near the limit
        (signal.SIGTERM, "COMPLETING", 143, []),  # scancel
        (signal.SIGTERM, "RUNNING", 143, REQUEUED),  # a preemption
    ],
)
def test_a_signal_stops_the_processes_before_the_job_ends_or_requeues_itself(
    stand_ins, tmp_path, number, state, status, then
):
    log, begun = tmp_path / "log", tmp_path / "begun"
    job = subprocess.Popen(
        ["bash", "-c", text_of()],
        env=environment(stand_ins, LOG=log, WAIT=begun, STATE=state),
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
    )
    wait_for(begun.exists)
    job.send_signal(number)
    assert job.wait(30) == status  # of the agents
    assert log_of(log) == ["passed on", "saved", *then]


@pytest.mark.parametrize(
    ("status", "least", "then"),
    [
        (0, 0, []),
        (1, 0, []),  # a failed run
        (2, 0, []),  # bad input
        (75, 0, REQUEUED),  # a failure that passes
        (137, 0, REQUEUED),  # a dead agent
        (137, 60, []),  # that died at once
    ],
)
def test_what_may_pass_goes_back_into_the_queue(execute, tmp_path, status, least, then):
    log = tmp_path / "log"
    assert execute(text_of(least=least), LOG=log, STATUS=status).returncode == status
    assert log_of(log) == then


def test_a_setup_is_read_before_processes_start(execute, tmp_path):
    setup = tmp_path / "a b.sh"
    for lines, status in (("export OMP_NUM_THREADS=7\necho loaded\n", 0), ("false\n", 1)):
        setup.write_text(lines)
        done = execute(text_of(setup=setup))
        assert done.returncode == status
        assert done.stdout.startswith("loaded\n") == (status == 0)


def test_without_sbatch_it_is_one_line(config, monkeypatch, refused):
    monkeypatch.setenv("PATH", str(config.parent))
    line = refused("launch", config, *SLURM)
    assert "sbatch" in line
    assert "--dry-run" in line
    assert not (config.parent / "run").exists()


def test_a_dry_run_writes_the_script_into_a_folder_that_stays_fresh(config, capfd):
    arguments = [*SLURM, "--dry-run", "--sbatch", "time=10:00:00", "seed=7"]
    assert run(["launch", str(config), *arguments]) == 0
    script = config.parent / "run" / "launch" / "job.sh"
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out == f"sbatch {shlex.quote(str(script))}\n"
    text = script.read_text()
    assert f"cd {Path.cwd()} || exit 1" in text
    logs = f"--log-dir {script.parent}/logs --redirects 3 --tee 3"
    start = f"{sys.executable} -m polyad.launch.torchrun {logs} --nnodes 2 --nproc-per-node 1"
    assert start in text
    assert "#SBATCH --time=10:00:00" in text
    assert f"--max-restarts 3 -m polyad.launch train {config} seed=7" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    # Neither another launch nor training takes it for something that is not a run.
    assert run(["launch", str(config), *arguments]) == 0
    assert run(["validate", str(config)]) == 0
    assert "(a new run)" in capfd.readouterr().out
    (config.parent / "run" / "notes.txt").write_text("mine")
    assert run(["validate", str(config)]) == 2


def test_the_script_is_submitted(config, monkeypatch, capfd):
    write_command(config.parent / "sbatch", 'echo "Submitted batch job 7: $1"')
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    assert run(["launch", str(config), *SLURM]) == 0
    script = config.parent / "run" / "launch" / "job.sh"
    assert f"Submitted batch job 7: {script}\n" in capfd.readouterr().out
    write_command(config.parent / "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert run(["launch", str(config), *SLURM]) == 1
    exports, error = capfd.readouterr().err.splitlines()
    assert exports == "exports to: Hugging Face's GPT-2"
    line = error_line(error)
    assert "sbatch refused" in line
    assert "invalid partition" in line
    (config.parent / "sbatch").write_text("no program")
    assert run(["launch", str(config), *SLURM]) == 1
    error = capfd.readouterr().err.splitlines()[1]
    assert "sbatch cannot be started: Exec format error" in error_line(error)
