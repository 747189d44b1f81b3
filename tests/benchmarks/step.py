"""`step.py`: a whole training step beside the same step of Hugging Face's GPT-2.

Or a step with factorized or sparse experts beside our own with dense MLPs: `--feed-forward`.

Forward, loss, backward and AdamW on the same tokens, with the same threads, one after the other in
turn; what counts is their ratio. Peak memory is that of a process of its own.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from polyad.launch.command import Argument, Json, positive
from polyad.launch.output import results
from polyad.model.block import FeedForwardConfig
from polyad.model.build import build_model, compile_model, materialize
from polyad.model.decoder import Decoder
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SparseMoEConfig
from polyad.parallel.tensor import pad_vocabulary
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError, RunError
from polyad.train.guard.failures import is_out_of_memory
from polyad.train.loop.losses import LossConfig, routing_loss
from polyad.train.loop.metrics import LogConfig, peak_flops
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.loop.profiling import peak_memory_bytes
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.random_input import flops_of_unit
from tests.benchmarks.comparison import (
    Compile,
    Device,
    PrecisionOption,
    benchmark,
    clocked,
    now,
    on_device,
    precisions,
    say,
    setting,
    span,
    start,
    summary,
    take_turns,
)
from tests.benchmarks.profile import profile_table, time_by_kind

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
    """A training step of one variant; both have random weights and see the same tokens.

    In bf16 the optimizer steps fp32 masters, as in training.
    """
    device = shape["device"]
    generator = torch.Generator().manual_seed(0)
    size = (shape["batch_size"], shape["sequence_length"] + 1)
    tokens = torch.randint(config.number("vocab_size"), size, generator=generator).to(device)
    make = _theirs if name == "transformers" else _ours
    module, call = make(config, device, precision)
    if shape["compiled"]:
        _compile(module)
    else:  # a compiler would have to follow hooks
        _mark_loss(module.get_submodule("lm_head" if name == "transformers" else "head"))
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
        with record_function("optimizer"), torch.no_grad():
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


def _compile(module: nn.Module) -> None:
    """Compiles every block: ours by the trainer's own function, theirs alike."""
    if isinstance(module, Decoder):
        compile_model(module)
        return
    for block in module.get_submodule("transformer.h").children():
        block.compile()


def _mark_loss(head: nn.Module) -> None:
    """Has a profiler count the output head's forward pass, and ours is all of the loss, as loss."""
    regions: list[record_function] = []

    def enter(*_: object) -> None:
        regions.append(record_function("loss"))
        regions[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: object) -> None:
        regions.pop().__exit__(None, None, None)

    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)


def _ours(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    module = build_model(config)
    pad_vocabulary(module)  # as in training
    materialize(module, seed=0, device=device, dtype=DTYPES[precision])

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        output = module(ids_BT, target_ids_BT=targets_BT)
        return output.logits, output.routing

    return module, call


def _theirs(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    import transformers

    dropout = {name: config.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    reference = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.sequence_length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        use_cache=False,
        attn_implementation="sdpa",
        **dropout,
    )
    module: nn.Module = transformers.GPT2LMHeadModel(reference).to(device, DTYPES[precision])

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        logits_BTV = module(ids_BT).logits
        with record_function("loss"):
            return cross_entropy(logits_BTV, targets_BT.contiguous()).mean(), ()

    return module.train(), call


def measure(shape: dict[str, Any], names: tuple[str, str], precision: str) -> dict[str, Any]:
    """Times the steps of two variants in turn, the second of which is the base.

    Returns:
        JSON values: for each variant its median seconds, tokens/s, MFU (where the device's peak is
        known) and peak memory, and its seconds by kind of work if they were asked for; and the
        ratio.

    Raises:
        RunError: the steps do not fit into the memory side by side.
    """
    device, profiled = shape["device"], shape["profile"]
    _, _, repeats, warmup = DEFAULTS[device]
    configs = {name: config_of(name) for name in names}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as own:
        memory = {name: own.submit(peak_memory, name, shape, precision) for name in names}
        memory = {name: future.result() for name, future in memory.items()}
    torch.compiler.reset()  # programs of another precision would be tried first
    try:
        steps = {name: make_step(name, configs[name], precision, shape) for name in names}
        runs = {name: clocked(step, device) for name, step in steps.items()}
        rows = summary(take_turns(runs, shape["repeats"] or repeats, before=warmup), names[1])
        kinds = {name: time_by_kind(step, device) for name, step in steps.items() if profiled}
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
        row |= memory[name] | ({"seconds_by_kind": kinds[name]} if profiled else {})
    ratio = {key: rows[names[0]][f"seconds_{key}"] for key in ("ratio", "ratio_interval")}
    return rows | ratio


def config_of(name: str) -> GPT2Config:
    """GPT-2 124M, with the feed-forward of a variant."""
    config = GPT2Config(sequence_length=1024, vocab_size=50257)
    feed_forward = feed_forward_of(name, config.hidden_size)
    return config.model_copy(update={"feed_forward": feed_forward})


def peak_memory(name: str, shape: dict[str, Any], precision: str) -> dict[str, int]:
    """The most memory of two steps, in bytes, and on a GPU what its allocator held."""
    device = shape["device"]
    with on_device(device):
        step = make_step(name, config_of(name), precision, shape)
        step()
        step()
        now(device)
    memory = {"peak_memory_bytes": peak_memory_bytes(torch.device(device))}
    if device == "cuda":
        memory["peak_memory_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return memory


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
    kinds = {name: rows[name].get("seconds_by_kind") for name in names}
    if all(kinds.values()):
        lines += ["", f"{precision}, a step by kind of work", *profile_table(kinds), ""]
    return lines


@benchmark(
    "step",
    "--precision bf16 --json step.json",
    "--device cuda --precision bf16 --batch-size 32 --compile",
    "--feed-forward mumoe-cp",
)
def step(
    *,
    device: Device = "cpu",
    precision: PrecisionOption = None,
    batch_size: Annotated[
        int | None, Argument("samples of a step; default 2, on a GPU 16", "B", positive)
    ] = None,
    sequence_length: Annotated[
        int | None, Argument("tokens of a sample; default 256, on a GPU 1024", "T", positive)
    ] = None,
    repeats: Annotated[
        int | None, Argument("timed steps; default 15, on a GPU 20", "N", positive)
    ] = None,
    compile: Compile = False,
    feed_forward: Annotated[
        Literal["mumoe-cp", "mumoe-tr", "smoe-16", "smoe-64"] | None,
        Argument(
            "256 factorized experts, or sparse ones of the same active width, beside our dense "
            "step; default: dense beside transformers'"
        ),
    ] = None,
    profile: Annotated[
        bool,
        Argument(
            "say where a step's time goes: products, attention, loss, optimizer, exchange, gaps"
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Times a training step of GPT-2 124M beside transformers', or with experts."""
    if (sequence_length or 0) > 1024:
        raise ConfigError(f"--sequence-length: {sequence_length}: GPT-2 has 1024 positions")
    names = (feed_forward, "dense") if feed_forward else ("polyad", "transformers")
    shape = {
        "device": device,
        "batch_size": batch_size or DEFAULTS[device][0],
        "sequence_length": sequence_length or DEFAULTS[device][1],
        "repeats": repeats,
        "compiled": compile,
        "profile": profile,
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
