"""The environment of a result, and what must be equal on all processes of a run."""

import hashlib
import json
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from polyad.data.files import write_whole
from polyad.model.config import flatten
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MANIFEST_FILE
from polyad.parallel.weights import is_weights_folder
from polyad.train.config.run import RunConfig
from polyad.train.state import package_versions
from polyad.train.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = 65536
"""Bytes of each of the three samples of a weight file in its digest."""
_BY_CONTENTS = ("data.path", "run.folder")
"""Keys whose values may differ between hosts; the folders' contents are compared instead."""


def write_environment(folder: Path, world_size: int) -> None:
    """Writes `environment.json`, which describes the newest start of a run."""
    environment = {
        "command": shlex.join(["polyad", *sys.argv[1:]]),
        "git_commit": _commit(),
        "versions": package_versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": world_size,
    }
    write_whole(folder / "environment.json", json.dumps(environment, indent=1))


def _commit() -> str | None:
    """The commit of Polyad's code, `-dirty` if files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():  # an installed copy may be inside another project's checkout
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
    facts = {f"the version of {name}": value for name, value in package_versions().items()}
    facts["Polyad's commit"] = f"{_commit()}"
    if config is None:
        return facts
    keys = flatten(config.model_dump(mode="json"))
    settings = {key: json.dumps(keys[key]) for key in keys if key not in _BY_CONTENTS}
    start = Path(config.checkpoint.init_from or "")
    if config.checkpoint.init_from and is_weights_folder(start):
        settings["checkpoint.init_from"] += f" (contents {folder_digest(start)})"
    if task is not None:
        validation = ("validation",) if task.has_validation else ()
        for name in ("train", *validation) if split is None else (split,):
            key, _, _ = task.place.partition(":")
            settings[f"{key} ({name})"] = f"contents {task.contents(name)[:12]}"
    return settings | facts


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


def check_same_checkpoint(key: str, checkpoint: Path) -> None:
    """Checks that all processes find the same checkpoint at a place; all call it together.

    Args:
        key: the key that names it.
        checkpoint: its folder, chosen by rank 0; a host may have another one there on its own disk.

    Raises:
        DisagreementError: on every process, if one finds a different checkpoint, or none.
    """
    try:
        manifest = (checkpoint / MANIFEST_FILE).read_bytes()
        contents = f"contents {hashlib.sha256(manifest).hexdigest()[:12]}"
    except OSError as error:
        contents = f"{error.strerror}"
    comm.agree({f"{key}: {checkpoint}": contents})
