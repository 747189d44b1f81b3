"""What the scripts share: variants that are timed in turn and compared by ratios.

A machine is faster in one minute than in the next. So a run is compared with the base's of its own
turn, and the median of these ratios is what counts; how sure it is stands beside it. The order of
the variants changes from turn to turn, so that what a run leaves in caches is not always found by
the same variant.

Shapes: N tokens, D width.
"""

import contextlib
import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from polyad.launch.cli import guard
from polyad.launch.command import Argument, Command, Function, command, positive
from polyad.launch.processes import processor_name, unblock_signals
from polyad.model.feedforward import FeedForward, FeedForwardContext
from polyad.parallel import comm
from polyad.parallel.host_memory import keep_freed_memory
from polyad.train.errors import ConfigError, RunError
from polyad.train.results import aligned
from tests.helpers.allocated import saved_bytes
from tests.helpers.random_model import drawn

Repeats = Annotated[int, Argument("timed runs of each; default %(default)s", "N", positive)]
Numbers = Annotated[Sequence[int], Argument(parse=positive, nargs="+")]
Threads = Annotated[
    int | None, Argument("threads of each variant; default: PyTorch's own", "N", positive)
]
PrecisionOption = Annotated[Literal["fp32", "bf16"] | None, Argument("default: both")]
Device = Annotated[Literal["cpu", "cuda"], Argument("default cpu")]
Compile = Annotated[bool, Argument("compile every variant with torch.compile")]

Run = Callable[[], tuple[float, ...]]
"""Does the work once; returns the seconds of its parts."""
Times = dict[str, list[tuple[float, ...]]]
"""By variant, the parts of each turn, in seconds."""
CONFIDENCE = 0.9
"""Confidence level of the intervals of medians."""
SLOW = 10
"""Variants that take longer than this multiple of the base are timed once: their ratio needs no
third digit."""
CALLS = 20
"""Passes of a run on a GPU."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.03}
"""Allowed norm of the difference to a reference, as a share of the reference's norm."""


def benchmark(name: str, *examples: str) -> Callable[[Function], Command]:
    """A decorator that makes a function the command of a script.

    Args:
        name: of the script's file.
        examples: options, each for a line at the end of `--help`.
    """
    program = "python -m tests.benchmarks."
    lines = (f"{program}{name} {options}".strip() for options in examples)
    return command(name, *lines, program=program)


def run(script: Command, words: Sequence[str]) -> int:
    """Runs a script's command with the words of a command line; returns the exit status."""
    return guard(lambda: script(words))


def start(script: Command) -> NoReturn:
    """Runs a script's command on the command line, and ends the process."""
    unblock_signals()
    comm.leave(run(script, sys.argv[1:]))


def precisions(chosen: str | None) -> tuple[str, ...]:
    """The precisions that are measured: the one that was asked for, or both."""
    return (chosen,) if chosen else ("fp32", "bf16")


@contextlib.contextmanager
def on_device(device: str, threads: int | None = None) -> Iterator[dict[str, Any]]:
    """A context that computes on a device with so many threads, and with memory as in a run.

    Yields:
        What the results depend on beside the shape, as JSON values.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda: there is no CUDA device here; cpu is allowed")
    if device == "cpu":
        keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield {
            "device": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    finally:
        torch.set_num_threads(before)


def say(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def now(device: str | torch.device) -> float:
    """The time in seconds, once the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def take_turns(
    runs: Mapping[str, Run], repeats: int, *, before: int = 1, base: str | None = None
) -> Times:
    """Runs every variant once per turn, and reports progress.

    Args:
        runs: The variants by name.
        repeats: Turns that count.
        before: Turns before them.
        base: A variant; others that take `SLOW` times as long run in one turn that counts, not in
            all. None: all run in all.

    Returns:
        The seconds of the turns that count.
    """
    times: Times = {name: [] for name in runs}
    slow: set[str] = set()
    began = 0.0
    for turn in range(before + repeats):
        if turn == before:
            began = time.perf_counter()
        for name in _order(list(runs), turn):
            if name not in slow:
                seconds = runs[name]()
                if turn >= before:
                    times[name].append(seconds)
        if turn == before and base:
            slow = {name for name in runs if sum(times[name][0]) > SLOW * sum(times[base][0])}
        say(_progress(turn, before, repeats, began))
    return times


