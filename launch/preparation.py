"""`polyad prepare` for text: options for parts, steps on one machine, and with a scheduler."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from polyad.launch.command import Argument, Group, UsageError, non_negative, positive
from polyad.launch.output import align, only_results_on_stdout
from polyad.launch.via.options import ACCOUNT, LIMIT, MEMORY, PARTITION, QOS, asked_of, check_ways

if TYPE_CHECKING:
    from polyad.data.text.manifest import Manifest
    from polyad.data.text.prepare import Preparation
    from polyad.launch.via.slurm import SlurmJob

SLURM = (
    *("time", "partition", "account", "qos", "job_name", "cpus_per_node", "memory_per_node"),
    *("image", "mount"),
)
"""Options of --via slurm, named as attributes of a `SlurmJob`."""
_STEPS = ("part", "begin", "join")
_OF_PARTS = (*_STEPS, "processes", "dry_run")
IN_PARTS = Group(
    "preparation in parts",
    "For text that one machine would take too long to tokenize. The resulting files are identical.",
)
BY_SLURM = Group(
    "--via slurm",
    "Options of each part's job. The cluster's defaults apply to whatever is not given.",
)


@dataclass(frozen=True, kw_only=True)
class PartsOptions:
    """Options of `polyad prepare` for parts."""

    parts: Annotated[
        int | None,
        Argument(
            "tokenize the text in N independent parts, in .DIR.parts, and join them; run the same "
            "command again to continue after an interruption (finished parts are kept)",
            "N",
            positive,
            group=IN_PARTS,
        ),
    ] = None
    processes: Annotated[
        int | None,
        Argument(
            "number of parts to tokenize at a time on this machine; default 1, which uses all "
            "cores",
            "P",
            positive,
            group=IN_PARTS,
        ),
    ] = None
    begin: Annotated[
        bool,
        Argument(
            "only train the tokenizer, before the parts; not needed with an existing tokenizer",
            group=IN_PARTS,
            one_of="step",
        ),
    ] = False
    part: Annotated[
        int | None,
        Argument(
            "only tokenize part K, from 0 to N - 1",
            "K",
            non_negative,
            group=IN_PARTS,
            one_of="step",
        ),
    ] = None
    join: Annotated[bool, Argument("only join the parts", group=IN_PARTS, one_of="step")] = False
    via: Annotated[
        Literal["local", "slurm"],
        Argument(
            "local: on this machine; slurm: as a job array, followed by a job that joins the parts",
            group=IN_PARTS,
        ),
    ] = "local"
    dry_run: Annotated[
        bool,
        Argument("with --via slurm: write the job scripts without submitting them", group=IN_PARTS),
    ] = False
    time: Annotated[str | None, LIMIT.within(BY_SLURM)] = None
    partition: Annotated[str | None, PARTITION.within(BY_SLURM)] = None
    account: Annotated[str | None, ACCOUNT.within(BY_SLURM)] = None
    qos: Annotated[str | None, QOS.within(BY_SLURM)] = None
    memory_per_node: Annotated[str | None, MEMORY.within(BY_SLURM)] = None
    job_name: Annotated[
        str | None, Argument("name of the jobs; default: the name of DIR", "NAME", group=BY_SLURM)
    ] = None
    cpus_per_node: Annotated[
        int | None,
        Argument(
            "CPU cores per part; default: whole nodes (--exclusive)", "C", positive, group=BY_SLURM
        ),
    ] = None
    image: Annotated[
        str | None,
        Argument(
            "container image to run in: one for pyxis, or an Apptainer .sif file",
            "IMAGE",
            group=BY_SLURM,
        ),
    ] = None
    mount: Annotated[
        str | None,
        Argument(
            "folder to mount in the container, which contains the text and DIR; default: the "
            "working folder",
            "PATH",
            group=BY_SLURM,
        ),
    ] = None


def check_parts(asked: PartsOptions) -> None:
    """Checks that the options for parts are consistent.

    Raises:
        ValueError: with an `exit_status` of 2: they are not.
    """
    values = vars(asked)
    check_ways(values, asked.via, dict.fromkeys(SLURM, ("slurm",)))
    # Part 0 counts as given; None and False do not.
    of_parts = [
        name for name in _OF_PARTS if values[name] is not None and values[name] is not False
    ]
    step = next((name for name in of_parts if name in _STEPS), None)
    if asked.parts is None:
        if of_parts:
            raise UsageError(f"--{of_parts[0].replace('_', '-')}: means nothing without --parts N")
        if asked.via != "local":
            raise UsageError(f"--via: {asked.via} needs --parts N, the number of its jobs")
        return
    if asked.via == "slurm" and (step or asked.processes):
        raise UsageError(
            f"--{step or 'processes'}: is not allowed with --via slurm, whose jobs take each step"
        )
    if asked.via != "slurm" and asked.dry_run:
        raise UsageError("--dry-run: is only for --via slurm")
    if step and asked.processes:
        raise UsageError(f"--processes: {asked.processes} is not allowed with --{step}")
    if asked.part is not None and asked.part >= asked.parts:
        raise UsageError(
            f"--part: {asked.part} is not allowed; 0 to {asked.parts - 1} with --parts "
            f"{asked.parts}"
        )


def prepare_text(given: dict[str, Any], options: PartsOptions) -> None:
    """Prepares text, or runs one step of a preparation in parts.

    Args:
        given: the options for text.
        options: the options for parts, already checked.
    """
    from polyad.data.text.job import Asked
    from polyad.data.text.parts import ranges
    from polyad.data.text.prepare import Preparation
    from polyad.launch.via.slurm import SlurmJob

    started = time.monotonic()
    asked = {field.name: given[field.name] for field in fields(Asked)}
    # A job killed at its time limit loses little, and has nothing to save.
    job = asked_of(SlurmJob, options, signal_seconds=None)
    with only_results_on_stdout() as stdout:
        output, overwrite = given["output"], given["overwrite"]
        parts = Preparation(Asked(**asked), output, options.parts, overwrite=overwrite)
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
            rest = f"missing: {ranges(left)}" if left else "all are there: join them with --join"
            stdout.write(
                f"part {options.part} of {options.parts}: {done.documents:,} documents, "
                f"{done.tokens:,} tokens in {time.monotonic() - started:.1f} s\n{rest}\n"
            )
            return
        elif options.join:
            manifest = parts.join()
        else:
            manifest = parts.all(options.processes or 1)
        stdout.write(prepared_table(manifest, output, time.monotonic() - started) + "\n")


def prepared_table(manifest: "Manifest", folder: str, seconds: float) -> str:
    """Formats prepared data by split; `seconds` is the duration of the preparation."""
    from polyad.data.text.prepare import left_out_of

    rows: list[tuple[str, ...]] = [("split", "documents", "tokens", "words", "bytes", "share")]
    total = sum(split.bytes for split in manifest.splits.values())
    for name, split in manifest.splits.items():
        counts = (split.documents, split.tokens, split.words, split.bytes)
        share = f"{100 * split.bytes / max(total, 1):.1f}%"
        rows.append((name, *(f"{count:,}" for count in counts), share))
    tokens = sum(split.tokens for split in manifest.splits.values())
    facts = []
    if manifest.split_by == "position":
        facts.append("split by position: the last parts of the text are held out")
    if manifest.files:
        files = (
            f"{count:,} {ending or 'without an ending'}" for ending, count in manifest.files.items()
        )
        facts.append(f"files read: {', '.join(files)}")
    if left := left_out_of(manifest):
        facts.append(f"left out: {left}")
    return "\n".join(
        [
            align(rows),
            *facts,
            f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s, "
            f"vocabulary {manifest.tokenizer.vocab_size:,}",
            f"in {folder}",
        ]
    )


def _by_slurm(
    parts: "Preparation", given: dict[str, Any], options: PartsOptions, job: "SlurmJob"
) -> str:
    """Writes the scripts and submits them; returns the jobs, or the commands that submit them."""
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
    """The options for text as words of a command line."""
    words = ["prepare"]
    for name, value in given.items():
        option = "--format" if name == "file_format" else f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words
