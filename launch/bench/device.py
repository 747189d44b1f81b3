"""The device that a bench measures on."""

import time

import psutil
import torch

from polyad.parallel.host_memory import keep_freed_memory
from polyad.train.errors import ConfigError


def prepare_device(device: str) -> None:
    """Checks that the device exists, and sets up the CPU's memory as a run does.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: It is not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda: there is no CUDA device here; cpu is allowed")
    if device == "cpu":
        keep_freed_memory()


def synchronize(device: str | torch.device) -> None:
    """Waits until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def now(device: str | torch.device) -> float:
    """The time in seconds, once the device has finished its work."""
    synchronize(device)
    return time.perf_counter()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
