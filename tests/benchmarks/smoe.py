"""`layer.py --kind smoe`: a sparse mixture of experts beside its peers.

The peers: a dense MLP of the same active width (K F), DeepSpeed's MoE layer with a capacity of 1.25
and without dropping, and the loop over experts that is our reference. All have the same weights and
see the same tokens with the same threads, one after the other in turn; what counts is the ratio to
the dense MLP's.

Shapes: N tokens, D width, E experts, K experts of a token, F inner width of one expert.
"""

from typing import Any

import torch
from torch import Tensor

from polyad.launch.output import align
from polyad.parallel.zero import DTYPES, import_deepspeed
from polyad.train.errors import ConfigError, RunError
from tests.benchmarks.smoe_peers import (
    REFERENCE,
    make_layers,
    make_tokens,
    orthogonal_router,
    rows_of_experts,
)
from tests.benchmarks.timed_layer import (
    HEAD,
    TOLERANCES,
    TimedLayer,
    cells,
    measure,
    setting,
    surroundings,
    threads_of,
)
from tests.benchmarks.turns import prepare_device, say

LOADS = ("uniform", "skewed")
GOAL_SHAPE = {"tokens": 4096, "experts": 16, "top_k": 2, "width": 256, "hidden": 1024}
GOALS = {"uniform": 1.25, "skewed": 1.5}
"""Of that shape in bf16: times the dense MLP."""


def bench_smoe(
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
    check_shape(tokens, experts, top_k)
    prepare_device(device)
    shape = {
        "tokens": tokens,
        "experts": experts,
        "top_k": top_k,
        "width": width,
        "hidden": hidden,
    }
    with threads_of(threads):
        results = {
            precision: {
                load: _compare(shape, precision, load, repeats, torch.device(device))
                for load in loads
            }
            for precision in precisions
        }
        return {
            "kind": "smoe",
            **shape,
            **surroundings(device, repeats),
            "deepspeed": import_deepspeed().__version__,
            "precisions": results,
        }


def check_shape(tokens: int, experts: int, top_k: int) -> None:
    """Checks that the shape of a layer can be timed.

    Args:
        tokens: N.
        experts: E.
        top_k: K.

    Raises:
        ConfigError: It cannot.
    """
    if top_k > experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    if experts < 2:
        raise ConfigError(f"--experts: {experts} is less than 2")
    if tokens < 2:
        raise ConfigError(f"--tokens: {tokens} is less than 2, of which a half can be skewed")


def _compare(
    shape: dict[str, int],
    precision: str,
    load: str,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    dtype = DTYPES[precision]
    router_ED = orthogonal_router(shape["experts"], shape["width"])
    tokens_ND = make_tokens(shape["tokens"], router_ED, load)
    tokens_ND = tokens_ND.to(device, dtype).requires_grad_()
    layers = make_layers(shape, router_ED, tokens_ND)
    differences = _check(layers, tokens_ND, precision)
    say(f"{precision}, {load}")
    rows = measure(layers, tokens_ND, repeats)
    for name, row in rows.items():
        row["difference"] = differences.get(name)
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
    for name in set(differences) - {"deepspeed 1.25"}:
        if not differences[name] <= TOLERANCES[precision]:
            raise RunError(
                f"{name} in {precision} is {differences[name]:.1e} away from the loop over experts,"
                f" {TOLERANCES[precision]:.0e} is allowed"
            )
    return differences


def smoe_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['tokens']} tokens, {result['experts']} experts of which {result['top_k']}, "
        f"{result['width']}-{result['hidden']}; {setting(result)}, deepspeed {result['deepspeed']}"
    ]
    for precision, loads in result["precisions"].items():
        for load, compared in loads.items():
            most = max(compared["rows_of_experts"]) / sum(compared["rows_of_experts"])
            lines += ["", f"{precision}, {load}: the busiest expert has {100 * most:.0f}% of rows"]
            lines += [align([HEAD, *(cells(*item) for item in compared["variants"].items())])]
            if "goal" in compared:
                ratio = compared["variants"]["polyad"]["seconds_ratio"]
                lines += [f"ratio {ratio:.2f}, the goal is at most {compared['goal']}"]
    return "\n".join(lines)
