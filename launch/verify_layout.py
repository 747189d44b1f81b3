"""`polyad verify-layout`: compares a small model on the layout with one process.

The command becomes torchrun on this machine, or is one of the processes that torchrun or Slurm has
started on several hosts. Rank 0 runs a process that computes the reference before it joins.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyad.data.files import temporary_folder
from polyad.launch.ending import guard
from polyad.launch.machine import (
    END_WITH_PARENT,
    end_with_launcher,
    prepare_environment,
)
from polyad.train.errors import ConfigError, RunError
from polyad.train.results import aligned

if TYPE_CHECKING:
    from polyad.train.config.run import RunConfig
    from polyad.train.layout.verify import Reference

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def verify_layout(config: Path, overrides: Sequence[str], processes: int) -> dict[str, Any] | None:
    """Compares the layout of this group of processes with one process; all call this.

    Args:
        config: a run's configuration, or a folder; see `config_at`.
        overrides: `key=value`.
        processes: total number of processes.

    Returns:
        JSON values on rank 0; None on other ranks.

    Raises:
        ConfigError: the configuration does not fit, or has another kind of model.
        RunError: the reference could not be computed.
    """
    end_with_launcher()
    prepare_environment()
    from polyad.parallel import comm
    from polyad.train.layout.small import small_config
    from polyad.train.reading import config_at

    given = config_at(config, overrides, processes)
    small = small_config(given, processes)
    with _shared_folder(Path(given.run.folder)) as place:
        # Before the group exists: the others wait for rank 0 to join.
        ranks = processes // small.parallel.tensor_parallel_size
        theirs = _reference(small, ranks, place) if comm.environment_rank() == 0 else None
        return _compare(small, theirs, place)


def _compare(small: "RunConfig", theirs: "Reference | None", place: Path) -> dict[str, Any] | None:
    from polyad.parallel import comm
    from polyad.parallel.checkpoint.load import Checkpoint
    from polyad.train.config.environment import agreed_facts
    from polyad.train.layout.trial import run_trial, save_again
    from polyad.train.layout.verify import differences, result_of

    degrees = small.parallel
    world = comm.initialize(
        degrees.timeout_minutes,
        degrees.tensor_parallel_size,
        degrees.expert_parallel_size,
        agreed_facts(small, None),
    )
    folder = Path(comm.from_main(str(place)))
    ours = run_trial(small, world, folder)
    trained = comm.from_main(str(theirs.trial.trained) if theirs else "")
    again = save_again(small, world, Path(trained), folder)
    found = list(differences(small, ours, *theirs, Checkpoint(again))) if theirs else []
    comm.barrier()  # before the folder is removed
    comm.shutdown()
    return result_of(small, world, found) if world.is_main else None


@contextmanager
def _shared_folder(run: Path) -> Iterator[Path]:
    """Yields a folder shared by all processes: beside the run's if there are several hosts."""
    if os.environ.get("RANK", "0") != "0":
        yield run  # rank 0 determines it
        return
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    parent = None if one_host else run.absolute().parent
    with temporary_folder(".polyad-verify-", parent) as made:
        yield made


def _reference(small: "RunConfig", data_parallel_size: int, place: Path) -> "Reference":
    """Computes the reference in a child process."""
    from polyad.train.layout.trial import Trial
    from polyad.train.layout.verify import Reference, alone

    folder = place / "alone"
    folder.mkdir()
    simple = alone(small, data_parallel_size)
    (folder / "config.yaml").write_text(simple.to_yaml(), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in OF_TORCHRUN}
    environment = {
        key: value for key, value in environment.items() if not key.startswith("TORCHELASTIC_")
    } | {END_WITH_PARENT: str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-m", "polyad.launch.verify_layout", str(folder)],
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RunError("the reference run in one process failed")
    found = json.loads((folder / "trials.json").read_text())
    return Reference(*map(Trial.model_validate, found))


def table(result: dict[str, Any]) -> str:
    """Formats the result."""
    shape = ", ".join(
        f"{name} {result[key]}"
        for name, key in (
            ("data parallel", "data_parallel_size"),
            ("tensor parallel", "tensor_parallel_size"),
            ("expert parallel", "expert_parallel_size"),
            ("ZeRO", "zero_stage"),
        )
    )
    rows = [("", "compared", "largest difference")]
    for kind, about in result["differences"].items():
        apart = about["largest_difference"]
        shown = "none" if not apart else f"{apart:.1e}  {about['of']}"
        rows.append((kind, f"{about['compared']}", shown))
    lines = aligned(rows, "<><")
    most = max(each["largest_difference"] for each in result["differences"].values())
    end = (
        f"the layouts agree (largest difference {most:.0e})"
        if result["equal"]
        else f"{result['wrong_in_all']} numbers differ"
    )
    return "\n".join([f"{result['processes']} processes: {shape}", *lines, end])


def check(result: dict[str, Any]) -> None:
    """Ends the command with status 1 if the layout's results differ.

    Raises:
        RunError: they do; the line names the first parameter.
    """
    if result["equal"]:
        return
    first = result["wrong"][0]
    place = f" at {first['place']}" if first["place"] else ""
    raise RunError(
        f"this layout does not compute what one process does: {first['kind']} of {first['name']} "
        f"differs by {first['relative']:.1e} of its largest number{place}"
    )


def check_processes(asked: int | None, found: int) -> int:
    """Returns the number of processes to compare.

    Args:
        asked: `--processes`.
        found: number from the environment, 1 without torchrun.

    Raises:
        ConfigError: the numbers differ, or there is only one process.
    """
    if asked is not None and found > 1 and asked != found:
        raise ConfigError(f"--processes: {asked} is not allowed, {found} processes were started")
    processes = asked or found
    if processes < 2:
        raise ConfigError(f"--processes: {processes} is not allowed; it must be at least 2")
    return processes


def _alone(folder: Path) -> int:
    from polyad.parallel import comm
    from polyad.train.config.run import load_config
    from polyad.train.layout.verify import run_alone

    trials = run_alone(load_config(folder / "config.yaml"), folder)
    found = [trial.model_dump(mode="json") for trial in trials]
    (folder / "trials.json").write_text(json.dumps(found), encoding="utf-8")
    comm.shutdown()
    return 0


def main() -> None:
    """Computes the reference; the only argument is the folder with the small config.yaml."""
    end_with_launcher()
    prepare_environment()
    status = guard(lambda: _alone(Path(sys.argv[1])))
    from polyad.parallel import comm

    comm.leave(status)


if __name__ == "__main__":
    main()
