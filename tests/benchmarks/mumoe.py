"""`layer.py --kind mumoe`: factorized experts beside a dense MLP, forward and backward.

The peers, for each number of experts: ours (CP and tensor ring, of as many parameters as the dense
MLP) and the same as textbook einsums with the `entmax` package and the same weights.

Shapes: N tokens, D width.
"""

import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.layer import MuMoE
from polyad.parallel.zero import DTYPES
from polyad.train.errors import RunError
from tests.benchmarks.mumoe_peers import (
    FACTORIZATIONS,
    Einsum,
    config_of,
    make_ours,
    package_entmax,
    timed,
)
from tests.benchmarks.timed_layer import (
    TOLERANCES,
    TimedLayer,
    context_of,
    costs,
    has_bf16_products,
    measure,
    multiply_adds,
    of_ours,
    setting,
    start,
    surroundings,
    threads_of,
)
from tests.benchmarks.turns import prepare_device, say

GOAL_SHAPE = {"width": 768, "hidden": 3072}
GOAL_EXPERTS, GOAL_TOKENS = 256, 1024
GOALS = {"cpu": 1.10, "cuda": 1.15}
"""Allowed multiples of the dense MLP's time, for 256 experts and enough tokens."""
SAVED_GOAL = 1.3


def bench_mumoe(
    *,
    tokens: int = 1024,
    experts: tuple[int, ...] = (64, 256, 2048),
    width: int = 768,
    hidden: int = 3072,
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    repeats: int = 7,
    threads: int | None = None,
    device: str = "cpu",
    compiled: bool = False,
) -> dict[str, Any]:
    """Times the feed-forward of one block.

    Args:
        tokens: N.
        experts: E, one after the other.
        width: D.
        hidden: F, of the dense MLP and of all experts.
        precisions: of weights and activations.
        repeats: how often each is timed; once more goes before. What takes more than ten times the
            dense MLP is timed once.
        threads: of each; None: as many as PyTorch takes.
        device: `cpu` or `cuda`.
        compiled: whether every variant runs through torch.compile.

    Returns:
        JSON values: for each precision and variant its parameters, FLOPs a token, median seconds,
        bytes kept for backward, both as a multiple of the dense MLP's, and how far it is from the
        reference; what was left out and why; goals.

    Raises:
        ConfigError: more experts than a dense MLP's parameters allow, or a device that is not
            there.
        RunError: a variant does not compute what the reference computes.
    """
    prepare_device(device)
    shape = {"tokens": tokens, "width": width, "hidden": hidden}
    for number in experts:  # before anything is timed
        for name in FACTORIZATIONS:
            config_of(name, number, shape)
    with threads_of(threads):
        results = {
            precision: _Comparison(shape, precision, torch.device(device)).run(
                experts, repeats, compiled
            )
            for precision in precisions
        }
        return {
            "kind": "mumoe",
            **shape,
            "experts": list(experts),
            "compiled": compiled,
            **surroundings(device, repeats),
            "entmax": importlib.metadata.version("entmax") if package_entmax() else None,
            "precisions": results,
        }


