"""`polyad bench layer`: a sparse mixture of experts beside its peers, forward and backward.

The peers: a dense MLP of the same active width (K F), DeepSpeed's MoE layer with a capacity of 1.25
and without dropping, and the loop over experts that is our reference. All have the same weights and
see the same tokens with the same threads, one after the other in turn; what counts is the ratio of
medians to the dense MLP's.

Shapes: N tokens, D width, E experts, K experts of a token, F inner width of one expert.
"""

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from launch.bench.peers import (
    REFERENCE,
    TimedLayer,
    make_layers,
    make_tokens,
    orthogonal_router,
    rows_of_experts,
)
from launch.machine import processor_name
from launch.output import align
from model.smoe.host import has_bf16_products
from parallel.zero import DTYPES, import_deepspeed
from train.errors import ConfigError, RunError

LOADS = ("uniform", "skewed")
GOAL_SHAPE = {"tokens": 4096, "experts": 16, "top_k": 2, "width": 256, "hidden": 1024}
GOALS = {"uniform": 1.25, "skewed": 1.5}
"""Of that shape in bf16: times the dense MLP."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.03}
"""Of the norm of the difference to the reference's output, as a share of the output's norm."""


def bench_layer(
    *,
    tokens: int = 4096,
    experts: int = 16,
    top_k: int = 2,
    width: int = 256,
    hidden: int = 1024,
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    loads: tuple[str, ...] = LOADS,
    repeats: int = 7,
    threads: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Times one layer.

    Args:
        tokens: N.
        experts: E.
        top_k: K.
        width: D.
        hidden: F; the dense MLP has K F.
        precisions: of weights and activations.
        loads: `uniform`: random tokens; `skewed`: one expert is the first choice of half of them.
        repeats: how often each is timed; once more goes before.
        threads: of each; None: as many as PyTorch takes.
        device: `cpu` or `cuda`.

    Returns:
        JSON values: for each precision and load the rows of each expert, and for each variant the
        median seconds, the bytes kept for backward, and both as a multiple of the dense MLP's.

    Raises:
        ConfigError: shapes that do not agree, or a device that is not there.
        RunError: a peer does not compute what the reference computes.
    """
    if top_k > experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    if experts < 2:
        raise ConfigError(f"--experts: {experts} is less than 2")
    if tokens < 2:
        raise ConfigError(f"--tokens: {tokens} is less than 2, of which a half can be skewed")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda: there is no CUDA device here; cpu is allowed")
    shape = {
        "tokens": tokens,
        "experts": experts,
        "top_k": top_k,
        "width": width,
        "hidden": hidden,
    }
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    try:
        results = {
            precision: {
                load: _compare(shape, precision, load, repeats, torch.device(device))
                for load in loads
            }
            for precision in precisions
        }
        return shape | {
            "device": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
            "bf16_instructions": device == "cuda" or has_bf16_products(),
            "threads": torch.get_num_threads(),
            "repeats": repeats,
            "torch": torch.__version__,
            "deepspeed": import_deepspeed().__version__,
            "precisions": results,
        }
    finally:
        torch.set_num_threads(threads_before)


def _compare(
    shape: dict[str, int], precision: str, load: str, repeats: int, device: torch.device
) -> dict[str, Any]:
    dtype = DTYPES[precision]
    router_ED = orthogonal_router(shape["experts"], shape["width"])
    tokens_ND = make_tokens(shape["tokens"], router_ED, load).to(device, dtype).requires_grad_()
    layers = make_layers(shape, router_ED, tokens_ND)
    differences = _check(layers, tokens_ND, precision)
    _say(f"{precision}, {load}")
    seconds = _interleaved(layers, tokens_ND, repeats)
    rows: dict[str, Any] = {}
    for name, layer in layers.items():
        rows[name] = seconds[name] | {
            "saved_bytes": saved_bytes(layer, tokens_ND),
            "difference": differences.get(name),
        }
    for row in rows.values():
        for key in ("seconds", "saved_bytes"):
            row[f"{key}_ratio"] = row[key] / rows["dense"][key]
    result: dict[str, Any] = {
        "rows_of_experts": rows_of_experts(layers, tokens_ND),
        "variants": rows,
    }
    if precision == "bf16" and shape == GOAL_SHAPE:
        goal = GOALS[load]
        result |= {"goal": goal, "reached": rows["polyad"]["seconds_ratio"] <= goal}
    return result


