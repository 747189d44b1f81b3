"""`step.py`: a whole training step beside that of Hugging Face's GPT-2, or of a nanoGPT: `--peer`.

Or a step with factorized or sparse experts beside our own with dense MLPs: `--feed-forward`.

Forward, loss, backward and AdamW on the same tokens, with the same threads, one after the other in
turn; what counts is their ratio. Peers start from our weights, compute the same function (with
biases, as Hugging Face's has them), and are compiled as a whole, ours block by block, as in
training. A nanoGPT has the plainest step: fused AdamW on weights of the precision, no masters.
Peak memory on a CPU is that of a process of its own.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polyad.launch.command import Json, Positive, UsageError, results
from polyad.model.block import FeedForwardConfig
from polyad.model.build import build_model, compile_model, materialize
from polyad.model.decoder import Decoder, GPT2Config
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SparseMoEConfig
from polyad.parallel import comm
from polyad.parallel.tensor import cut_vocabulary
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError, RunError
from polyad.train.guard.stopping import is_out_of_memory
from polyad.train.loop.losses import LossConfig, routing_loss
from polyad.train.loop.metrics import LogConfig, peak_flops
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.loop.profiling import peak_memory_bytes
from polyad.train.tasks.random_input import flops_of_unit
from tests.benchmarks.comparison import (
    Compile,
    Device,
    PrecisionOption,
    benchmark,
    clocked,
    on_device,
    precisions,
    say,
    setting,
    span,
    start,
    summary,
    take_turns,
)
from tests.benchmarks.opponents import NanoGPT
from tests.helpers.reference import reference_of

# (samples, tokens of each, timed steps, steps before them): what fills the device, in a minute.
DEFAULTS = {"cpu": (2, 256, 15, 2), "cuda": (16, 1024, 20, 5)}
Step = Callable[[], None]
Call = Callable[[Tensor, Tensor], tuple[Tensor, tuple[RoutingStats, ...]]]
"""From token ids and targets [B, T] to the mean loss, and what routers did."""
LOSSES = LossConfig(load_balance=0.01, router_z=0.001)
"""Auxiliary losses of the routers, as in the shipped configurations."""


def feed_forward_of(name: str, width: int) -> FeedForwardConfig:
    """A feed-forward that costs a token as much as the dense one.

    Args:
        name: `dense`, `mumoe-cp`, `mumoe-tr`, `smoe-16` or `smoe-64`.
        width: D of the model.

    Returns:
        256 factorized experts of the rank that matches the dense one's parameters, or sparse ones
        of which two are as wide.
    """
    kind, _, which = name.partition("-")
    if kind == "mumoe":
        return MuMoEConfig(factorization="cp" if which == "cp" else "tr", num_experts=(256,))
    if kind == "smoe":
        return SparseMoEConfig(num_experts=int(which), top_k=2, expert_hidden_size=2 * width)
    return DenseFeedForwardConfig()


def make_step(name: str, config: GPT2Config, precision: str, shape: dict[str, Any]) -> Step:
    """A training step of one variant; all have the same random weights and see the same tokens.

    In bf16 the optimizer steps fp32 masters, as in training.
    """
    device = shape["device"]
    generator = torch.Generator().manual_seed(0)
    size = (shape["batch_size"], shape["sequence_length"] + 1)
    tokens = torch.randint(config.number("vocab_size"), size, generator=generator).to(device)
    module, call = PEERS.get(name, _ours)(config, device, precision)
    if shape["compiled"] and isinstance(module, Decoder):
        compile_model(module)
    elif shape["compiled"]:
        call = torch.compile(call)
    if name == "nanogpt":
        return _plain_step(module, lambda: call(tokens[:, :-1], tokens[:, 1:])[0])
    weights = dict(module.named_parameters())
    masters = {n: nn.Parameter(p.detach().float()) for n, p in weights.items()}
    if precision == "fp32":
        masters = weights
    named = [(n, p, p.dim()) for n, p in masters.items()]
    optimizer = build_optimizer(OptimizerConfig(), named)

    def step() -> None:
        loss, routing = call(tokens[:, :-1], tokens[:, 1:])
        of_routing = routing_loss(routing, LOSSES)
        loss = loss if of_routing is None else loss + of_routing
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if masters is not weights:
                for name, master in masters.items():
                    gradient = weights[name].grad
                    master.grad = None if gradient is None else gradient.float()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if masters is not weights:
                torch._foreach_copy_(list(weights.values()), list(masters.values()))
                module.zero_grad(set_to_none=True)

    return step


def _plain_step(module: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ours(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    module = build_model(config)
    world = comm.World(world_size=1, rank=0, local_rank=0, device=torch.device(device))
    cut_vocabulary(module, world, None)  # padded, as in training
    materialize(module, seed=0, device=device, dtype=DTYPES[precision])

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        output = module(ids_BT, target_ids_BT=targets_BT)
        return output.logits, output.routing

    return module, call


def _transformers(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    ours = build_model(config)
    materialize(ours, seed=0, device="cpu", dtype=torch.float32)
    module = reference_of(ours)[0].to(device, DTYPES[precision]).train()

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        logits_BTV = module(ids_BT, use_cache=False).logits.float()
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()), ()

    return module, call


def _nanogpt(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    weights = _ours(config, device, precision)[0].state_dict()
    with torch.device("meta"):
        module = NanoGPT(config, len(weights["token_embedding.weight"]))
    module.load_state_dict(weights, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_()
    return module, lambda ids_BT, targets_BT: (module(ids_BT, targets_BT), ())


PEERS = {"transformers": _transformers, "nanogpt": _nanogpt}
"""What a whole model is compared with, and how it is made."""


def measure(shape: dict[str, Any], names: tuple[str, str], precision: str) -> dict[str, Any]:
    """Times the steps of two variants in turn, the second of which is the base.

    Returns:
        JSON values: for each variant its median seconds, tokens/s, MFU (where the device's peak is
        known) and peak memory; and the ratio.

    Raises:
        RunError: the steps do not fit into the memory side by side.
    """
    device = shape["device"]
    _, _, repeats, warmup = DEFAULTS[device]
    configs = {name: config_of(name) for name in names}
    torch.compiler.reset()  # programs of another precision would be tried first
    try:
        if device == "cpu":
            fresh = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as own:
                futures = {name: own.submit(peak_memory, name, shape, precision) for name in names}
                memory = {name: future.result() for name, future in futures.items()}
            steps = {name: make_step(name, configs[name], precision, shape) for name in names}
        else:
            made = {name: on_gpu(name, configs[name], precision, shape) for name in names}
            steps = {name: step for name, (step, _) in made.items()}
            memory = {name: peak for name, (_, peak) in made.items()}
        runs = {name: clocked(step, device) for name, step in steps.items()}
        rows = summary(take_turns(runs, shape["repeats"] or repeats, before=warmup), names[1])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sizes = f"--batch-size {shape['batch_size']} and --sequence-length"
        raise RunError(
            f"out of memory with {sizes} {shape['sequence_length']}: lower one"
        ) from None
    peak = peak_flops(LogConfig(), precision) if device == "cuda" else None
    for name, row in rows.items():
        rate = shape["batch_size"] * shape["sequence_length"] / row["seconds"]
        at_length = {"sequence_length": shape["sequence_length"]}
        flops = flops_of_unit(configs[name].model_copy(update=at_length))
        row |= {"tokens_per_second": rate, "mfu": rate * flops / peak if peak else None}
        row["peak_memory_bytes"] = memory[name]
    ratio = {key: rows[names[0]][f"seconds_{key}"] for key in ("ratio", "ratio_interval")}
    return rows | ratio


def config_of(name: str) -> GPT2Config:
    """GPT-2 124M, with the feed-forward of a variant; with biases where Hugging Face's has them."""
    bias = name in ("polyad", *PEERS)
    config = GPT2Config(sequence_length=1024, vocab_size=50257, bias=bias)
    feed_forward = feed_forward_of(name, config.hidden_size)
    return config.model_copy(update={"feed_forward": feed_forward})


