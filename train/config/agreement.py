"""What has to be the same on all processes of a run, as names and values that they compare."""

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polyad.parallel.checkpoint.format import MANIFEST_FILE
from polyad.parallel.comm import World, from_all
from polyad.parallel.families import is_huggingface_folder
from polyad.parallel.meeting import DisagreementError, comparison
from polyad.parallel.plain_weights import is_plain_folder
from polyad.train.config.run import RunConfig
from polyad.train.state import package_versions
from polyad.train.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = 65536
"""Bytes of a file of weights that its digest takes from each of three places."""
VARIABLES = (
    "POLYAD_KERNELS", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
)  # fmt: skip
"""Variables of the environment that change what is computed."""
_OF_CODE = (".py", ".c", ".h", ".txt")
_BY_CONTENTS = ("data.path", "run.folder")
"""Keys whose values may differ between hosts: what the folders hold is compared."""


def agreed_facts(
    config: RunConfig | None, task: Task[Any] | None, split: str | None = None
) -> dict[str, str]:
    """Describes what a process is about to do, so that others can compare it with theirs.

    Args:
        config: of the run, with all that the data decides filled in if the task is given.
        task: opened; None: the data is not looked at.
        split: the only one that is read; None: those of training and of validation.

    Returns:
        JSON or plain text by name: keys of the configuration in full, and what they do not tell.
    """
    facts = {f"the version of {name}": f"{value}" for name, value in versions().items()}
    facts["Polyad's code"] = code_digest()
    facts |= {name: os.environ.get(name) or "unset" for name in VARIABLES}
    facts |= dict(_plugins())
    if config is None:
        return facts
    keys = dict(_leaves(config.model_dump(mode="json")))
    settings = {key: value for key, value in keys.items() if key not in _BY_CONTENTS}
    start = Path(config.checkpoint.init_from or "")
    if config.checkpoint.init_from and (is_huggingface_folder(start) or is_plain_folder(start)):
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


def code_digest() -> str:
    """Digests Polyad's own files: clones of two hosts may differ with one version number."""
    digest = hashlib.sha256()
    for room in ("data", "launch", "model", "parallel", "train"):
        files = (path for path in (ROOT / room).rglob("*") if path.suffix in _OF_CODE)
        for path in sorted(files):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def folder_digest(folder: Path) -> str:
    """Digests the files of a folder of weights by name, size, and three samples of each.

    Training changes all numbers of a tensor, so samples tell two folders apart.
    """
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLED)):
                file.seek(start)
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()[:12]


def check_same_checkpoint(key: str, checkpoint: Path, world: World) -> None:
    """Checks that all hosts have the same checkpoint at a place; all processes call it together.

    Rank 0 has chosen it, and the others read it there, perhaps from a disk of their own.

    Args:
        key: that names it.
        checkpoint: its folder, the same on all.
        world: this process; one of each host looks.

    Raises:
        DisagreementError: on every process, if a host has another one, or none.
    """
    contents = ""
    if world.local_rank == 0:
        try:
            found = (checkpoint / MANIFEST_FILE).read_bytes()
            contents = f"contents {hashlib.sha256(found).hexdigest()[:12]}"
        except OSError as error:
            contents = f"{error.strerror}"
    told = from_all((f"{socket.gethostname()} (rank {world.rank})", contents))
    facts = [(name, {f"{key}: {checkpoint}": contents}) for name, contents in told if contents]
    if differences := comparison(facts):
        raise DisagreementError(f"{differences[0]}; all processes need the same")


def _plugins() -> Iterator[tuple[str, str]]:
    for name in filter(None, map(str.strip, os.environ.get("POLYAD_PLUGINS", "").split(","))):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            contents = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
            yield f"POLYAD_PLUGINS: {name}", f"contents {contents}"


def _leaves(tree: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value, ensure_ascii=False)
