"""`routing.py`: what a graph of tokens adds to a sparse mixture of experts.

In one GPT-2 block (attention and experts) and in a whole model with its loss, forward and backward
on one sequence of T tokens: the router without a graph, with each graph, and with each graph as the
paper writes it, a T x T matrix. All in turn in one run; what counts is the ratio to the plain
router's (see `turns.py`).

Shapes: B batch, T tokens in a sequence, D width.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from polyad.launch.command import Argument, Json, non_negative, positive
from polyad.launch.output import results
from polyad.model.build import compile_model, num_parameters
from polyad.model.decoder import Decoder
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError, RunError
from polyad.train.tasks.distillation import cross_entropy
from tests.benchmarks.routing_peers import (
    MATERIALIZED,
    PLAIN,
    difference,
    graphs_of,
    make_plain,
    make_variants,
)
from tests.benchmarks.routing_table import add_ratios, model_config, routing_table
from tests.benchmarks.script import (
    Device,
    PrecisionOption,
    Repeats,
    Threads,
    benchmark,
    precisions,
    start,
)
from tests.benchmarks.timed_layer import (
    TOLERANCES,
    TimedLayer,
    pass_rows,
    passes,
    saved_bytes,
    surroundings,
    threads_of,
)
from tests.benchmarks.turns import free_bytes, prepare_device, say, take_turns

GOAL_SHAPE = {
    "width": 768,
    "heads": 12,
    "experts": 16,
    "top_k": 2,
    "hidden": 3072,
    "layers": 12,
    "vocab_size": 50257,
}
GOAL_TOKENS = 512
GOALS = {"block": 1.15, "model": 1.04}
"""Of that shape: times the plain router's."""
CHECKED = 512
"""Tokens of a sequence that are compared before the clock counts: in float64, with a matrix."""
MATRICES = {"similarity": 5, "cosine": 5, "attention": 9}
"""T x T matrices in fp32 that a materialized graph holds at its most, in its backward pass."""


def bench_routing(
    *,
    tokens: tuple[int, ...] = (512, 2048, 8192),
    model_tokens: tuple[int, ...] = (512,),
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    width: int = 768,
    heads: int = 12,
    experts: int = 16,
    top_k: int = 2,
    hidden: int | None = None,
    layers: int = 12,
    vocab_size: int = 50257,
    repeats: int = 5,
    threads: int | None = None,
    device: str = "cpu",
    compiled: bool = False,
) -> dict[str, Any]:
    """Times each graph.

    Args:
        tokens: T of the block, one after the other; a batch is one sequence.
        model_tokens: T of the whole model, one after the other.
        precisions: of weights and activations; routing is fp32.
        width: D.
        heads: of attention.
        experts: E.
        top_k: K.
        hidden: F, of one expert; None: 4 D.
        layers: of the whole model; 0: no whole model.
        vocab_size: of the whole model.
        repeats: how often each is timed; once more goes before.
        threads: of each; None: as many as PyTorch takes.
        device: `cpu` or `cuda`.
        compiled: whether blocks run through torch.compile.

    Returns:
        JSON values: for each precision, block and model, and T: of each variant the median seconds,
        their multiple of the plain router's and what it would be if a graph's FLOPs took as long as
        the others (the least in one precision), the bytes
        kept for backward for each token and the graph's own part of them.

    Raises:
        ConfigError: shapes that do not agree, or a device that is not there.
        RunError: a graph does not compute what its definition says.
    """
    if top_k > experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    if experts < 2:
        raise ConfigError(f"--experts: {experts} is less than 2")
    if width % heads:
        raise ConfigError(f"--width: {width} is not a multiple of --heads: {heads}")
    prepare_device(device)
    shape = {
        "width": width,
        "heads": heads,
        "experts": experts,
        "top_k": top_k,
        "hidden": hidden or 4 * width,
        "layers": layers,
        "vocab_size": vocab_size,
    }
    places = {"block": tokens} | ({"model": model_tokens} if layers else {})
    for precision in precisions:
        _check_memory(shape, places, precision, torch.device(device))
    with threads_of(threads):
        results: dict[str, Any] = {}
        for precision in precisions:
            comparison = _Comparison(shape, precision, repeats, torch.device(device), compiled)
            results[precision] = {
                place: comparison.at(place, lengths) for place, lengths in places.items()
            }
        return {
            **shape,
            **surroundings(device, repeats),
            "compiled": compiled,
            "precisions": results,
        }


