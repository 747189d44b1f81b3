"""`layer.py --kind mxd`: mixtures of decoders and transcoders beside a dense MLP.

Each kind with a score for every expert, and with product keys for about as many: tables of one
size, and the K best of all scores in both. What a gate costs is the difference to the dense MLP,
which an MxD of the same inner width contains.

Shapes: N tokens, D width, E experts, K experts of a token.
"""

import math
from typing import Any

import torch

from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig
from polyad.model.mxd.config import MixtureOfDecodersConfig, TranscoderConfig
from polyad.model.mxd.layer import MixtureOfDecoders, Transcoder
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError
from tests.benchmarks.timed_layer import (
    context_of,
    costs,
    measure,
    multiply_adds,
    of_ours,
    setting,
    start,
    surroundings,
    threads_of,
)
from tests.benchmarks.turns import prepare_device, say


def bench_mxd(
    *,
    tokens: int = 1024,
    experts: int = 21_490,
    top_k: int = 32,
    width: int = 768,
    hidden: int = 3072,
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    repeats: int = 7,
    threads: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Times the feed-forward of one block.

    Args:
        tokens: N.
        experts: E of a gate with a score for each; product keys have the next square number.
        top_k: K.
        width: D.
        hidden: inner width of the dense MLP and of the dense part of an MxD.
        precisions: of weights and activations.
        repeats: how often each is timed; once more goes before.
        threads: of each; None: as many as PyTorch takes.
        device: `cpu` or `cuda`.

    Returns:
        JSON values: for each precision and variant its parameters, FLOPs a token, median seconds
        and bytes kept for backward, both as a multiple of the dense MLP's.

    Raises:
        ConfigError: more experts of a token than there are, or a device that is not there.
    """
    if top_k > experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    prepare_device(device)
    side = math.ceil(math.sqrt(experts))
    gates = {f"scores {experts:,}": (experts,), f"keys {side} x {side}": (side, side)}
    shape = {"tokens": tokens, "top_k": top_k, "width": width, "hidden": hidden}
    parts: dict[str, tuple[Any, Any]] = {
        "dense": (DenseFeedForward, DenseFeedForwardConfig(hidden_size=hidden))
    }
    for name, levels in gates.items():
        mxd = MixtureOfDecodersConfig(num_experts=levels, top_k=top_k, hidden_size=hidden)
        parts[f"mxd, {name}"] = MixtureOfDecoders, mxd
        transcoder = TranscoderConfig(num_experts=levels, top_k=top_k)
        parts[f"transcoder, {name}"] = Transcoder, transcoder
    with threads_of(threads):
        results = {
            precision: _compare(parts, shape, precision, repeats, torch.device(device))
            for precision in precisions
        }
        return {
            "kind": "mxd",
            **shape,
            "experts": experts,
            **surroundings(device, repeats),
            "precisions": results,
        }


def _compare(
    parts: dict[str, tuple[Any, Any]],
    shape: dict[str, int],
    precision: str,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens_ND = torch.randn(shape["tokens"], shape["width"], generator=generator)
    tokens_ND = tokens_ND.to(device, DTYPES[precision]).requires_grad_()
    context = context_of(shape["width"])
    layers = {
        name: of_ours(start(part, config, context, tokens_ND))
        for name, (part, config) in parts.items()
    }
    say(precision)
    rows = measure(layers, tokens_ND, repeats)
    for name, (part, config) in parts.items():
        rows[name] |= {
            "parameters": sum(parameter.numel() for parameter in layers[name].parameters()),
            "flops_per_token": 6 * multiply_adds(part, config, shape["width"]),
        }
    return {"variants": rows}


def mxd_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['tokens']} tokens, {result['width']}-{result['hidden']}, at most "
        f"{result['top_k']} active experts per token; {setting(result)}"
    ]
    for precision, compared in result["precisions"].items():
        lines += ["", precision, costs(compared["variants"])]
    return "\n".join(lines)
