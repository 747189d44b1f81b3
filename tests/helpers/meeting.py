"""A process that meets others, and says how that went."""

import os
import signal
from pathlib import Path

import torch

from polyad.parallel import comm


def join(log: Path, environment: dict[str, str], seed: int, minutes: float) -> None:
    """Joins the other processes, adds up over them, and ends with the status of what went wrong.

    Args:
        log: is written.
        environment: variables that say who it is and where they meet.
        seed: on which all have to agree.
        minutes: to wait.
    """
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ |= environment
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # never runs while torch waits
    print("begins", flush=True)
    status = 0
    try:
        comm.initialize(minutes, facts={"seed": str(seed)})
        print(comm.sum_over_ranks(torch.ones(1)).item(), flush=True)
        comm.shutdown()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        status = getattr(error, "exit_status", 70)
    os._exit(status)
