"""Records what a result depends on beside its configuration: command, code, versions, machine."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from polyad.data.files import write_whole
from polyad.data.json_reader import read_json
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.state import package_versions

ROOT = Path(__file__).resolve().parents[2]


def describe_environment(world_size: int) -> dict[str, Any]:
    """JSON values that say what ran: `environment.json` of a run."""
    # An installed copy may lie inside a checkout of another project, whose commit says nothing.
    ours = _git("rev-parse", "--show-prefix") == ""
    return {
        "command": shlex.join(["polyad", *sys.argv[1:]]),
        "git_commit": _git("rev-parse", "HEAD") if ours else None,
        "git_diff": _git("diff", "HEAD") if ours else None,
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
    """Checks that there is the compiler that torch.compile needs, for C on a GPU, for C++ on a CPU.

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
            f"model.compile: true needs a {language} compiler, and there is no "
            f"{' and no '.join(wanted)}; install one (Debian: apt install {usual[0]}), name it in "
            f"{key}, or set model.compile=false"
        )


def _git(*arguments: str) -> str | None:
    """The output of git for the code's folder; None if it is not a checkout."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