def _order(names: list[str], turn: int) -> list[str]:
    """Every variant comes first, and every second turn goes the other way."""
    first = turn // 2 % len(names)
    names = names[first:] + names[:first]
    return names[::-1] if turn % 2 else names


def _progress(turn: int, before: int, repeats: int, began: float) -> str:
    done = turn + 1 - before
    if done <= 0:
        return f"  {turn + 1} of {before} before the clock counts"
    each = (time.perf_counter() - began) / done
    return f"  {done} of {repeats}, {each:.2g} s a turn, {each * (repeats - done):.0f} s left"


def clocked(work: Callable[[], object], device: str = "cpu") -> Run:
    """A run that has one part, on a device."""

    def run() -> tuple[float, ...]:
        started = now(device)
        work()
        return (now(device) - started,)

    return run


def passes(layer: nn.Module, inputs: Tensor, gradient: Tensor | None) -> Run:
    """A run of a forward and a backward pass, its two parts.

    On a GPU a run is the mean of `CALLS`, timed by its own events: the host is ahead of it.

    Args:
        layer: Any variant.
        inputs: What it sees.
        gradient: Of its output; None: the output is one number.
    """

    def run(mark: Callable[[], object] = time.perf_counter) -> list[Any]:
        started = mark()
        output = layer(inputs)
        half = mark()
        output.backward(gradient)
        ended = mark()
        layer.zero_grad(set_to_none=True)
        inputs.grad = None
        return [started, half, ended]

    def on_cpu() -> tuple[float, ...]:
        started, half, ended = run()
        return half - started, ended - half

    def on_gpu() -> tuple[float, ...]:
        events = [run(_event) for _ in range(CALLS)]
        torch.cuda.synchronize()
        spans = [(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in events]
        return tuple(sum(part) / 1e3 / CALLS for part in zip(*spans, strict=True))

    return on_gpu if inputs.is_cuda else on_cpu


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def summary(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """The results of every variant.

    Args:
        times: Of `take_turns`.
        base: The variant that the others are compared with.

    Returns:
        JSON values: `seconds`, the median of whole runs; `seconds_ratio`, the median of the turns'
        ratios to the base; `seconds_ratio_interval`, where that median lies with a probability of
        90%, or null where there are too few turns; `timed`, turns; `parts`, their medians.
    """
    whole = {name: [sum(parts) for parts in turns] for name, turns in times.items()}
    rows = {}
    for name, seconds in whole.items():
        # What was timed once has the first turn.
        ratios = [one / other for one, other in zip(seconds, whole[base], strict=False)]
        rows[name] = {
            "seconds": statistics.median(seconds),
            "seconds_ratio": statistics.median(ratios),
            "seconds_ratio_interval": interval(ratios),
            "timed": len(seconds),
            "parts": [statistics.median(part) for part in zip(*times[name], strict=True)],
        }
    return rows


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Computes a distribution-free confidence interval of the median.

    Each value is above or below the median with equal probability, so the k-th smallest and k-th
    largest values miss it with twice the probability of fewer than k heads in as many coin tosses.

    Returns:
        Two of the values, with a confidence of at least `CONFIDENCE`; None for fewer than 5.
    """
    count, missed, k = len(values), 0.0, 0
    while k < count:
        missed += 2 * math.comb(count, k) / 2**count
        if missed > 1 - CONFIDENCE:
            break
        k += 1
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None


class TimedLayer(nn.Module):
    """One variant: [N, D] to [N, D].

    Args:
        module: What computes.
        call: How it is called.
    """

    def __init__(self, module: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output."""
        return self.call(inputs)


def of_ours(module: FeedForward) -> TimedLayer:
    """A feed-forward, which gets the tokens as normalized input and as residual stream."""

    def call(tokens_ND: Tensor) -> Tensor:
        tokens_BTD = tokens_ND.unsqueeze(0)
        output: Tensor = module(tokens_BTD, tokens_BTD)[0]
        return output.squeeze(0)

    return TimedLayer(module, call)


def build(part: Any, config: Any, like_ND: Tensor, activation: Any = "gelu_tanh") -> Any:
    """A feed-forward with small random weights: the same for the same names and shapes.

    Args:
        part: A kind of feed-forward.
        config: Its own.
        like_ND: Of the weights' device and dtype, and of the model's width.
        activation: Of a dense one.
    """
    context = FeedForwardContext(
        hidden_size=like_ND.shape[-1], bias=False, dropout=0.0, initializer_std=0.02,
        residual_std=0.02, activation=activation,
    )  # fmt: skip
    return drawn(lambda: part(config, context), device=like_ND.device, dtype=like_ND.dtype)


def output_and_gradient(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the inputs for a random direction of the output."""
    inputs = inputs.detach().requires_grad_()
    output = layer(inputs)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    (gradient,) = torch.autograd.grad(output, inputs, direction)
    return output.detach(), gradient


def check(
    name: str, tensors: Sequence[Tensor], reference: Sequence[Tensor], precision: str
) -> float:
    """How far a variant's tensors are from a reference's, at most, as a share of their norms.

    Raises:
        RunError: further than its precision explains.
    """
    pairs = zip(tensors, reference, strict=True)
    difference: float = max(((a.double() - b.double()).norm() / b.norm()).item() for a, b in pairs)
    if not difference <= TOLERANCES[precision]:
        raise RunError(
            f"{name} in {precision} is {difference:.1e} away from the reference, "
            f"{TOLERANCES[precision]:.0e} is allowed"
        )
    return difference


def compare(
    layers: Mapping[str, nn.Module],
    inputs: Tensor,
    gradient: Tensor | None,
    repeats: int,
    base: str,
    *,
    compiled: bool,
) -> dict[str, dict[str, Any]]:
    """Times forward and backward passes of every variant, and counts what they keep in between.

    Args:
        layers: The variants by name.
        inputs: What all of them see.
        gradient: Of their output; None: the output is one number.
        repeats: How often each is timed, after runs that do not count.
        base: The variant that the others are compared with.
        compiled: Whether each runs through torch.compile.

    Returns:
        For each what `summary` has, `saved_bytes`, and `saved_bytes_ratio` to the base's.
    """
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # earlier measurements may have fragmented the heap
    if compiled:
        torch.compiler.reset()  # programs of another precision would be tried first
        for layer in layers.values():
            layer.compile()
    # All variants are instances of one class: dynamo counts them as recompilations of its forward.
    with torch._dynamo.config.patch(recompile_limit=8 * len(layers)):
        runs = {name: passes(layer, inputs, gradient) for name, layer in layers.items()}
        rows = summary(take_turns(runs, repeats, before=3 if compiled else 1, base=base), base)
        for name, layer in layers.items():
            kept = saved_bytes(lambda layer=layer: layer(inputs), layer.parameters())
            rows[name]["saved_bytes"] = kept
    for row in rows.values():
        row["saved_bytes_ratio"] = row["saved_bytes"] / rows[base]["saved_bytes"]
    return rows


def span(ends: tuple[float, float] | None, digits: int = 2) -> str:
    """An interval for a table, with so many digits after the point."""
    return "-" if ends is None else f"{ends[0]:.{digits}f}-{ends[1]:.{digits}f}"


def table(rows: Mapping[str, dict[str, Any]], base: str) -> str:
    """What `compare` found, for a person."""
    times = f"x {base}"
    head = ("variant", "forward ms", "backward ms", "both ms", times, "90%", "saved MiB", times)
    lines = [
        (
            name,
            *(f"{1e3 * seconds:.1f}" for seconds in (*row["parts"], row["seconds"])),
            f"{row['seconds_ratio']:.3f}",
            span(row["seconds_ratio_interval"], 3),
            f"{row['saved_bytes'] / 2**20:.1f}",
            f"{row['saved_bytes_ratio']:.2f}",
        )
        for name, row in rows.items()
    ]
    return "\n".join(aligned([head, *lines]))


def setting(result: Mapping[str, Any]) -> str:
    """The device and software of a result, for the first line of a table."""
    return f"{result['device']}, {result['threads']} threads; torch {result['torch']}"
