"""`python -m launch.torchrun` is torchrun without its report of 40 lines when a worker fails.

The worker has already said what is wrong; what torchrun adds hides it. The status is that of the
worker which failed first, so that bad input stays apart from a failed run.
"""

import logging
import runpy
import signal
import sys
from typing import Any


def main() -> int:
    """Runs torchrun on `sys.argv`.

    Returns:
        The exit status: 0; the first failed worker's; 128 + the signal that ended it or us.
    """
    logging.disable(logging.ERROR)  # of this process alone: the workers have their own
    try:
        # By its name, as a command: this room imports no communication library.
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        if hasattr(error, "get_first_failure"):  # ChildFailedError
            return _worker_status(*error.get_first_failure())
        if hasattr(error, "sigval"):  # SignalException
            return 128 + int(error.sigval)
        raise
    return 0


def _worker_status(rank: int, failure: Any) -> int:
    status: int = failure.exitcode
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    print(f"polyad: error: rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
    return 128 - status


if __name__ == "__main__":
    sys.exit(main())
