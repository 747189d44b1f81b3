"""The start of `polyad`, which is also `python -m polyad.launch`.

Signals have handlers before the command line and what it needs are imported.
"""

import sys
from typing import NoReturn

from polyad.launch.processes import end_at_signals, unblock_signals

TRAINING = frozenset({"train", "launch", "study"})
"""Commands that end cleanly at a signal: progress is saved, and a line says so."""


def main() -> NoReturn:
    """Runs `sys.argv` and exits with the status."""
    if not TRAINING.isdisjoint(sys.argv[1:2]):
        end_at_signals()
    unblock_signals()
    from polyad.launch.cli import main as command

    command()


if __name__ == "__main__":
    main()
