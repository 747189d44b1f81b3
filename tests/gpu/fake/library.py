"""Starts programs with a GPU that is not there: PyTorch's CUDA build, a number of devices, and a
driver that refuses all.

Autograd asks for a device's context, and fake tensors say on which device what comes out would be:
shapes, types and devices of a whole step are checked without a number. No kernel runs.
"""

import ctypes
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
VARIABLE = "POLYAD_FAKE_GPU"
"""The folder of both libraries, in a program that was started with them."""


def why_not() -> str | None:
    """Why there can be no fake GPU here; None: there can."""
    import torch

    if torch.version.cuda is None:
        return "torch is no CUDA build: `make fake-gpu` has one in an environment of its own"
    if torch.cuda.is_available():
        return "there is a real GPU"
    return None


def environment(folder: Path) -> dict[str, str]:
    """Compiles both libraries into a folder; gives the variables of a program that uses them."""
    devices, driver = folder / "devices.so", folder / "libcuda.so.1"
    shared = ("-shared", "-fPIC")
    compile_devices = ["g++", "-std=c++17", *shared, "-o", devices, HERE / "devices.cpp"]
    compile_driver = ["gcc", *shared, "-Wl,-soname,libcuda.so.1", "-o", driver, HERE / "driver.c"]
    for command in (compile_devices, compile_driver):
        subprocess.run(command, check=True)
    return os.environ | {
        VARIABLE: str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(devices),
        "OMP_NUM_THREADS": "1",
    }


def run(module: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python -m tests.gpu.fake.MODULE` on the fake GPU."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.gpu.fake.{module}", *words],
        env=environment(folder),
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )


@contextmanager
def fake_gpu():
    """A context in which tensors are fake, and those on CUDA devices can be made."""
    import torch
    from torch._subclasses import fake_tensor

    for name in ("init_gpu_context", "init_cuda_context"):  # as PyTorch's versions call it
        if hasattr(fake_tensor, name):
            setattr(fake_tensor, name, lambda *_: None)
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    library = ctypes.CDLL(str(Path(os.environ[VARIABLE]) / "devices.so"))
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        library.fake_gpus(8)
        try:
            yield mode
        finally:
            library.fake_gpus(0)
