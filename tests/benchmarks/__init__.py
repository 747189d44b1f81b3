"""Measurements beside peers, each a script: `python -m tests.benchmarks.layer --help`.

Libraries read the environment as they are imported, so it is set up before a script's own imports.
"""

import sys

from polyad.launch.processes import prepare_environment

if sys.argv[0] == "-m":  # while Python looks for the script of a command line
    prepare_environment()