def peak_memory(name: str, shape: dict[str, Any], precision: str) -> int:
    """The most memory of two steps on a CPU, in bytes, in a process of its own."""
    with on_device("cpu"):
        step = make_step(name, config_of(name), precision, shape)
        step()
        step()
    return peak_memory_bytes(torch.device("cpu"))


def on_gpu(
    name: str, config: GPT2Config, precision: str, shape: dict[str, Any]
) -> tuple[Step, int]:
    """A step that was taken twice, and the most bytes of the second, without other variants'."""
    before = torch.cuda.memory_allocated()
    step = make_step(name, config, precision, shape)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return step, torch.cuda.max_memory_allocated() - before


def step_table(rows: dict[str, Any], names: tuple[str, str], precision: str) -> list[str]:
    """The results of one precision for a person."""
    lines = ["precision  variant       s a step  tokens/s  peak memory  MFU"]
    for name in names:
        row = rows[name]
        mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
        lines.append(
            f"{precision:9}  {name:12}  {row['seconds']:8.4f}  {row['tokens_per_second']:8,.0f}"
            f"  {row['peak_memory_bytes'] / 2**30:7.2f} GiB  {mfu}"
        )
    within = f"{rows['ratio']:.3f} ({span(rows['ratio_interval'], 3)})"
    lines.append(f"{precision:9}  median ratio, {' / '.join(names)}: {within}")
    return lines


