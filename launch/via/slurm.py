"""`polyad launch --via slurm`: a batch script in the run's folder, and its submission.

The script is bash. Words of commands are quoted with shlex; `#SBATCH` lines are parsed by Slurm,
not by a shell, so their content must match a strict pattern.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polyad
from polyad.launch.via.hosts import LaunchError, image_name, mount_path, plain_name
from polyad.launch.via.submission import check_gpus, find_program, hand_in, launch_folder

SIGNAL_SLACK = 60
"""Slurm may send the signal this many seconds early (man sbatch, --signal)."""
MOST_SIGNAL_SECONDS = 65535
"""The longest time that Slurm accepts (man sbatch, --signal)."""

_TIME = re.compile(
    r"(?P<minutes>[0-9]{1,7})(:(?P<seconds>[0-5]?[0-9]))?"
    r"|(?P<hours>[0-9]{1,5}):(?P<hm>[0-5]?[0-9]):(?P<hs>[0-5]?[0-9])"
    r"|(?P<days>[0-9]{1,4})-(?P<dh>[0-9]{1,2})(:(?P<dm>[0-5]?[0-9])(:(?P<ds>[0-5]?[0-9]))?)?"
)
_MEMORY = re.compile(r"[0-9]{1,9}[KMGT]?")
_DIRECTIVE_PATH = re.compile(r"/[A-Za-z0-9_./+,@:=-]*")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The resources of a job; None leaves the cluster's default.

    Raises:
        LaunchError: a value is not valid for Slurm.
    """

    time: str | None = None
    """Time limit of the job: MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS and so on."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str | None = None
    """None: the name of the run's folder."""
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_per_node: str | None = None
    """With a unit, K, M, G or T; 0 is all memory."""
    signal_seconds: int | None = 120
    """Seconds before the time limit at which the job is requeued; None: never."""
    image: str | None = None
    """A container: an image or `.sqsh` file for pyxis, or a `.sif` file for Apptainer; None: this
    program's Python runs on the nodes."""
    mount: str | None = None
    """The folder mounted at the same path in the container, with the configuration, the data and
    the run's folder; None: the folder in which the job is submitted."""

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "job_name"):
            value = getattr(self, name)
            if value is not None:
                plain_name(value, f"--{name.replace('_', '-')}")
        for name, least in (("gpus_per_node", 1), ("cpus_per_node", 1), ("signal_seconds", 1)):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < least):
                option = f"--{name.replace('_', '-')}"
                raise LaunchError(f"{option}: {number!r} is not allowed, at least {least}")
        if self.signal_seconds is not None and self.signal_seconds > MOST_SIGNAL_SECONDS:
            raise LaunchError(
                f"--signal-seconds: {self.signal_seconds} is not allowed, at most "
                f"{MOST_SIGNAL_SECONDS}"
            )
        if self.memory_per_node is not None and not _MEMORY.fullmatch(self.memory_per_node):
            raise LaunchError(
                f"--memory-per-node: {self.memory_per_node!r} is not allowed; a number with K, M, "
                f"G or T, as in 480G, or 0 for all"
            )
        if self.image is not None:
            image_name(self.image)
        elif self.mount is not None:
            raise LaunchError(f"--mount: {self.mount!r} is not allowed without --image")
        if self.mount is not None:
            mount_path(self.mount)
        self._check_time()

    def container(self, workplace: str) -> tuple[list[str], list[str]]:
        """Returns options of srun and a command prefix that run the agent in the container.

        Args:
            workplace: the folder in which the agent works.

        Raises:
            LaunchError: the container would not have that folder, or its path is not valid.
        """
        if self.image is None:
            return [], []
        mount = self.mount or mount_path(workplace)
        if not Path(workplace).is_relative_to(mount):
            raise LaunchError(f"--mount: {mount} does not contain the working folder, {workplace}")
        if self.image.endswith(".sif"):
            place = ["--bind", mount, "--pwd", workplace]
            return [], ["apptainer", "exec", "--nv", *place, self.image]
        return [
            f"--container-image={self.image}",
            f"--container-mounts={mount}:{mount}",
            f"--container-workdir={workplace}",
        ], []

    def _check_time(self) -> None:
        if self.time is None:
            return
        limit = seconds(self.time)
        if self.signal_seconds is not None and limit <= self.signal_seconds + SIGNAL_SLACK:
            # The signal would come at once, and again in each following job.
            raise LaunchError(
                f"--time: {self.time} is {limit} s; more than --signal-seconds "
                f"{self.signal_seconds} + {SIGNAL_SLACK} s is needed"
            )

    def check_grace(self, grace_seconds: float) -> None:
        """Raises a LaunchError if saving may take longer than the time after the signal.

        Args:
            grace_seconds: time from the signal to the end of a process, `monitor.grace_seconds`.
        """
        if self.signal_seconds is not None and self.signal_seconds < grace_seconds:
            raise LaunchError(
                f"--signal-seconds: {self.signal_seconds} is less than monitor.grace_seconds: "
                f"{grace_seconds:g}, the time that the run may take to save"
            )

    def directives(self, name: str, nodes: int, output: str, array: str | None = None) -> list[str]:
        """Returns the `#SBATCH` lines.

        Args:
            name: default name of the job.
            nodes: number of nodes.
            output: its output file, a checked path.
            array: task numbers of a job array.
        """
        asked: dict[str, object] = {
            "job-name": self.job_name or name,
            "array": array,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_node,
            "mem": self.memory_per_node,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "signal": self.signal_seconds and f"B:USR1@{self.signal_seconds}",
            "output": output,
            "open-mode": "append",  # a requeued job appends to its file
        }
        lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
        if self.cpus_per_node is None:
            lines.append("#SBATCH --exclusive")  # else each task gets only one core
        return [*lines, "#SBATCH --requeue"]


