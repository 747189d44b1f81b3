"""`layer.py --kind emoe`: a dense MLP's units in groups, beside the dense MLP itself.

`masked` computes all units in one product, `grouped` and `loop` those of the groups that a token
uses. All have the same weights and see the same tokens with the same threads, in turn.

Shapes: N tokens, D width, E experts, K experts of a token, F inner width of all of them.
"""

from typing import Any

import torch

from polyad.launch.output import align
from polyad.model.config import SectionError
from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.emoe.layer import EmergentMoE
from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError, RunError
from tests.benchmarks.timed_layer import (
    HEAD,
    TOLERANCES,
    TimedLayer,
    cells,
    context_of,
    measure,
    multiply_adds,
    of_ours,
    setting,
    start,
    surroundings,
    threads_of,
)
from tests.benchmarks.turns import prepare_device, say

REFERENCE = "loop"
WAYS = ("masked", "grouped", REFERENCE)


def bench_emoe(
    *,
    tokens: int = 1024,
    experts: int = 64,
    top_k: int = 16,
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
        experts: E.
        top_k: K.
        width: D.
        hidden: F, of the dense MLP, which has the same units.
        precisions: of weights and activations.
        repeats: how often each is timed; once more goes before.
        threads: of each; None: as many as PyTorch takes.
        device: `cpu` or `cuda`.

    Returns:
        JSON values: for each precision and variant its FLOPs a token, median seconds and bytes kept
        for backward, both as a multiple of the dense MLP's, and how far it is from the loop.

    Raises:
        ConfigError: shapes that do not agree, or a device that is not there.
        RunError: the ways do not compute the same.
    """
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "width": width, "hidden": hidden}
    if not 1 <= top_k <= experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    if experts < 2:
        raise ConfigError(f"--experts: {experts} is less than 2")
    try:
        _config(shape, REFERENCE).of_model(width=width, bias=True)
    except SectionError:
        raise ConfigError(f"--experts: {experts} does not divide --hidden: {hidden}") from None
    prepare_device(device)
    with threads_of(threads):
        results = {
            precision: _compare(shape, precision, repeats, torch.device(device))
            for precision in precisions
        }
        return {"kind": "emoe", **shape, **surroundings(device, repeats), "precisions": results}


def _config(shape: dict[str, int], experts: str) -> EmergentMoEConfig:
    keys = {"num_experts": "experts", "top_k": "top_k", "hidden_size": "hidden"}
    numbers = {key: shape[name] for key, name in keys.items()}
    return EmergentMoEConfig.model_validate(numbers | {"experts": experts})


def _compare(
    shape: dict[str, int], precision: str, repeats: int, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens_ND = torch.randn(shape["tokens"], shape["width"], generator=generator)
    tokens_ND = tokens_ND.to(device, DTYPES[precision]).requires_grad_()
    context, width = context_of(shape["width"]), shape["width"]
    dense = DenseFeedForwardConfig(hidden_size=shape["hidden"])
    layers = {"dense": of_ours(start(DenseFeedForward, dense, context, tokens_ND))}
    weights = {"dense": multiply_adds(DenseFeedForward, dense, width)}
    for way in WAYS:
        config = _config(shape, way)
        layers[way] = of_ours(start(EmergentMoE, config, context, tokens_ND))
        weights[way] = multiply_adds(EmergentMoE, config, width)
    differences = _check(layers, tokens_ND, precision)
    say(precision)
    rows = measure(layers, tokens_ND, repeats)
    for name, row in rows.items():
        row |= {"difference": differences.get(name), "flops_per_token": 6 * weights[name]}
    return {"variants": rows}


def _check(
    layers: dict[str, TimedLayer], tokens_ND: torch.Tensor, precision: str
) -> dict[str, float]:
    """How far each output is from that of the loop over experts."""
    with torch.no_grad():
        expected = layers[REFERENCE](tokens_ND).float()
        outputs = {way: layers[way](tokens_ND).float() for way in WAYS if way != REFERENCE}
    found = {}
    for way, output in outputs.items():
        found[way] = ((output - expected).norm() / expected.norm()).item()
        if not found[way] <= TOLERANCES[precision]:
            raise RunError(
                f"{way} in {precision} is {found[way]:.1e} away from the loop over experts, "
                f"{TOLERANCES[precision]:.0e} is allowed"
            )
    return found


def emoe_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['tokens']} tokens, {result['width']}-{result['hidden']}, {result['experts']} "
        f"groups of units of which {result['top_k']}; {setting(result)}"
    ]
    head = (*HEAD, "MFLOPs a token")
    for precision, compared in result["precisions"].items():
        table = [
            (*cells(name, row), f"{row['flops_per_token'] / 1e6:.1f}")
            for name, row in compared["variants"].items()
        ]
        lines += ["", precision, align([head, *table])]
    return "\n".join(lines)
