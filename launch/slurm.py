"""`polyad launch --via slurm`: a batch script in the run's folder, and its submission.

The script is bash. Words of commands are quoted with shlex; `#SBATCH` lines are parsed by Slurm,
not by a shell, so their content must match a strict pattern.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import polyad
from polyad.data.files import write_whole

OURS = ("array", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "requeue")
"""Options of `sbatch` that the script decides itself."""
SIGNAL_SECONDS = 120
"""Seconds before the time limit at which the processes are told to save."""
LEAST_SECONDS = 60
"""A job that fails or nears its limit sooner than this after its start is not put back into the
queue: it would go on doing so."""

_KEY = re.compile(r"[a-z][a-z-]*")
_VALUE = re.compile(r"""[^\s'"\\#]+""")
_DIRECTIVE_PATH = re.compile(r"/[A-Za-z0-9_./+,@:=-]*")


class LaunchError(ValueError):
    """An invalid option of `polyad launch`."""

    exit_status = 2


class SubmissionError(RuntimeError):
    """Slurm rejected a job: one line with its reason."""

    exit_status = 1


def check_job(sbatch: Sequence[str], setup: Path | None) -> None:
    """Checks what is asked of Slurm.

    Args:
        sbatch: options of `sbatch` without dashes, as `time=24:00:00`; without a value, as
            `exclusive`.
        setup: a file of bash that the script reads before it starts processes, such as
            `module load`.

    Raises:
        LaunchError: an option cannot stand in an `#SBATCH` line, or the file is missing.
    """
    for text in sbatch:
        key, equals, value = text.partition("=")
        if not _KEY.fullmatch(key) or (equals and not _VALUE.fullmatch(value)):
            raise LaunchError(
                f"--sbatch: {text!r} is not allowed; KEY=VALUE as in time=24:00:00, without "
                "dashes, spaces, quotes and #"
            )
        if key in OURS:
            raise LaunchError(
                f"--sbatch: {text!r} is not allowed; {', '.join(OURS)} are the script's own, "
                "and --nodes is an option of polyad launch"
            )
    if setup is not None and not setup.is_file():
        raise LaunchError(f"--setup: {setup}: there is no such file")


def _directives(sbatch: Sequence[str], name: str, nodes: int, place: str) -> list[str]:
    """Returns the `#SBATCH` lines.

    Args:
        sbatch: options that were asked for.
        name: default name of the job.
        nodes: number of nodes.
        place: the folder of the output file.
    """
    lines: dict[str, str] = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "signal": f"B:USR1@{SIGNAL_SECONDS}",
        "output": f"{place}/slurm-%j.out",
        "open-mode": "append",  # a requeued job appends to its file
        "requeue": "",
    }
    options = dict(text.partition("=")[::2] for text in sbatch)
    if "cpus-per-task" not in options:
        lines["exclusive"] = ""  # else each task gets only one core
    lines |= options
    return [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in lines.items()]


