"""Measurements beside peers, each a script: `python -m tests.benchmarks.layer --help`.

Libraries read the environment as they are imported, so it is set up before a script's own imports.
"""

import os
import sys
from pathlib import Path

from polyad.launch.machine import prepare_environment

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment of a process that is to find this package, wherever it starts."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


if sys.argv[0] == "-m":  # while Python looks for the script of a command line
    prepare_environment()
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library says when it begins
