"""What has to be the same on all processes of a run, as names and values that they compare."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parallel.huggingface import is_huggingface_folder
from parallel.plain_weights import is_plain_folder
from train.config.run import RunConfig
from train.state import package_versions
from train.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = 65536
"""Bytes of a file of weights that its digest takes from each of three places."""
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
    facts["POLYAD_KERNELS"] = os.environ.get("POLYAD_KERNELS", "unset")
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
        for path in sorted((ROOT / room).rglob("*.py")):
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


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", json.dumps(value, ensure_ascii=False)
