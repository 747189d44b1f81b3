"""Writes a file to the run's folder and submits it to a scheduler."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from polyad.data.files import write_whole
from polyad.launch.via.hosts import LaunchError


class SubmissionError(RuntimeError):
    """A scheduler rejected a job: one line with its reason."""

    exit_status = 1


def launch_folder(folder: Path) -> Path:
    """The folder of a run's launch files; the trainer accepts a run folder with nothing else as
    new."""
    from polyad.train.config.plan import LAUNCH_FOLDER  # not at the top: it imports torch

    return folder.absolute() / LAUNCH_FOLDER


def write_launch_file(folder: Path, name: str, text: str) -> str:
    """Writes a script or a manifest to `launch/NAME` in the run's folder; returns its path."""
    place = launch_folder(folder)
    place.mkdir(parents=True, exist_ok=True)
    file = place / name
    write_whole(file, text.encode(errors="surrogateescape"))
    return str(file)


def check_gpus(gpus_per_node: int | None, processes_per_node: int) -> None:
    """Raises a LaunchError if a node would have fewer GPUs than processes."""
    if gpus_per_node is not None and gpus_per_node < processes_per_node:
        raise LaunchError(
            f"--gpus-per-node: {gpus_per_node} is not allowed with --processes-per-node "
            f"{processes_per_node}, each of which takes one"
        )


def find_program(via: str, program: str, advice: str) -> str:
    """Returns the path of a scheduler's command; raises a LaunchError with advice if not on
    PATH."""
    found = shutil.which(program)
    if found is None:
        raise LaunchError(f"--via: {via} needs {program}, which is not on the PATH; {advice}")
    return found


def hand_in(words: Sequence[str], refused: str, reason: Callable[[str], str]) -> str:
    """Runs a scheduler's command on a file.

    Args:
        words: the command, with the file as last word.
        refused: start of the error line if it fails, without the file.
        reason: converts its output to one line in that case.

    Returns:
        Its output, and the file.

    Raises:
        SubmissionError: it failed, or could not be started.
    """
    program, file = words[0], words[-1]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SubmissionError(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        why = reason(done.stderr) or f"status {done.returncode}"
        raise SubmissionError(f"{refused} {file}: {why}")
    return f"{done.stdout.strip()}\n{file}"