class _Comparison:
    """All variants in one precision.

    Args:
        shape: as in the result.
        precision: of weights and activations.
        repeats: how often each is timed.
        device: where.
        compiled: whether blocks run through torch.compile.
    """

    def __init__(
        self,
        shape: dict[str, int],
        precision: str,
        repeats: int,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self.shape, self.precision, self.repeats = shape, precision, repeats
        self.device, self.compiled = device, compiled

    def at(self, place: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
        """The results of the block, or of the whole model, one for each T."""
        config = model_config(self.shape, place, max(lengths))
        say(f"{self.precision}: weights of the {place}")
        plain = make_plain(config, self.precision, self.device)
        return [self._compare(place, plain, length) for length in dict.fromkeys(lengths)]

    def _compare(self, place: str, plain: Decoder, length: int) -> dict[str, Any]:
        models = make_variants(plain, length, self.precision, materialized=place == "block")
        left_out = _leave_out(models, length, self.device)
        make = self._blocks if place == "block" else self._models
        layers, inputs, gradient = make(models, length)
        result: dict[str, Any] = {"tokens": length, "left_out": left_out}
        if place == "block":
            result["difference"] = self._check(models, inputs.detach()[:, :CHECKED])
        if self.compiled:
            torch.compiler.reset()  # programs of another length would be tried first
            for model in models.values():
                compile_model(model)
        say(f"{self.precision}, {place}, {length} tokens")
        # All variants are instances of one class: dynamo counts them as recompilations.
        with torch._dynamo.config.patch(recompile_limit=8 * len(layers)):
            runs = {name: passes(layer, inputs, gradient) for name, layer in layers.items()}
            rows = pass_rows(take_turns(runs, self.repeats), PLAIN)
            for name, layer in layers.items():
                rows[name]["saved_bytes"] = saved_bytes(layer, inputs)
        add_ratios(rows, self.shape, place, length)
        result["variants"] = rows
        if self.shape == GOAL_SHAPE and length == GOAL_TOKENS:
            ratio = max(rows[name]["seconds_ratio"] for name in graphs_of(1))
            result |= {"goal": GOALS[place], "reached": ratio <= GOALS[place]}
        return result

    def _blocks(
        self, models: Mapping[str, Decoder], length: int
    ) -> tuple[dict[str, TimedLayer], Tensor, Tensor]:
        """Blocks, their input, and the gradient that comes to their output."""
        generator = torch.Generator().manual_seed(1)
        x_BTD, gradient_BTD = (
            torch.randn(1, length, self.shape["width"], generator=generator)
            .to(self.device, DTYPES[self.precision])
            for _ in range(2)
        )  # fmt: skip
        layers = {name: _block_of(model) for name, model in models.items()}
        return layers, x_BTD.requires_grad_(), gradient_BTD

    def _models(
        self, models: Mapping[str, Decoder], length: int
    ) -> tuple[dict[str, TimedLayer], Tensor, None]:
        """Whole models with the loss, and the tokens."""
        generator = torch.Generator().manual_seed(1)
        shape = (1, length + 1)
        ids_BT = torch.randint(self.shape["vocab_size"], shape, generator=generator)
        ids_BT, labels_BT = (
            x.contiguous().to(self.device) for x in (ids_BT[:, :-1], ids_BT[:, 1:])
        )
        layers = {name: _with_loss(model, labels_BT) for name, model in models.items()}
        return layers, ids_BT, None

    def _check(self, models: Mapping[str, Decoder], x_BTD: Tensor) -> dict[str, float]:
        """How far each graph is from its definition."""
        allowed = TOLERANCES[self.precision]
        apart = {}
        for name in graphs_of(1):
            apart[name] = difference(models[name].blocks[0], x_BTD)
            if not apart[name] <= allowed:
                raise RunError(
                    f"{name} in {self.precision} is {apart[name]:.1e} away from the materialized "
                    f"form in float64, {allowed:.0e} is allowed"
                )
        return apart


def _block_of(model: Decoder) -> TimedLayer:
    block = model.blocks[0]

    def call(x_BTD: Tensor) -> Tensor:
        output: Tensor = block(x_BTD)[0]
        return output

    return TimedLayer(block, call)


def _with_loss(model: Decoder, labels_BT: Tensor) -> TimedLayer:
    return TimedLayer(model, lambda ids_BT: cross_entropy(model(ids_BT).logits, labels_BT).mean())


def _check_memory(
    shape: dict[str, int], places: dict[str, tuple[int, ...]], precision: str, device: torch.device
) -> None:
    """Weights and gradients have to fit, of one variant at a time."""
    free = free_bytes(device)
    for place, lengths in places.items():
        parameters = num_parameters(model_config(shape, place, max(lengths)))
        needed = 2 * parameters * DTYPES[precision].itemsize
        if needed > free:
            option = "--hidden" if place == "block" else "--layers"
            raise ConfigError(
                f"{option}: {shape[option[2:]]}: the {place} in {precision} takes "
                f"{needed / 2**30:.1f} GiB with its gradients, {free / 2**30:.1f} are free"
            )


def _leave_out(models: dict[str, Decoder], length: int, device: torch.device) -> dict[str, str]:
    """Takes out the variants whose matrices do not fit, and says why."""
    free = free_bytes(device)
    reasons = {}
    for name, matrices in MATRICES.items():
        needed = 4 * matrices * length**2
        if MATERIALIZED + name in models and needed > free:
            del models[MATERIALIZED + name]
            reasons[MATERIALIZED + name] = (
                f"takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
            )
    return reasons


@benchmark(
    "routing",
    "--tokens 512 2048 --precision bf16 --json routing.json",
    "--tokens 8192 --layers 0",
)
def routing(
    *,
    tokens: Annotated[
        tuple[int, ...],
        Argument(
            "tokens of the block's one sequence, one length after the other; default 512 2048 8192",
            "T",
            positive,
            nargs="+",
        ),
    ] = (512, 2048, 8192),
    model_tokens: Annotated[
        tuple[int, ...],
        Argument("tokens of the whole model's one sequence; default 512", "T", positive, nargs="+"),
    ] = (512,),
    layers: Annotated[
        int,
        Argument(
            "blocks of the whole model; 0: no whole model; default 12, which takes 8 GiB in fp32",
            "L",
            non_negative,
        ),
    ] = 12,
    vocab_size: Annotated[
        int, Argument("vocabulary of the whole model; default 50257", "V", positive)
    ] = 50257,
    width: Annotated[int, Argument("width of a token; default 768", "D", positive)] = 768,
    heads: Annotated[int, Argument("heads of attention; default 12", "A", positive)] = 12,
    experts: Annotated[int, Argument("number of experts; default 16", "E", positive)] = 16,
    top_k: Annotated[int, Argument("experts of a token; default 2", "K", positive)] = 2,
    hidden: Annotated[
        int | None, Argument("inner width of one expert; default 4 D", "F", positive)
    ] = None,
    precision: PrecisionOption = None,
    repeats: Repeats = 5,
    threads: Threads = None,
    device: Device = "cpu",
    compile: Annotated[bool, Argument("compile every block with torch.compile")] = False,
    json: Json = None,
) -> None:
    """Times graphs of tokens beside the plain router and the T x T form."""
    with results(json) as show:
        result = bench_routing(
            tokens=tuple(tokens),
            model_tokens=tuple(model_tokens),
            precisions=precisions(precision),
            width=width,
            heads=heads,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            layers=layers,
            vocab_size=vocab_size,
            repeats=repeats,
            threads=threads,
            device=device,
            compiled=compile,
        )
        show(result, routing_table(result))


if __name__ == "__main__":
    start(routing)