def _check(layers: dict[str, TimedLayer], tokens_ND: Tensor, precision: str) -> dict[str, float]:
    """How far each output is from the reference's; only those that drop nothing have to be near."""
    with torch.no_grad():
        outputs = {name: layer(tokens_ND).float() for name, layer in layers.items()}
    expected = outputs[REFERENCE]
    differences = {
        name: ((output - expected).norm() / expected.norm()).item()
        for name, output in outputs.items()
        if name not in ("dense", REFERENCE)
    }
    for name in ("polyad", "deepspeed no drop"):
        if not differences[name] <= TOLERANCES[precision]:
            raise RunError(
                f"{name} in {precision} is {differences[name]:.1e} away from the loop over experts,"
                f" {TOLERANCES[precision]:.0e} is allowed"
            )
    return differences


def saved_bytes(layer: TimedLayer, tokens_ND: Tensor) -> int:
    """What the layer keeps for its backward pass: each storage once, parameters not.

    Args:
        layer: Any variant.
        tokens_ND: Its input.

    Returns:
        Bytes.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor  # kept until the end, so that no address comes twice

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(tokens_ND)
    total = sum(sizes.values())
    del output
    return total


def _interleaved(
    layers: dict[str, TimedLayer], tokens_ND: Tensor, repeats: int
) -> dict[str, dict[str, float]]:
    """Medians of forward, backward and both, taken in turn."""
    gradient_ND = torch.randn(
        tokens_ND.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32
    ).to(tokens_ND)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for number in range(repeats + 1):
        for name, layer in layers.items():
            layer.zero_grad(set_to_none=True)
            tokens_ND.grad = None
            started = _now(tokens_ND.device)
            output_ND = layer(tokens_ND)
            half = _now(tokens_ND.device)
            output_ND.backward(gradient_ND)
            ended = _now(tokens_ND.device)
            times[name].append((half - started, ended - half))
        _say(f"  {number} of {repeats}" if number else "  once before the clock counts")
    return {
        name: {
            "forward_seconds": statistics.median(forward for forward, _ in taken[1:]),
            "backward_seconds": statistics.median(backward for _, backward in taken[1:]),
            "seconds": statistics.median(forward + backward for forward, backward in taken[1:]),
        }
        for name, taken in times.items()
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def layer_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    bf16 = "" if result["bf16_instructions"] else " without bf16 instructions"
    lines = [
        f"{result['tokens']} tokens, {result['experts']} experts of which {result['top_k']}, "
        f"{result['width']}-{result['hidden']}; {result['device']}{bf16}, {result['threads']} "
        f"threads; torch {result['torch']}, deepspeed {result['deepspeed']}"
    ]
    head = ("variant", "forward ms", "backward ms", "both ms", "x dense", "saved MiB", "x dense")
    for precision, loads in result["precisions"].items():
        for load, compared in loads.items():
            most = max(compared["rows_of_experts"]) / sum(compared["rows_of_experts"])
            cells: list[tuple[str, ...]] = [head]
            for name, row in compared["variants"].items():
                seconds = (row["forward_seconds"], row["backward_seconds"], row["seconds"])
                cells.append(
                    (
                        name,
                        *(f"{1e3 * value:.1f}" for value in seconds),
                        f"{row['seconds_ratio']:.2f}",
                        f"{row['saved_bytes'] / 2**20:.1f}",
                        f"{row['saved_bytes_ratio']:.2f}",
                    )
                )
            lines += ["", f"{precision}, {load}: the busiest expert has {100 * most:.0f}% of rows"]
            lines += [align(cells)]
            if "goal" in compared:
                ratio = compared["variants"]["polyad"]["seconds_ratio"]
                lines += [f"ratio {ratio:.2f}, the goal is at most {compared['goal']}"]
    return "\n".join(lines)
