"""`polyad bench step`: a whole training step beside the same step of Hugging Face's GPT-2.

Forward, loss, backward and AdamW on the same tokens, with the same threads, one after the other in
turn; what counts is the ratio of the medians. Peak memory is that of a process of its own for each.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.build import build_model, materialize
from model.gpt2 import GPT2Config, compile_blocks, flops_per_token
from parallel.zero import DTYPES
from train.loss import token_losses
from train.metrics import LogConfig, peak_flops, peak_memory_bytes
from train.optimizer import OptimizerConfig, build_optimizer

Step = Callable[[], None]
VARIANTS = ("polyad", "transformers")


def bench_step(
    *,
    device: str = "cpu",
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    batch_size: int = 2,
    sequence_length: int = 256,
    repeats: int = 5,
    compiled: bool = False,
    model: GPT2Config | None = None,
) -> dict[str, Any]:
    """Times a training step of GPT-2 124M.

    Args:
        device: `cpu` or `cuda`.
        precisions: of weights and activations.
        batch_size: B.
        sequence_length: T.
        repeats: steps of each that are timed; one more goes before.
        compiled: whether ours runs through torch.compile.
        model: another size than 124M.

    Returns:
        JSON values: for each precision, each variant's median seconds, tokens/s, MFU (where the
        device's peak is known), first step's seconds and peak memory; and the ratio of medians.
    """
    config = model or GPT2Config(sequence_length=1024, vocab_size=50257)
    shape: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
    }
    result: dict[str, Any] = {"model": config.model_dump(mode="json"), **shape, "precisions": {}}
    result |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for precision in precisions:
        steps = {
            name: make_step(name, config, precision, compiled=compiled, **shape)
            for name in VARIANTS
        }
        first, medians = _interleaved(steps, repeats, device)
        del steps
        rows = {}
        for name in VARIANTS:
            rate = batch_size * sequence_length / medians[name]
            at_length = config.model_copy(update={"sequence_length": sequence_length})
            peak = peak_flops(LogConfig(), precision)
            rows[name] = {
                "seconds": medians[name],
                "first_step_seconds": first[name],
                "tokens_per_second": rate,
                "mfu": rate * flops_per_token(at_length) / peak if peak else None,
                "peak_memory_bytes": _peak_memory(name, config, precision, compiled, shape),
            }
        ratio = medians["polyad"] / medians["transformers"]
        result["precisions"][precision] = rows | {"ratio": ratio}
    return result


def make_step(
    name: str,
    config: GPT2Config,
    precision: str,
    *,
    device: str,
    batch_size: int,
    sequence_length: int,
    compiled: bool,
) -> Step:
    """A training step of one variant; both have random weights and see the same tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, sequence_length + 1)
    tokens = torch.randint(config.vocab_size or 0, shape, generator=generator).to(device)
    make = {"polyad": _ours, "transformers": _theirs}[name]
    module, logits_of = make(config, device, precision)
    if compiled and name == "polyad":
        compile_blocks(module)
    named = [(n, p, p.dim()) for n, p in module.named_parameters()]
    optimizer = build_optimizer(OptimizerConfig(), named)

    def step() -> None:
        losses = token_losses(logits_of(tokens[:, :-1]), tokens[:, 1:].contiguous())
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ours(
    config: GPT2Config, device: str, precision: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    module = build_model(config)
    materialize(module, seed=0, device=device, dtype=DTYPES[precision])
    return module, lambda ids: module(ids).logits


def _theirs(
    config: GPT2Config, device: str, precision: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
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
    return module.train(), lambda ids: module(ids).logits


def _interleaved(
    steps: dict[str, Step], repeats: int, device: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each one's first step, and the median of the others, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return (
        {name: taken[0] for name, taken in times.items()},
        {name: statistics.median(taken[1:]) for name, taken in times.items()},
    )


def _peak_memory(
    name: str, config: GPT2Config, precision: str, compiled: bool, shape: dict[str, Any]
) -> int:
    """The most memory that two steps of a variant take, in a process of their own, in bytes."""
    arguments = {"name": name, "config": config.model_dump(mode="json"), "precision": precision}
    order = json.dumps(arguments | {"compiled": compiled, **shape})
    done = subprocess.run(
        [sys.executable, "-m", "launch.bench.step", order],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def _measure_memory(order: dict[str, Any]) -> None:
    config = GPT2Config.model_validate(order.pop("config"))
    step = make_step(order.pop("name"), config, order.pop("precision"), **order)
    step()
    step()
    print(peak_memory_bytes(torch.device(order["device"])))


def step_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = ["precision  variant       s a step  tokens/s   first step  peak memory  MFU"]
    for precision, rows in result["precisions"].items():
        for name in VARIANTS:
            row = rows[name]
            mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
            lines.append(
                f"{precision:9}  {name:12}  {row['seconds']:8.3f}  {row['tokens_per_second']:8,.0f}"
                f"  {row['first_step_seconds']:9.2f} s  {row['peak_memory_bytes'] / 2**30:7.2f} GiB"
                f"  {mfu}"
            )
        lines.append(f"{precision:9}  ratio of medians, polyad / transformers: {rows['ratio']:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    _measure_memory(json.loads(sys.argv[1]))