def script_text(
    folder: Path,
    agent: Sequence[str],
    nodes: int,
    processes_per_node: int,
    variables: Mapping[str, str],
    *,
    sbatch: Sequence[str] = (),
    setup: Path | None = None,
    least_seconds: float = LEAST_SECONDS,
) -> str:
    """Returns the batch script.

    Args:
        folder: the folder of launch files of the run.
        agent: torchrun's command without a rendezvous, which only the job knows.
        nodes: number of nodes.
        processes_per_node: P.
        variables: environment variables of all processes.
        sbatch: see `check_job`.
        setup: see `check_job`.
        least_seconds: see `LEAST_SECONDS`.

    Raises:
        LaunchError: the folder's name is not valid in an `#SBATCH` line.
    """
    if not _DIRECTIVE_PATH.fullmatch(str(folder)):
        raise LaunchError(
            f"run.folder: {str(folder.parent)!r} cannot stand in an #SBATCH line; only letters, "
            "digits and _./+,@:=- are allowed with --via slurm"
        )
    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", folder.parent.name)[:64].lstrip(".+-") or "polyad"
    # Files in the working folder may have the same names as Polyad's packages.
    root = shlex.quote(str(Path(polyad.__file__).resolve().parent.parent))
    lines = ["export PYTHONSAFEPATH=1", f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{root}']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if setup is not None:
        lines.append(f". {shlex.quote(str(setup.resolve()))} || exit 1")
    logs = ("--log-dir", f"{folder}/logs", "--redirects", "3", "--tee", "3")
    return _SCRIPT.format(
        directives="\n".join(_directives(sbatch, name, nodes, str(folder))),
        workplace=shlex.quote(os.getcwd()),
        lines="\n".join(lines),
        processes=processes_per_node,
        least=least_seconds,
        on_each_node=shlex.join(["bash", "-c", _ON_EACH_NODE]),
        agent=shlex.join([*agent[:3], *logs, *agent[3:]]),
    )


_SCRIPT = """\
#!/usr/bin/env bash
# Written by `polyad launch --via slurm`, which overwrites it.
{directives}

# Near the limit Slurm sends USR1 to this script alone, which hands it on: the processes end their
# step and the next, save and end, and the job goes back into the queue. The next start continues
# from there. TERM, of scancel and of a preemption, is handed on too, and waited for.
woken=0
asked=
agents=
stop() {{
  woken=1
  asked=${{asked:-$1}}
  [ -z "$agents" ] || kill "-$1" "$agents"  # srun passes it on to torchrun on each node
}}
trap 'stop USR1' USR1
trap 'stop TERM' TERM INT

cd {workplace} || exit 1
{lines}
# Bash runs what stands in the brackets of a value that it calculates with.
for number in "$SLURM_JOB_ID" "${{SLURM_CPUS_ON_NODE:-1}}"; do
  case $number in
    "" | *[!0-9]*) echo "polyad: error: Slurm's $number is not a number" >&2; exit 2 ;;
  esac
done

# torchrun's agents meet on the first host of the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export POLYAD_ENDPOINT="${{hosts%%$'\\n'*}}:$((10000 + SLURM_JOB_ID % 20000))"
threads=$((${{SLURM_CPUS_ON_NODE:-1}} / {processes}))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"

# srun does not inherit the cores of a task from the job.
srun --ntasks-per-node=1 --cpus-per-task="${{SLURM_CPUS_ON_NODE:-1}}" --kill-on-bad-exit=1 \\
  {on_each_node} agent \\
  {agent} &
agents=$!
[ -z "$asked" ] || kill "-$asked" "$agents"

# A signal ends `wait` before the agents have ended.
while :; do
  woken=0
  wait "$agents"
  status=$?
  [ "$woken" = 1 ] || break
done

# Another start helps at the limit, after a preemption (of a job that scancel ends Slurm says
# another state), after a failure that passes (75), and if an agent was killed.
again() {{
  [ "$status" != 0 ] || return 1
  case $asked in
    USR1) true ;;
    TERM) scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; return ;;
    *) [ "$status" = 75 ] || [ "$status" -ge 128 ] ;;
  esac || return 1
  [ "$SECONDS" -lt {least} ] || return 0
  echo "polyad: job $SLURM_JOB_ID ended within {least} s: it does not go back into the queue" >&2
  return 1
}}
if again; then
  echo "polyad: job $SLURM_JOB_ID goes back into the queue, to continue" >&2
  scontrol requeue "$SLURM_JOB_ID" || echo "polyad: error: job $SLURM_JOB_ID was not requeued" >&2
fi
exit "$status"
"""

# "$@": python -m polyad.launch.torchrun, its options, -m polyad.launch train CONFIG key=value
_ON_EACH_NODE = """
is_host=false
if [ "$SLURM_NODEID" = 0 ]; then is_host=true; fi
exec "${@:1:3}" --rdzv-backend c10d --rdzv-endpoint "$POLYAD_ENDPOINT" \\
  --rdzv-id "$SLURM_JOB_ID" --rdzv-conf "is_host=$is_host" --local-addr "$SLURMD_NODENAME" "${@:4}"
"""


def find_sbatch() -> str:
    """Returns the path of `sbatch`; raises a LaunchError if there is none."""
    if path := shutil.which("sbatch"):
        return path
    raise LaunchError(
        "--via: slurm needs sbatch, which is not on the PATH; start it on a login node of the "
        "cluster, or add --dry-run to write the script alone"
    )


def write_script(folder: Path, name: str, text: str) -> str:
    """Writes a script into the folder of a run's launch files; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, text.encode(errors="surrogateescape"))
    return str(folder / name)


def submit(script: str, sbatch: str) -> str:
    """Submits a script.

    Returns:
        What `sbatch` said, and the script.

    Raises:
        SubmissionError: it failed, or could not be started.
    """
    words = [sbatch, script]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SubmissionError(f"{sbatch} cannot be started: {error.strerror}") from None
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise SubmissionError(f"sbatch refused {script}: {why}")
    return f"{done.stdout.strip()}\n{script}"
