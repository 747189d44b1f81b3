"""`step.py`: a whole training step beside the same step of Hugging Face's GPT-2.

Or a step with factorized or sparse experts beside our own with dense MLPs: `--feed-forward`.

Forward, loss, backward and AdamW on the same tokens, with the same threads, one after the other in
turn; what counts is their ratio (see `turns.py`). Starts and peak memory are those of processes of
their own: cold with an empty cache of compiled code, warm with what the cold one left there.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from polyad.launch.command import Argument, Json, positive
from polyad.launch.output import results
from polyad.model.decoder_config import GPT2Config
from polyad.train.errors import ConfigError, RunError
from polyad.train.guard.failures import is_out_of_memory
from polyad.train.loop.metrics import LogConfig, peak_flops
from polyad.train.tasks.random_input import flops_of_unit
from tests.benchmarks import environment
from tests.benchmarks.profile import profile_table, time_by_kind
from tests.benchmarks.script import Device, PrecisionOption, benchmark, precisions, start
from tests.benchmarks.step_variants import goal_of, make_step, model_of
from tests.benchmarks.turns import clocked, prepare_device, say, span, summary, take_turns

VARIANTS = ("polyad", "transformers")
OUT_OF_MEMORY = "out of memory"
SIZES = ("batch_size", "sequence_length")
# (samples, tokens of each, timed steps, steps before them): what fills the device, in a minute.
DEFAULTS = {"cpu": (2, 256, 15, 2), "cuda": (16, 1024, 20, 5)}


def bench_step(
    *,
    device: str = "cpu",
    precisions: tuple[str, ...] = ("fp32", "bf16"),
    batch_size: int | None = None,
    sequence_length: int | None = None,
    repeats: int | None = None,
    compiled: bool = False,
    feed_forward: str | None = None,
    model: GPT2Config | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """Times a training step of GPT-2 124M.

    Args:
        device: `cpu` or `cuda`.
        precisions: of weights and activations.
        batch_size: B; None: as `DEFAULTS` has it for the device, and so the next two.
        sequence_length: T.
        repeats: steps of each that are timed; others go before.
        compiled: whether every block, of both, runs through torch.compile.
        feed_forward: a name of `FEED_FORWARDS`; its step is then timed beside our dense one, and
            transformers' is not.
        model: another size than 124M.
        profiled: whether to say where the time of a step goes, too.

    Returns:
        JSON values: for each precision, each variant's median seconds, tokens/s, MFU (where the
        device's peak is known), starts and peak memory, and its seconds by kind of work if they
        were asked for; and the ratio, with its goal.

    Raises:
        ConfigError: there is no such device.
        RunError: a step does not fit into its memory.
    """
    prepare_device(device)
    default_batch, default_length, default_repeats, warmup = DEFAULTS[device]
    config = model or GPT2Config(sequence_length=1024, vocab_size=50257)
    length = sequence_length or default_length
    if length > config.sequence_length:
        raise ConfigError(
            f"--sequence-length: {length} is not allowed: GPT-2 has {config.sequence_length} "
            f"positions"
        )
    shape: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size or default_batch,
        "sequence_length": length,
        "compiled": compiled,
    }
    repeats = repeats or default_repeats
    result = {"model": config.model_dump(mode="json"), **shape, **_surroundings(device)}
    result |= {"repeats": repeats, "steps_before": warmup, "precisions": {}}
    pair = (feed_forward, "dense") if feed_forward else VARIANTS
    models = {name: model_of(name, config) for name in pair}
    result["variants"] = list(pair)
    for precision in precisions:
        with tempfile.TemporaryDirectory() as cache, _compiled_code_in(Path(cache)):
            starts = {name: _starts(name, models[name], precision, shape) for name in pair}
            compared = _compare(models, precision, shape, repeats, warmup, profiled=profiled)
        rows: dict[str, Any] = {
            name: _rates(compared[name]["seconds"], models[name], precision, shape)
            | starts[name]
            | {key: compared[name][key] for key in ("seconds_by_kind",) if key in compared[name]}
            for name in pair
        }
        ratio = compared[pair[0]]["seconds_ratio"]
        rows |= {"ratio": ratio, "ratio_interval": compared[pair[0]]["seconds_ratio_interval"]}
        result["precisions"][precision] = rows
        goal = goal_of(feed_forward, device) if feed_forward else None
        if goal is not None:
            result["precisions"][precision] |= {"goal": goal, "reached": ratio <= goal}
    return result


def _surroundings(device: str) -> dict[str, Any]:
    """What the results depend on beside the shape."""
    import transformers

    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else None,
        "tf32": False,
    }


def _rates(
    seconds: float, config: GPT2Config, precision: str, shape: dict[str, Any]
) -> dict[str, Any]:
    length = shape["sequence_length"]
    rate = shape["batch_size"] * length / seconds
    at_length = config.model_copy(update={"sequence_length": length})
    peak = peak_flops(LogConfig(), precision) if shape["device"] == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops_of_unit(at_length) / peak if peak else None,
    }


def _compare(
    models: dict[str, GPT2Config],
    precision: str,
    shape: dict[str, Any],
    repeats: int,
    warmup: int,
    *,
    profiled: bool,
) -> dict[str, dict[str, Any]]:
    """Times each variant's steps in turn; the first ones do not count."""
    torch.compiler.reset()  # programs of another precision would be tried first
    say(precision)
    try:
        steps = {
            name: make_step(name, config, precision, **shape) for name, config in models.items()
        }
        runs = {name: clocked(step, shape["device"]) for name, step in steps.items()}
        times = take_turns(runs, repeats, before=warmup)
        kinds = {n: time_by_kind(step, shape["device"]) for n, step in steps.items() if profiled}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _failed("both side by side", shape, OUT_OF_MEMORY) from None
    result = summary(times, list(models)[1])
    for name, seconds in kinds.items():
        result[name]["seconds_by_kind"] = seconds
    return result


