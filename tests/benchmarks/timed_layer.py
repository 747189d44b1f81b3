"""`layer.py`: the timing of any kind of layer beside a dense MLP.

All variants see the same tokens with the same threads, one after the other in turn; what counts is
the ratio to the dense MLP's (see `turns.py`). Peers: `smoe.py` and `mumoe.py`.

Shapes: N tokens, D width.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyad.launch.machine import processor_name
from polyad.launch.output import align
from polyad.model.build import materialize
from polyad.model.feedforward import FeedForward, FeedForwardContext
from polyad.model.kernels.cpu.gelu import has_native_gelu
from polyad.parallel.plan import forward_flops
from tests.benchmarks.turns import Run, Times, now, part_medians, span, summary, take_turns

TOLERANCES = {"fp32": 1e-4, "bf16": 0.03}
"""Allowed norm of the difference to a reference, as a share of the reference's norm."""
HEAD = ("variant", "forward ms", "backward ms", "both ms", "x dense", "90%", "saved MiB", "x dense")


class TimedLayer(nn.Module):
    """One variant: [N, D] to [N, D].

    Args:
        module: What computes.
        call: How it is called.
    """

    def __init__(self, module: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, tokens_ND: Tensor) -> Tensor:
        """The layer's output."""
        return self.call(tokens_ND)


def of_ours(module: FeedForward) -> TimedLayer:
    """A feed-forward of a block as a variant.

    Args:
        module: The feed-forward, which gets the tokens as normalized input and as residual stream.
    """

    def call(tokens_ND: Tensor) -> Tensor:
        tokens_BTD = tokens_ND.unsqueeze(0)
        output: Tensor = module(tokens_BTD, tokens_BTD)[0]
        return output.squeeze(0)

    return TimedLayer(module, call)


def start(part: Any, config: Any, context: FeedForwardContext, like: Tensor) -> Any:
    """A part with small random weights, biases too: the same whenever names and shapes are.

    Args:
        part: A kind of feed-forward.
        config: Its own.
        context: Settings as of a model.
        like: Of the weights' device and dtype.
    """
    with torch.device("meta"):
        module = part(config, context)
    materialize(module, seed=0, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(module.named_parameters()):
            if name.endswith("bias") and "router" not in name:
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return module


def multiply_adds(part: Any, config: Any, width: int) -> int:
    """Counts the multiply-adds of a token in a feed-forward, on shapes alone.

    Args:
        part: A kind of feed-forward.
        config: Its own.
        width: D.
    """
    with torch.device("meta"):
        module = part(config, context_of(width))
    token_BTD = torch.zeros(1, 1, width)
    run = lambda layer, inputs: layer(*inputs, *inputs)  # noqa: E731
    return forward_flops(module, (token_BTD,), run) // 2


def context_of(width: int) -> FeedForwardContext:
    """The settings of a model of this width, with biases.

    Args:
        width: D.
    """
    return FeedForwardContext(
        hidden_size=width, bias=True, dropout=0.0, initializer_std=0.02, residual_std=0.02
    )


@contextlib.contextmanager
def threads_of(threads: int | None) -> Iterator[None]:
    """A context that computes with so many threads; None: PyTorch's default number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_bf16_products() -> bool:
    """Whether this processor has the instructions for PyTorch's products in bf16."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def surroundings(device: str, repeats: int) -> dict[str, Any]:
    """What the results depend on beside the shape, as JSON values."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        "bf16_instructions": device == "cuda" or has_bf16_products(),
        "native_gelu": device == "cpu" and has_native_gelu(),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "torch": torch.__version__,
    }


def measure(
    layers: Mapping[str, nn.Module],
    tokens_ND: Tensor,
    repeats: int,
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Times every variant, one of which is called dense, and counts what it keeps.

    Args:
        layers: The variants by name.
        tokens_ND: What all of them see.
        repeats: How often each is timed; once more goes before.
        compiled: Whether each runs through torch.compile.

    Returns:
        For each its seconds and the bytes kept for backward, and both as a multiple of the dense
        MLP's; see `summary`.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # earlier measurements may have fragmented the heap
    if compiled:
        torch.compiler.reset()  # programs of another precision would be tried first
        layers = {name: _compile(layer) for name, layer in layers.items()}
    gradient_ND = torch.randn(
        tokens_ND.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32
    ).to(tokens_ND)
    # All variants are instances of one class: dynamo counts them as recompilations of its forward.
    with torch._dynamo.config.patch(recompile_limit=8 * len(layers)):
        runs = {name: passes(layer, tokens_ND, gradient_ND) for name, layer in layers.items()}
        rows = pass_rows(take_turns(runs, repeats, base="dense"), "dense")
        for name, layer in layers.items():
            rows[name]["saved_bytes"] = saved_bytes(layer, tokens_ND)
    for row in rows.values():
        row["saved_bytes_ratio"] = row["saved_bytes"] / rows["dense"]["saved_bytes"]
    return rows


def saved_bytes(layer: nn.Module, tokens_ND: Tensor) -> int:
    """Bytes that the layer saves for backward; each storage counts once, parameters not at all.

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
        return tensor  # stays alive, so that no address is used twice

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(tokens_ND)
    total = sum(sizes.values())
    del output
    return total


def _compile(layer: nn.Module) -> nn.Module:
    layer.compile()
    return layer


def passes(layer: nn.Module, inputs: Tensor, gradient: Tensor | None) -> Run:
    """A run of a forward and a backward pass, its two parts.

    Args:
        layer: Any variant.
        inputs: What it sees.
        gradient: Of its output; None: the output is one number.
    """

    def run() -> tuple[float, ...]:
        started = now(inputs.device)
        output = layer(inputs)
        half = now(inputs.device)
        output.backward(gradient)
        ended = now(inputs.device)
        layer.zero_grad(set_to_none=True)
        inputs.grad = None
        return half - started, ended - half

    return run


def pass_rows(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """What a result says of runs of `passes`: see `summary`, and the medians of both parts.

    Args:
        times: Of `take_turns`.
        base: The variant that the others are compared with.
    """
    rows = summary(times, base)
    for part, name in enumerate(("forward_seconds", "backward_seconds")):
        for variant, seconds in part_medians(times, part).items():
            rows[variant][name] = seconds
    return rows


def setting(result: dict[str, Any]) -> str:
    """The device and software of a result, for the first line of a table."""
    bf16 = "" if result["bf16_instructions"] else " without bf16 instructions"
    return f"{result['device']}{bf16}, {result['threads']} threads; torch {result['torch']}"


def costs(variants: Mapping[str, dict[str, Any]]) -> str:
    """The table of variants with their parameters and FLOPs.

    Args:
        variants: Rows of `measure`, with both.
    """
    head = (*HEAD, "parameters M", "MFLOPs a token")
    table = [
        (*cells(name, row), f"{row['parameters'] / 1e6:.2f}", f"{row['flops_per_token'] / 1e6:.1f}")
        for name, row in variants.items()
    ]
    return align([head, *table])


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """A variant's line of a table, below `HEAD`."""
    seconds = (row["forward_seconds"], row["backward_seconds"], row["seconds"])
    return (
        name,
        *(f"{1e3 * value:.1f}" for value in seconds),
        f"{row['seconds_ratio']:.2f}",
        span(row["seconds_ratio_interval"]),
        f"{row['saved_bytes'] / 2**20:.1f}",
        f"{row['saved_bytes_ratio']:.2f}",
    )