def seconds(text: str) -> int:
    """Parses a time in the format of `sbatch --time`, in seconds.

    Raises:
        LaunchError: it is not a time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise LaunchError(
            f"--time: {text!r} is not allowed; MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, "
            f"DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = 24 * part["days"] + part["dh"] + part["hours"]
    minutes = 60 * hours + part["minutes"] + part["hm"] + part["dm"]
    return 60 * minutes + part["seconds"] + part["hs"] + part["ds"]


def script_text(
    folder: Path,
    job: SlurmJob,
    agent: Sequence[str],
    nodes: int,
    processes_per_node: int,
    variables: Mapping[str, str],
) -> str:
    """Returns the batch script.

    Args:
        folder: the run's folder.
        job: the job's resources.
        agent: torchrun's command without a rendezvous, which only the job knows.
        nodes: number of nodes.
        processes_per_node: P.
        variables: environment variables of all processes.

    Raises:
        LaunchError: the folder's name is not valid in a `#SBATCH` line, or there are fewer GPUs
            than processes.
    """
    check_gpus(job.gpus_per_node, processes_per_node)
    place = directive_path(launch_folder(folder), "run.folder")
    directives = job.directives(job_name(folder.absolute().name), nodes, f"{place}/slurm-%j.out")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # srun does not inherit this from the job.
    cpus = job.cpus_per_node or '"${SLURM_CPUS_ON_NODE:-1}"'
    options, inside = job.container(os.getcwd())
    python = agent[0] if job.image is None else "python"
    return _SCRIPT.format(
        directives="\n".join(directives),
        workplace=shlex.quote(os.getcwd()),
        exports="".join(f"{line}\n" for line in [*python_path(job.image), *exports]),
        processes=processes_per_node,
        cpus=cpus,
        container="".join(f" {shlex.quote(word)}" for word in options),
        on_each_node=shlex.join([*inside, "bash", "-c", _ON_EACH_NODE]),
        agent=shlex.join([python, *agent[1:]]),
    )


def python_path(image: str | None) -> list[str]:
    """Returns script lines with which Python finds Polyad, in a container if there is an image.

    Files in the working folder may have the same names as Polyad's packages.
    """
    root = shlex.quote(str(Path(polyad.__file__).resolve().parent.parent))
    here = [] if image else [f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{root}']
    return ["export PYTHONSAFEPATH=1", *here]


def directive_path(launch_folder: Path, option: str) -> str:
    """Returns the path of a folder of launch files for an `#SBATCH` line.

    Raises:
        LaunchError: it has characters with a meaning for Slurm.
    """
    place = str(launch_folder)
    if not _DIRECTIVE_PATH.fullmatch(place):
        raise LaunchError(
            f"{option}: {str(launch_folder.parent)!r} cannot stand in an #SBATCH line; only "
            f"letters, digits and _./+,@:=- are allowed with --via slurm"
        )
    return place


def job_name(folder: str) -> str:
    """The name of a job, derived from a folder's."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "-", folder)[:64].lstrip(".+-") or "polyad"


_SCRIPT = """\
#!/usr/bin/env bash
# Written by `polyad launch --via slurm`, which overwrites it.
{directives}

# Near the limit Slurm sends USR1 to this script alone, which hands it on: the processes save the
# step that they are in and end, and the job goes back into the queue. The next start continues from
# there. TERM, of scancel and of a node that goes down, is handed on too, and waited for.
woken=0
asked=
agents=
stop() {{
  woken=1
  asked=${{asked:-$1}}
  [ -z "$agents" ] || kill "-$1" "$agents"  # srun passes it on to torchrun on each node
}}
near_the_limit() {{
  echo "polyad: the time limit is near; stopping, then requeueing job $SLURM_JOB_ID" >&2
  stop USR1
}}
trap near_the_limit USR1
trap 'stop TERM' TERM INT

cd {workplace} || exit 1
{exports}
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

srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=1{container} \\
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
if [ "$asked" = USR1 ] && [ "$status" != 0 ]; then
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
    return find_program(
        "slurm",
        "sbatch",
        "start it on a login node of the cluster, or add --dry-run to write the script alone",
    )


def submit(script: str, sbatch: str) -> str:
    """Submits a script; see `hand_in`."""
    return hand_in([sbatch, script], "sbatch refused", lambda said: " ".join(said.split()))
