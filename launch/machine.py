"""What libraries want from the environment of a process, set before they are imported."""

import os
import sys
import warnings
from pathlib import Path


def prepare_environment() -> None:
    """Makes this process, and those it starts, quiet and able to find their tools."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    tools = str(Path(sys.executable).parent)
    if tools not in folders:
        # torch's builder looks for ninja there, which pip puts beside the interpreter.
        os.environ["PATH"] = os.pathsep.join([tools, *folders])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.warnoptions:
        # Theirs tell us about libraries, kernels and devices that nothing here uses.
        for library in ("deepspeed", "megatron", "torch", "tensorboard"):
            warnings.filterwarnings("ignore", module=rf"{library}\b")


def share_cores(processes: int) -> None:
    """Divides this machine's cores among processes that compute at once, unless told otherwise."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))  # a container may have fewer
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
