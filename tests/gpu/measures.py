"""Parts of `speed.py` that compute: `python -m tests.gpu.measures NAME FILE [--tiny]`.

Each row is written as soon as it is known. On a CPU (`--tiny`) sizes are cut down, and what needs
CUDA says so.

Shapes: M rows, D width, F inner width, V vocabulary, E experts.
"""

import argparse
import functools
import gc
import json
import math
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import grouped_mm, scaled_dot_product_attention
from torch.utils.benchmark import Timer

from polyad.model.kernels import linear_cross_entropy
from polyad.parallel import comm
from tests.gpu.speed import GROUPS, NEEDS_CUDA, keys_of

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
CALLS = 20 if HAS_CUDA else 2
WIDTH = 768


class Rows:
    """Values by name, written to a file as they come.

    Args:
        file: JSON.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.values = file, dict[str, Any]()

    def add(self, name: str, measure: Callable[[], Any], *, needs_cuda: bool = False) -> None:
        """Adds a value, or why there is none."""
        try:
            value = NEEDS_CUDA if needs_cuda and not HAS_CUDA else measure()
        except Exception as error:
            value = f"{type(error).__name__}: {str(error)[:200]}"
        self.values[name] = value
        self.file.write_text(json.dumps(self.values, indent=1, default=str))


def milliseconds(call: Callable[[], object]) -> float:
    """The mean of some calls after others, until the device has done them all."""
    return 1e3 * Timer("call()", globals={"call": call}).timeit(CALLS).mean


def there_and_back(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """A call of the forward and the backward pass of a function."""
    leaves = [x.requires_grad_() for x in inputs]
    gradient = torch.ones_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def card(rows: Rows, tiny: bool) -> None:
    """What computes, and two of its rates."""
    rows.add("torch", lambda: torch.__version__)
    rows.add("cudnn", torch.backends.cudnn.version)
    rows.add("card", torch.cuda.get_device_name, needs_cuda=True)
    rows.add("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())), needs_cuda=True)
    rows.add("triton", lambda: __import__("triton").__version__, needs_cuda=True)
    rows.add("attention, first is taken", torch._C._get_sdp_priority_order, needs_cuda=True)
    size = 64 if tiny else 8192
    a, to = normal(size, size), normal(size, size)
    rate = 2 * size**3 / 1e9
    rows.add("TFLOP/s of a product", lambda: rate / milliseconds(lambda: torch.mm(a, a, out=to)))
    source = normal(size, 8 * size)
    target, moved = torch.empty_like(source), 2 * 2 * source.numel() / 1e6
    rows.add("GB/s of a copy", lambda: moved / milliseconds(lambda: target.copy_(source)))


def parts(rows: Rows, tiny: bool) -> None:
    """Milliseconds of what a step of GPT-2 and of its sparse experts is made of, uncompiled."""
    for samples in (1,) if tiny else (12, 60):
        heads = (samples, 2, 32, 16) if tiny else (samples, 12, 1024, 64)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            name = f"{backend.name.lower()}, {samples} samples, both passes"
            with sdpa_kernel(backend):
                rows.add(name, functools.partial(_attention, heads), needs_cuda=True)
        _products(rows, samples * (32 if tiny else 1024))
    if HAS_CUDA:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        _products(rows, 60 * 1024, " by cublaslt")
    _routing(rows, 64 if tiny else 12 * 1024)


def _attention(shape: tuple[int, ...]) -> float:
    attend = functools.partial(scaled_dot_product_attention, is_causal=True)
    return milliseconds(there_and_back(attend, *(normal(*shape) for _ in range(3))))


def _products(rows: Rows, tokens: int, how: str = "") -> None:
    """The twelve products of a dense block: forward, and of both gradients."""
    total = 0.0
    layers = {"qkv": (1, 3), "projection": (1, 1), "up": (1, 4), "down": (4, 1)}
    for name, (before, after) in layers.items():
        inputs, weight = normal(tokens, before * WIDTH), normal(before * WIDTH, after * WIDTH)
        gradient = normal(tokens, after * WIDTH)
        calls: dict[str, Callable[[], Tensor]] = {
            "forward": lambda a=inputs, b=weight: a @ b,
            "of the input": lambda a=gradient, b=weight: a @ b.t(),
            "of the weight": lambda a=inputs, b=gradient: a.t() @ b,
        }
        for which, call in calls.items():
            key = f"product {name} {which}, {tokens} tokens{how}"
            rows.add(key, lambda call=call: milliseconds(call))
            total += value if isinstance(value := rows.values[key], float) else math.inf
    flops = 3 * 2 * tokens * WIDTH**2 * 12
    rows.add(f"TFLOP/s of a block, {tokens} tokens{how}", lambda: flops / total / 1e9)


def _routing(rows: Rows, tokens: int) -> None:
    """Grouped products beside a plain one of as much work, and what a router asks for."""
    inputs, weight = normal(2 * tokens, WIDTH), normal(WIDTH, 2 * WIDTH)
    rows.add("product of as many rows", lambda: milliseconds(lambda: inputs @ weight))
    for experts in (16, 64):
        weights = normal(experts, WIDTH, 2 * WIDTH)
        even = torch.arange(1, experts + 1, device=DEVICE) * (len(inputs) // experts)
        skewed = (len(inputs) - (len(inputs) - even) // 2).to(even)  # half to the first
        for load, ends in {"even": even, "skewed": skewed}.items():
            offsets = ends.to(torch.int32)
            rows.add(
                f"grouped product, {experts} experts, {load}",
                lambda w=weights, o=offsets: milliseconds(lambda: grouped_mm(inputs, w, offs=o)),
            )
    x, router = normal(tokens, WIDTH), normal(WIDTH, 16)
    for name, precision in {"fp32": "highest", "tf32": "high"}.items():
        torch.set_float32_matmul_precision(precision)
        wide = x.float(), router.float()
        rows.add(f"router's product in {name}", lambda w=wide: milliseconds(lambda: w[0] @ w[1]))
    rows.add(
        "router's product to fp32",
        lambda: milliseconds(lambda: torch.mm(x, router, out_dtype=torch.float32)),
        needs_cuda=True,
    )


def head(rows: Rows, tiny: bool) -> None:
    """Milliseconds and bytes of the output head and its loss, compiled: ours, and as one writes."""
    words = 128 if tiny else 50_304
    for samples in (1,) if tiny else (12, 60):
        tokens = samples * (16 if tiny else 1024)
        x_MD, weight_VD = normal(tokens, WIDTH), normal(words, WIDTH)
        targets_M = torch.randint(words, (tokens,), device=DEVICE)
        for name in ("linear_cross_entropy", "by_definition"):
            function = getattr(linear_cross_entropy, name)
            loss = torch.compile(lambda x, w, f=function, t=targets_M: f(x, w, t))
            label = f"{name}, {samples} samples"
            rows.add(
                label,
                lambda loss=loss, x=x_MD, w=weight_VD: milliseconds(there_and_back(loss, x, w)),
            )
            rows.add(f"{label}, peak bytes", torch.cuda.max_memory_allocated, needs_cuda=True)
            if HAS_CUDA:
                torch.cuda.reset_peak_memory_stats()


def train(group: str, work: Path, tiny: bool) -> None:
    """Trains a group's configurations one after the other, in this process."""
    from polyad.train.train import main

    for name, trial in GROUPS[group].items():
        print(f"--- {name}", flush=True)
        if trial.needs_cuda and not HAS_CUDA:
            print(NEEDS_CUDA)
            continue
        try:
            main(Path(trial.config), keys_of(name, trial, work, tiny))
        except Exception:
            traceback.print_exc()
        shutil.rmtree(work / name / "checkpoints", ignore_errors=True)  # all would fill the disk
        torch._dynamo.reset()
        gc.collect()
        if HAS_CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


MEASURES = {"card": card, "parts": parts, "head": head}


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*MEASURES, *GROUPS])
    parser.add_argument("place", type=Path, help="a file of results; of a group, a folder")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.name in GROUPS:
        train(given.name, given.place, given.tiny)
    else:
        MEASURES[given.name](Rows(given.place), given.tiny)
    comm.leave(0)


if __name__ == "__main__":
    main()