@benchmark(
    "step",
    "--precision bf16 --json step.json",
    "--device cuda --precision bf16 --batch-size 32 --compile",
    "--feed-forward mumoe-cp",
    "--peer nanogpt --precision bf16",
)
def step(
    *,
    device: Device = "cpu",
    precision: PrecisionOption = None,
    batch_size: Positive | None = None,
    sequence_length: Positive | None = None,
    repeats: Positive | None = None,
    compile: Compile = False,
    feed_forward: Literal["mumoe-cp", "mumoe-tr", "smoe-16", "smoe-64"] | None = None,
    peer: Literal["transformers", "nanogpt"] | None = None,
    json: Json = None,
) -> None:
    """Times a training step of GPT-2 124M beside another's, or with experts.

    Args:
        batch_size (B): samples of a step; default 2, on a GPU 16.
        sequence_length (T): tokens of a sample; default 256, on a GPU 1024.
        repeats: timed steps; default 15, on a GPU 20.
        feed_forward: 256 factorized experts, or sparse ones of the same active width, beside our
            dense step; default: dense beside a peer.
        peer: what the dense step is compared with; default transformers.
    """
    if (sequence_length or 0) > 1024:
        raise ConfigError(f"--sequence-length: {sequence_length}: GPT-2 has 1024 positions")
    if feed_forward and peer:
        raise UsageError("--peer: --feed-forward is compared with our own dense step")
    names = (feed_forward, "dense") if feed_forward else ("polyad", peer or "transformers")
    shape = {
        "device": device,
        "batch_size": batch_size or DEFAULTS[device][0],
        "sequence_length": sequence_length or DEFAULTS[device][1],
        "repeats": repeats,
        "compiled": compile,
    }
    with on_device(device) as about, results(json) as show:
        result = {**shape, **about, "device_name": about["device"], "precisions": {}}
        lines = [setting(result)]
        for each in precisions(precision):
            say(each)
            result["precisions"][each] = measure(shape, names, each)
            lines += step_table(result["precisions"][each], names, each)
        show(result, "\n".join(lines))


if __name__ == "__main__":
    start(step)