class _Comparison:
    """All variants in one precision."""

    def __init__(self, shape: dict[str, int], precision: str, device: torch.device) -> None:
        self.shape, self.precision, self.device = shape, precision, device
        generator = torch.Generator().manual_seed(1)
        tokens_ND = torch.randn(shape["tokens"], shape["width"], generator=generator)
        self.tokens_ND = tokens_ND.to(device, DTYPES[precision]).requires_grad_()
        self.layers: dict[str, TimedLayer] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}

    def run(self, experts: tuple[int, ...], repeats: int, compiled: bool) -> dict[str, Any]:
        """Builds, checks and times them."""
        width = self.shape["width"]
        config = DenseFeedForwardConfig(hidden_size=self.shape["hidden"])
        dense = start(DenseFeedForward, config, context_of(width), self.tokens_ND)
        self._add("dense", of_ours(dense), multiply_adds(DenseFeedForward, config, width), 1)
        say(f"{self.precision}: are all variants alike?")
        for number in experts:
            for name in FACTORIZATIONS:
                self._add_factorized(config_of(name, number, self.shape), number)
        say(self.precision)
        timings = measure(self.layers, self.tokens_ND, repeats, compiled=compiled)
        rows = {name: self.about[name] | timings[name] for name in self.layers}
        goals = self._goals(rows, compiled)
        return {"variants": rows, "left_out": self.left_out, "goals": goals}

    def _add(self, name: str, layer: TimedLayer, weights: int, experts: int) -> None:
        self.layers[name] = layer
        self.about[name] = {
            "experts": experts,
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
            "flops_per_token": 6 * weights,  # forward and backward, as flops_per_token counts
        }

    def _add_factorized(self, config: MuMoEConfig, experts: int) -> None:
        """Ours and the textbook form, if both are what the textbook form is in float64."""
        width = self.shape["width"]
        name = f"{config.factorization} {experts}"
        ours = make_ours(config, width, self.tokens_ND)
        weights = multiply_adds(MuMoE, config, width)
        package = package_entmax()
        reference = Einsum(ours, package) if package else Einsum(ours)
        expected = _output_and_gradient(reference.double(), self.tokens_ND.double())
        self._add(f"polyad {name}", of_ours(ours), weights, experts)
        if package is None:
            self.left_out[f"einsum {name}"] = "the entmax package is not installed"
        else:
            self._add(f"einsum {name}", timed(Einsum(ours, package)), weights, experts)
        for kind in (f"polyad {name}", f"einsum {name}"):
            if kind in self.layers:
                actual = _output_and_gradient(self.layers[kind], self.tokens_ND)
                self._check(kind, actual, expected)

    def _check(self, name: str, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        """How far output, and gradient of the tokens, are from the reference's."""
        pairs = zip(actual, expected, strict=True)
        difference = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
        if not difference <= TOLERANCES[self.precision]:
            raise RunError(
                f"{name} in {self.precision} is {difference:.1e} away from the textbook form in "
                f"float64, {TOLERANCES[self.precision]:.0e} is allowed"
            )
        self.about[name]["difference"] = difference

    def _goals(self, rows: dict[str, Any], compiled: bool) -> list[dict[str, Any]]:
        """The goals for 256 experts; `reached` is null where this machine cannot tell."""
        if any(self.shape[key] != value for key, value in GOAL_SHAPE.items()):
            return []
        if self.shape["tokens"] < GOAL_TOKENS:
            return []
        on_gpu = self.device.type == "cuda"
        goals = {"saved_bytes_ratio": SAVED_GOAL}
        if compiled or not on_gpu:  # on a GPU it is of compiled layers
            goals["seconds_ratio"] = GOALS[self.device.type]
        measurable = self.precision != "bf16" or on_gpu or has_bf16_products()
        return [
            {
                "variant": name,
                "of": key,
                "value": rows[name][key],
                "goal": goal,
                "reached": rows[name][key] <= goal
                if measurable or key != "seconds_ratio"
                else None,
            }
            for name in (f"polyad {kind} {GOAL_EXPERTS}" for kind in FACTORIZATIONS)
            if name in rows
            for key, goal in goals.items()
        ]


def _output_and_gradient(layer: nn.Module, tokens_ND: Tensor) -> tuple[Tensor, Tensor]:
    """[N, D] both, for the same direction."""
    tokens_ND = tokens_ND.detach().requires_grad_()
    generator = torch.Generator().manual_seed(2)
    direction_ND = torch.randn(tokens_ND.shape, generator=generator).to(tokens_ND)
    output_ND = layer(tokens_ND)
    (gradient_ND,) = torch.autograd.grad(output_ND, tokens_ND, direction_ND)
    return output_ND.detach(), gradient_ND


def mumoe_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    compiled = ", compiled" if result["compiled"] else ""
    lines = [
        f"{result['tokens']} tokens, {result['width']}-{result['hidden']}{compiled}; "
        f"{setting(result)}, entmax {result['entmax']}"
    ]
    for precision, compared in result["precisions"].items():
        lines += ["", precision, costs(compared["variants"])]
        lines += [f"{name}: left out: {why}" for name, why in compared["left_out"].items()]
        lines += [_goal_line(goal) for goal in compared["goals"]]
    return "\n".join(lines)


def _goal_line(goal: dict[str, Any]) -> str:
    what = {"seconds_ratio": "time", "saved_bytes_ratio": "saved bytes"}[goal["of"]]
    reached = {True: "reached", False: "missed", None: "not to be told without bf16 instructions"}
    return (
        f"{goal['variant']}: {what} {goal['value']:.3f} times dense, the goal is at most "
        f"{goal['goal']:.2f}: {reached[goal['reached']]}"
    )
