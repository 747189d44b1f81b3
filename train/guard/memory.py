"""Out of memory: one line with the size requested, the memory in use, and what to change."""

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from polyad.parallel import comm
from polyad.train.errors import RunError
from polyad.train.guard.run_folder import last_checkpoint

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ASKED = re.compile(rf"allocate (?P<size>[\d.]+) (?P<unit>{'|'.join(UNITS)})", re.IGNORECASE)
"""The size in messages of torch's allocators and numpy: `Tried to allocate 2.00 GiB`."""
MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "Cannot allocate memory")
"""Parts of a RuntimeError's message that mean out of memory: torch on a CPU, CUDA, cuBLAS."""


SMALLER = (
    "lower train.micro_batch_size or evaluation.batch_size, set model.recompute=block, or start "
    "more processes: `polyad plan` shows the memory of every layout"
)
"""What to change."""


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Explains out-of-memory errors of a run; see `explain_out_of_memory`."""

    world: comm.World
    checkpoints: Path

    def during(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """A context; see `explain_out_of_memory`."""
        return explain_out_of_memory(doing, self.world, self.checkpoints)


@contextmanager
def explain_out_of_memory(
    doing: Callable[[], str],
    world: comm.World,
    checkpoints: Path | None = None,
) -> Iterator[None]:
    """Turns an out-of-memory error into one line; other errors pass unchanged.

    The process then exits, and its launcher terminates those that wait for it.

    Args:
        doing: returns when it happened, such as "in step 3".
        world: this process.
        checkpoints: the run's folder of checkpoints.

    Raises:
        RunError: the line.
    """
    try:
        yield
    except RunError:
        raise  # already explained by an inner context
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        line = _explanation(error, doing(), world, checkpoints)
        raise RunError(line) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, even if a compiler has wrapped it."""
    while not isinstance(error, MemoryError | torch.OutOfMemoryError):
        text = str(error)
        if isinstance(error, RuntimeError | OSError) and any(part in text for part in MESSAGES):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def _explanation(error: Exception, doing: str, world: comm.World, checkpoints: Path | None) -> str:
    match = ASKED.search(str(error))
    asked = ""
    if match:
        units = {name.lower(): size for name, size in UNITS.items()}
        size = float(match["size"]) * units[match["unit"].lower()]
        asked = f"{_size(size)} more were asked for; "
    line = (
        f"out of memory {doing}, on rank {world.rank} of {world.size}: {asked}"
        f"{_in_use(world.device)}; {SMALLER}"
    )
    if checkpoints is None:
        return line
    return f"{line}; {last_checkpoint(checkpoints)}"


def _in_use(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"tensors hold {_size(held)}, {_size(reserved)} are reserved for them, and "
            f"{_size(free)} of the {_size(total)} of {device} are free"
        )
    import psutil  # not at the top: the bench times the imports of its processes

    process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = "" if limit == resource.RLIM_INFINITY else (
        f" ({_size(process.vms)} of the {_size(limit)} of addresses it may have)"
    )  # fmt: skip
    return (
        f"the process holds {_size(process.rss)}{limited}, and {_size(machine.available)} of the "
        f"machine's {_size(machine.total)} are free"
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
