"""Measurements beside peers, each a script: `python -m tests.benchmarks.layer --help`.

Libraries read the environment as they are imported, so it is set up before a script's own imports.
"""

import os
import sys
from pathlib import Path

from polyad.launch.machine import prepare_environment

ROOT = Path(__file__).resolve().parents[2]

if sys.argv[0] == "-m":  # while Python looks for the script of a command line
    prepare_environment()
    os.environ["PYTHONPATH"] += f"{os.pathsep}{ROOT}"  # processes of a script find this package too
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library says when it begins
