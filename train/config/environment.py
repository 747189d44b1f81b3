"""The environment of a result: command, code, versions and machine; and which of these must be
equal on all processes of a run, as names and values to compare.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polyad.data.files import write_whole
from polyad.data.json_reader import read_json
from polyad.parallel.checkpoint.format import MANIFEST_FILE
from polyad.parallel.comm import DisagreementError, World, comparison, from_all
from polyad.parallel.weights import is_weights_folder
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.state import package_versions
from polyad.train.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]


def describe_environment(world_size: int) -> dict[str, Any]:
    """Returns JSON values that describe the environment: a run's `environment.json`."""
    commit = _commit()
    return {
        "command": shlex.join(["polyad", *sys.argv[1:]]),
        "git_commit": commit,
        "git_diff": _git("diff", "HEAD") if commit else None,
        "versions": package_versions(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch_threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def write_environment(folder: Path, world_size: int) -> None:
    """Writes `environment.json`; that of an earlier start is kept under `earlier`."""
    path = folder / "environment.json"
    earlier: list[Any] = []
    if path.exists():
        try:
            previous = read_json(path)
            earlier = [*previous.pop("earlier", []), previous]
        except (ValueError, TypeError, AttributeError):
            earlier = []
    now = describe_environment(world_size) | {"earlier": earlier}
    write_whole(path, json.dumps(now, indent=1))


def check_compiler(config: RunConfig) -> None:
    """Checks that the compiler for torch.compile exists: C on a GPU, C++ on a CPU.

    Raises:
        ConfigError: there is none.
    """
    if not config.model.compile:
        return
    if torch.cuda.is_available():
        language, key, usual = "C", "CC", ["gcc", "clang"]
    else:
        language, key, usual = "C++", "CXX", ["clang++" if sys.platform == "darwin" else "g++"]
    wanted = [os.environ[key]] if os.environ.get(key) else usual
    if not any(shutil.which(compiler) for compiler in wanted):
        raise ConfigError(
            f"model.compile: true needs a {language} compiler, but no {' and no '.join(wanted)} "
            f"was found; install one (Debian: apt install {usual[0]}), name it in {key}, or set "
            "model.compile=false"
        )


def _commit() -> str | None:
    """The commit of Polyad's code; None if it is not a checkout."""
    # An installed copy may be inside a checkout of another project, whose commit is irrelevant.
    return _git("rev-parse", "HEAD") if _git("rev-parse", "--show-prefix") == "" else None


def _git(*arguments: str) -> str | None:
    """The output of git for the code's folder; None if it is not a checkout."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


SAMPLED = 65536
"""Bytes of each of the three samples of a weight file in its digest."""
_BY_CONTENTS = ("data.path", "run.folder")
"""Keys whose values may differ between hosts; the folders' contents are compared instead."""


def agreed_facts(
    config: RunConfig | None, task: Task[Any] | None, split: str | None = None
) -> dict[str, str]:
    """Describes what a process is about to do, for comparison between processes.

    Args:
        config: the run's configuration, completed from the data if the task is given.
        task: the opened task; None: the data is ignored.
        split: the only split to read; None: training and validation.

    Returns:
        JSON or plain text by name: all keys of the configuration, and other facts.
    """
    facts = {f"the version of {name}": f"{value}" for name, value in versions().items()}
    facts["Polyad's commit"] = f"{_commit()}"
    if config is None:
        return facts
    keys = dict(_leaves(config.model_dump(mode="json")))
    settings = {key: value for key, value in keys.items() if key not in _BY_CONTENTS}
    start = Path(config.checkpoint.init_from or "")
    if config.checkpoint.init_from and is_weights_folder(start):
        settings["checkpoint.init_from"] += f" (contents {folder_digest(start)})"
    if task is not None:
        validation = ("validation",) if task.has_validation else ()
        for name in ("train", *validation) if split is None else (split,):
            key, _, _ = task.place.partition(":")
            settings[f"{key} ({name})"] = f"contents {task.contents(name)[:12]}"
    return settings | facts


def versions() -> dict[str, str | None]:
    """The versions of packages, of Python and of a GPU's libraries."""
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        **package_versions(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def folder_digest(folder: Path) -> str:
    """Digests the files of a folder of weights by name, size, and three samples of each.

    Training changes every number of a tensor, so samples distinguish folders. Report pages in the
    folder are ignored.
    """
    digest = hashlib.sha256()
    files = (each for each in folder.iterdir() if each.is_file() and each.suffix != ".html")
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLED)):
                file.seek(start)
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()[:12]


def check_same_checkpoint(key: str, checkpoint: Path, world: World) -> None:
    """Checks that all hosts have the same checkpoint at a place; all processes call it together.

    Rank 0 has chosen it, and other processes read it at the same path, possibly from their own
    disk.

    Args:
        key: the key that names it.
        checkpoint: its folder, the same on all hosts.
        world: this process; one per host checks.

    Raises:
        DisagreementError: on every process, if a host has a different one, or none.
    """
    contents = ""
    if world.local_rank == 0:
        try:
            manifest = (checkpoint / MANIFEST_FILE).read_bytes()
            contents = f"contents {hashlib.sha256(manifest).hexdigest()[:12]}"
        except OSError as error:
            contents = f"{error.strerror}"
    hosts = from_all((f"{socket.gethostname()} (rank {world.rank})", contents))
    facts = [(name, {f"{key}: {checkpoint}": contents}) for name, contents in hosts if contents]
    if differences := comparison(facts):
        raise DisagreementError(f"{differences[0]}; all processes need the same")


def _leaves(tree: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value, ensure_ascii=False)
