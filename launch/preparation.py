"""`polyad prepare --parts`: its options, the steps of one machine, and a scheduler's."""

import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.launch.output import only_results_on_stdout
from polyad.launch.parser import Parser, UsageError, non_negative, positive

if TYPE_CHECKING:
    from polyad.data.text.parts.prepare import InParts
    from polyad.launch.via.slurm import SlurmJob

SLURM = (
    *("time", "partition", "account", "qos", "job_name", "cpus_per_node", "memory_per_node"),
    *("image", "mount"),
)
"""Options of --via slurm, as attributes of a `SlurmJob`."""
_STEPS = ("part", "begin", "join")
_OF_PARTS = (*_STEPS, "processes", "dry_run")
OPTIONS = ("parts", *_OF_PARTS, "via", *SLURM)


def parts_arguments(parser: Parser) -> None:
    """Declares the options of `polyad prepare` that are of parts."""
    from polyad.launch.via.options import resource_arguments

    group = parser.add_argument_group(
        "in parts", "For text that is more than one machine's work; the files are the same."
    )
    add = group.add_argument
    add(
        "--parts",
        type=positive,
        metavar="N",
        help="encode N parts of the text independently, in .DIR.parts, and join them; the same "
        "command goes on, and keeps what is finished",
    )
    add(
        "--processes",
        type=positive,
        metavar="P",
        help="parts that are encoded at one time on this machine; default 1, which uses all cores",
    )
    step = group.add_mutually_exclusive_group()
    step.add_argument(
        "--begin",
        action="store_true",
        help="only train the tokenizer, before the parts; one that is given needs no such step",
    )
    step.add_argument(
        "--part", type=non_negative, metavar="K", help="only encode part K, from 0 to N - 1"
    )
    step.add_argument("--join", action="store_true", help="only join the parts")
    add(
        "--via",
        choices=("local", "slurm"),
        default="local",
        help="local: on this machine; slurm: a job array, and a job that joins after it",
    )
    add("--dry-run", action="store_true", help="slurm: only write the scripts")
    group = parser.add_argument_group(
        "--via slurm", "Of each part's job. What is not given is the cluster's default."
    )
    resource_arguments(group.add_argument)
    add = group.add_argument
    add("--job-name", metavar="NAME", help="default: the name of DIR")
    add(
        "--cpus-per-node",
        type=positive,
        metavar="C",
        help="cores for a part; default: whole nodes (--exclusive)",
    )
    add("--image", metavar="IMAGE", help="a container: for pyxis, or a .sif of Apptainer")
    add("--mount", metavar="PATH", help="the folder with text and DIR in it; default: this folder")


def take_parts(given: dict[str, Any]) -> Namespace:
    """Takes the options of parts out of those of `polyad prepare`.

    Args:
        given: All of them; those of text are left.

    Raises:
        ValueError: with an `exit_status` of 2: options that do not go together.
    """
    from polyad.launch.via.options import check_ways

    taken = Namespace(**{name: given.pop(name) for name in OPTIONS})
    values = vars(taken)
    check_ways(values, taken.via, dict.fromkeys(SLURM, ("slurm",)))
    # Part 0 is given, what is None or False is not.
    of_parts = [
        name for name in _OF_PARTS if values[name] is not None and values[name] is not False
    ]
    step = next((name for name in of_parts if name in _STEPS), None)
    if taken.parts is None:
        if of_parts:
            raise UsageError(f"--{of_parts[0].replace('_', '-')}: means nothing without --parts N")
        if taken.via != "local":
            raise UsageError(f"--via: {taken.via} needs --parts N, the number of its jobs")
        return taken
    if taken.via == "slurm" and (step or taken.processes):
        raise UsageError(
            f"--{step or 'processes'}: is not allowed with --via slurm, whose jobs take each step"
        )
    if taken.via != "slurm" and taken.dry_run:
        raise UsageError("--dry-run: is an option of --via slurm")
    if step and taken.processes:
        raise UsageError(f"--processes: {taken.processes} is not allowed with --{step}")
    if taken.part is not None and taken.part >= taken.parts:
        raise UsageError(
            f"--part: {taken.part} is not allowed; 0 to {taken.parts - 1} with --parts "
            f"{taken.parts}"
        )
    return taken


def prepare_in_parts(given: dict[str, Any], options: Namespace) -> None:
    """Takes the step of a preparation in parts that was asked for.

    Args:
        given: The options of text.
        options: Those of parts.
    """
    from polyad.data.text.job import Asked
    from polyad.data.text.parts.part import ranges
    from polyad.data.text.parts.prepare import InParts
    from polyad.launch.tables import prepared_table
    from polyad.launch.via.slurm import SlurmJob

    started = time.monotonic()
    asked = {field.name: given[field.name] for field in fields(Asked)}
    resources = {name: vars(options)[name] for name in SLURM}
    # A job that is killed at its limit loses little, and has nothing to save before.
    job = SlurmJob(**resources, signal_seconds=None)
    with only_results_on_stdout() as stdout:
        output, overwrite = given["output"], given["overwrite"]
        parts = InParts(Asked(**asked), output, options.parts, overwrite=overwrite)
        if parts.existing is not None:
            manifest = parts.existing
        elif options.via == "slurm":
            stdout.write(_by_slurm(parts, given, options, job) + "\n")
            return
        elif options.begin:
            left = parts.begin()
            stdout.write(f"{parts.folder}: {len(left)} of {options.parts} parts to encode\n")
            return
        elif options.part is not None:
            done, left = parts.part(options.part)
            documents = sum(split.documents for split in done.splits.values())
            tokens = sum(split.tokens for split in done.splits.values())
            rest = f"missing: {ranges(left)}" if left else "all are there: join them with --join"
            stdout.write(
                f"part {options.part} of {options.parts}: {documents:,} documents, {tokens:,} "
                f"tokens in {time.monotonic() - started:.1f} s\n{rest}\n"
            )
            return
        elif options.join:
            manifest = parts.join()
        else:
            manifest = parts.all(options.processes or 1)
        stdout.write(prepared_table(manifest, output, time.monotonic() - started) + "\n")


def _by_slurm(parts: "InParts", given: dict[str, Any], options: Namespace, job: "SlurmJob") -> str:
    """Writes the scripts and submits them; gives the jobs, or the commands that submit them."""
    from polyad.launch.via.slurm import find_sbatch
    from polyad.launch.via.slurm_array import ArrayJobs

    sbatch = None if options.dry_run else find_sbatch()
    trains = parts.needs_training()
    left = parts.left() if options.dry_run or trains else parts.begin()
    jobs = ArrayJobs(
        folder=parts.folder,
        name=Path(parts.output).name,
        job=job,
        command=[*_words(given), "--parts", str(options.parts)],
        begin=trains,
        left=left,
    )
    return jobs.submit(sbatch) if sbatch else jobs.write()


def _words(given: dict[str, Any]) -> list[str]:
    """The options of text as words of a command line."""
    words = ["prepare"]
    for name, value in given.items():
        option = "--format" if name == "file_format" else f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words
