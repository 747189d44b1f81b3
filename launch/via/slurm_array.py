"""`polyad prepare --parts N --via slurm`: a job array of parts, and a job that joins them.

The scripts are in `.DIR.parts/launch`, in bash; words are quoted as in `slurm.py`.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from polyad.data.files import write_whole
from polyad.data.text.parts import ranges
from polyad.data.text.plan import LAUNCH_FOLDER
from polyad.launch.via.slurm import SlurmJob, directive_path, job_name, python_path
from polyad.launch.via.submission import SubmissionError, hand_in
from polyad.train.errors import shown

AFTER = "--kill-on-invalid-dep=yes"
"""Option that cancels a job whose dependency has failed."""


@dataclass(frozen=True, kw_only=True)
class ArrayJobs:
    """The jobs of a preparation in parts."""

    folder: Path
    """The folder of the parts."""
    name: str
    """Name of the prepared folder."""
    job: SlurmJob
    command: list[str]
    """`prepare` with its options, without the step."""
    begin: bool
    """Whether to train the tokenizer first."""
    left: list[int]
    """The missing parts."""

    def write(self) -> str:
        """Writes the scripts.

        Returns:
            Shell commands that submit them.

        Raises:
            LaunchError: A path is not valid in an `#SBATCH` line.
        """
        lines, before = [], ""
        scripts = self._scripts()
        for step, script in scripts.items():
            after = f' --dependency="afterok:${{{before}%%;*}}" {AFTER}' if before else ""
            command = f"sbatch --parsable{after} {shlex.quote(script)}"
            last = step == list(scripts)[-1]
            lines.append(command if last else f"{step}=$({command})")
            before = step
        return "\n".join(lines)

    def submit(self, sbatch: str) -> str:
        """Writes the scripts and submits them, each to start after the previous one has succeeded.

        Args:
            sbatch: The path of the command.

        Returns:
            A line for each job with its step, number and script.

        Raises:
            LaunchError: A path is not valid in an `#SBATCH` line.
            SubmissionError: Slurm rejected a job.
        """
        lines, before = [], ""
        for step, script in self._scripts().items():
            after = [f"--dependency=afterok:{before}", AFTER] if before else []
            words = [sbatch, "--parsable", *after, script]
            said = hand_in(words, "sbatch refused", lambda said: " ".join(said.split()))
            found = re.match(r"([0-9]+)(;|\s)", said)
            if found is None:
                raise SubmissionError(f"sbatch printed no job number: {shown(said.strip())}")
            before = found[1]
            lines.append(f"{step}: job {before}, {script}")
        return "\n".join(lines)

    def _scripts(self) -> dict[str, str]:
        """Writes a script for each step; returns their paths in order."""
        place = self.folder / LAUNCH_FOLDER
        directive_path(place, "--output")
        texts = {}
        if self.begin:
            texts["begin"] = self._text(place, ["--begin"])
        if self.left:
            texts["parts"] = self._text(place, [], array=ranges(self.left))
        texts["join"] = self._text(place, ["--join"])
        place.mkdir(parents=True, exist_ok=True)
        paths = {}
        for step, text in texts.items():
            path = place / f"{step}.sh"
            write_whole(path, text.encode(errors="surrogateescape"))
            paths[step] = str(path)
        return paths

    def _text(self, place: Path, step: list[str], array: str | None = None) -> str:
        output = f"{place}/slurm-{'%A_%a' if array else '%j'}.out"
        directives = self.job.directives(job_name(self.name), 1, output, array=array)
        options, inside = self.job.container(os.getcwd())
        python = sys.executable if self.job.image is None else "python"
        command = shlex.join([*inside, python, "-m", "polyad.launch", *self.command, *step])
        return _SCRIPT.format(
            directives="\n".join(directives),
            workplace=shlex.quote(os.getcwd()),
            exports="".join(f"{line}\n" for line in python_path(self.job.image)),
            number=_NUMBER if array else "",
            cpus=self.job.cpus_per_node or '"${SLURM_CPUS_ON_NODE:-1}"',
            container="".join(f" {shlex.quote(word)}" for word in options),
            command=command + (' --part "$SLURM_ARRAY_TASK_ID"' if array else ""),
        )


_SCRIPT = """\
#!/usr/bin/env bash
# Written by `polyad prepare --via slurm`, which overwrites it.
{directives}

cd {workplace} || exit 1
{exports}{number}exec srun --ntasks=1 --cpus-per-task={cpus}{container} \\
  {command}
"""

_NUMBER = """\
case $SLURM_ARRAY_TASK_ID in
  "" | *[!0-9]*) echo "polyad: error: not a job array: it is no sbatch --array" >&2; exit 2 ;;
esac
"""
