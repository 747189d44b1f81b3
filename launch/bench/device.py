"""The device that a bench measures on."""

import time

import psutil
import torch

from parallel.host_memory import keep_freed_memory
from train.errors import ConfigError


def prepare_device(device: str) -> None:
    """Checks that the device is there, and has the CPU's memory kept as a run has it.

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
    """Waits until the device has done what it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def now(device: str | torch.device) -> float:
    """Seconds of a clock, once the device has done what it was told."""
    synchronize(device)
    return time.perf_counter()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
