"""`python -m launch.torchrun` is torchrun without its report of 40 lines when a worker fails.

The worker has already said what is wrong; what torchrun adds hides it. The status is that of the
worker which failed first, so that bad input stays apart from a failed run. Hosts that do not meet
are one line too.
"""

import logging
import os
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
    # Otherwise one store serves every restart, and processes that start again find the addresses of
    # those that ended, and cannot connect (pytorch issue 135712; seen with torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        # By its name, as a command: this room imports no communication library.
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except Exception as error:
        if hasattr(error, "get_first_failure"):  # ChildFailedError
            return _worker_status(*error.get_first_failure())
        if hasattr(error, "sigval"):  # SignalException
            return 128 + int(error.sigval)
        if any(kind.__name__ == "RendezvousError" for kind in type(error).__mro__):
            return _rendezvous_status(error)
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


def _rendezvous_status(error: Exception) -> int:
    reason = " ".join(str(error).split()) or "the other hosts did not come in time"
    kind = type(error).__name__
    print(
        f"polyad: error: the hosts did not meet: {kind}: {reason}; --rdzv-endpoint, --rdzv-id and "
        f"--nodes have to be the same on all of them",
        file=sys.stderr,
        flush=True,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