def _starts(name: str, config: GPT2Config, precision: str, shape: dict[str, Any]) -> dict[str, Any]:
    """A variant's starts, and the most memory that two steps take.

    Where nothing is compiled no start leaves anything for the next, and one is made. The memory is
    that of the last one: on a CPU a cold start's would be the compiler's too.
    """
    cold = _start(name, config, precision, shape)
    warm = _start(name, config, precision, shape) if shape["compiled"] else None
    last = warm or cold
    memory = ("peak_memory_bytes", "peak_memory_reserved_bytes")
    times = {
        kind: {key: value for key, value in start.items() if key not in memory} if start else None
        for kind, start in (("cold_start", cold), ("warm_start", warm))
    }
    return {key: last[key] for key in memory} | times


def _start(name: str, config: GPT2Config, precision: str, shape: dict[str, Any]) -> dict[str, Any]:
    order = {"name": name, "config": config.model_dump(mode="json"), "precision": precision}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.benchmarks.start"),
            json.dumps({"began": time.time()} | order | shape),
        ],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        killed = done.returncode == -signal.SIGKILL  # the kernel's way when memory runs out
        lines = [OUT_OF_MEMORY] if killed else done.stderr.strip().splitlines()
        raise _failed(name, shape, lines[-1] if lines else f"status {done.returncode}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _failed(who: str, shape: dict[str, Any], reason: str) -> RunError:
    sizes = " and ".join(f"--{key.replace('_', '-')} {shape[key]}" for key in SIZES)
    advice = "; lower one of them" if reason == OUT_OF_MEMORY else ""
    return RunError(f"step: {who} with {sizes}: {reason}{advice}")


@contextlib.contextmanager
def _compiled_code_in(folder: Path) -> Iterator[None]:
    """A context in which this process and its children cache compiled code only in this folder."""
    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(place) for name, place in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def step_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        "precision  variant       s a step  tokens/s   imports  cold start  warm start  peak memory"
        "  MFU"
    ]
    for precision, rows in result["precisions"].items():
        for name in result["variants"]:
            row = rows[name]
            mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
            lines.append(
                f"{precision:9}  {name:12}  {row['seconds']:8.4f}  {row['tokens_per_second']:8,.0f}"
                f"  {_seconds(row['cold_start'], 'imports_seconds'):>8}"
                f"  {_seconds(row['cold_start'], 'first_step_seconds'):>10}"
                f"  {_seconds(row['warm_start'], 'first_step_seconds'):>10}"
                f"  {row['peak_memory_bytes'] / 2**30:7.2f} GiB  {mfu}"
            )
        goal = f", the goal is at most {rows['goal']:.2f}" if "goal" in rows else ""
        pair = " / ".join(result["variants"])
        found = rows["ratio_interval"]
        between = f", {span(found, 3)} with 90%" if found else ""
        lines.append(f"{precision:9}  median ratio, {pair}: {rows['ratio']:.3f}{between}{goal}")
        kinds = {name: rows[name].get("seconds_by_kind") for name in result["variants"]}
        if all(kinds.values()):
            lines += ["", f"{precision}, a step by kind of work", *profile_table(kinds), ""]
    return "\n".join(lines)


def _seconds(start: dict[str, Any] | None, key: str) -> str:
    return "-" if start is None else f"{start[key]:.1f} s"


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
    compile: Annotated[bool, Argument("compile the blocks of both with torch.compile")] = False,
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
    with results(json) as show:
        result = bench_step(
            device=device,
            precisions=precisions(precision),
            batch_size=batch_size,
            sequence_length=sequence_length,
            repeats=repeats,
            compiled=compile,
            feed_forward=feed_forward,
            profiled=profile,
        )
        show(result, step_table(result))


if __name__ == "__main__":
    start(step)
