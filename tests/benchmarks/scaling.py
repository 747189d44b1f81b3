"""`scaling.py`: a step with other numbers of processes on this machine.

Weak scaling keeps the samples of a process, strong scaling those of all together. All variants are
there at once and take turns, so that their ratios are those of one minute (see `turns.py`). A turn
is some steps that are timed, and one in which each collective is noted: how long a process waited
in it for the last one, and how long bytes moved (see `waiting.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch

from polyad.launch.command import Argument, Json, Overrides, UsageError, positive
from polyad.launch.commands.plan import configuration
from polyad.launch.machine import cores_here, processor_name, threads_of_each
from polyad.launch.output import results
from polyad.model.build import build_model, count_parameters
from polyad.parallel.dims import Dims, LayoutError
from polyad.parallel.plan.traffic import axes_of
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError
from polyad.train.forecast.layouts import batches_of, changed
from polyad.train.tasks.registry import task_class
from tests.benchmarks.scaling_process import Measured
from tests.benchmarks.scaling_table import scaling_table
from tests.benchmarks.scaling_worlds import Worlds, seconds_of
from tests.benchmarks.script import benchmark, start
from tests.benchmarks.turns import Run, say, summary, take_turns
from tests.benchmarks.waiting import Parts, divide

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "gpt2.yaml"
"""What is trained unless told otherwise."""
VOCABULARY = "model.vocab_size=8192"
"""That of its data, which is not needed."""
KINDS = ("weak", "strong")
FIRST = "first"
"""The kind of what others are compared with."""
BEFORE = 1
"""Turns that do not count."""


class Variant(NamedTuple):
    """A number of processes, and the batches that they have."""

    kind: str
    """`first` of the fewest processes, or one of `KINDS`."""
    processes: int
    config: RunConfig

    @property
    def name(self) -> str:
        """As `weak 2`."""
        return f"{self.kind} {self.processes}"


class Watched(NamedTuple):
    """A step of a turn whose collectives were noted."""

    seconds: float
    measured: list[Measured]


def bench_scaling(
    config: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    processes: Sequence[int] = (1, 2, 4),
    repeats: int = 7,
    steps: int = 1,
    threads: int | None = None,
) -> dict[str, Any]:
    """Times a step with several numbers of processes.

    Args:
        config: A run's file; None: the dense GPT-2 of the quickstart.
        overrides: `key=value`.
        processes: Their numbers; the least that fits is what others are compared with.
        repeats: Turns that count.
        steps: Timed steps of a turn.
        threads: Of each process; None: the cores are divided.

    Returns:
        JSON values: for `weak` and `strong` a point for each number of processes.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
        RunError: a process failed; it has said why.
    """
    if config is None:
        config, overrides = CONFIG, (VOCABULARY, *overrides)
    variants, left_out = variants_of(config, overrides, processes)
    for each in left_out:
        say(f"left out: {each['variant']}: {each['why']}")
    numbers = {variant.processes for variant in variants}
    each_has = {number: threads or threads_of_each(number) for number in numbers}
    configs: dict[int, dict[str, RunConfig]] = {number: {} for number in sorted(numbers)}
    for variant in variants:
        configs[variant.processes][variant.kind] = variant.config
    watched: dict[str, list[Watched]] = {variant.name: [] for variant in variants}

    def run_of(variant: Variant, worlds: Worlds) -> Run:
        def run() -> tuple[float, ...]:
            found = worlds.measure(variant.processes, variant.kind, steps)
            seconds = seconds_of(found, steps)
            watched[variant.name].append(Watched(seconds, found))
            return (seconds,)

        return run

    say(f"starting {sum(numbers)} processes, in groups of {', '.join(map(str, sorted(numbers)))}")
    with Worlds(configs, each_has) as worlds:
        runs = {variant.name: run_of(variant, worlds) for variant in variants}
        times = take_turns(runs, repeats, before=BEFORE)
    base = variants[0]
    rows = summary(times, base.name)
    points = {
        variant.name: point(
            variant,
            each_has[variant.processes],
            rows[variant.name],
            watched[variant.name][BEFORE:],
            cores_here(),
        )
        for variant in variants
    }
    for made in points.values():
        made |= compared(made, points[base.name])
    return {
        **described(base.config, config, overrides),
        "repeats": repeats,
        "steps": steps,
        "left_out": left_out,
        **{kind: [points[v.name] for v in variants if v.kind in (FIRST, kind)] for kind in KINDS},
    }


def variants_of(
    path: Path, overrides: Sequence[str], processes: Sequence[int]
) -> tuple[list[Variant], list[dict[str, str]]]:
    """What is compared.

    Args:
        path: Of the configuration.
        overrides: `key=value`.
        processes: As asked for.

    Returns:
        The variants, of which the first is the base; and what does not fit, with the reason.

    Raises:
        ValueError: with an `exit_status` of 2: nothing fits, or there are too few samples.
    """
    given = load_config(path, overrides)
    left_out: list[dict[str, str]] = []
    fitting: list[int] = []
    for number in sorted(set(processes)):
        why = _does_not_fit(given, number)
        if why:
            left_out.append({"variant": f"{number} processes", "why": why})
        else:
            fitting.append(number)
    if not fitting:
        raise ConfigError(f"--processes: {left_out[-1]['why']}")
    base = fitting[0]
    config = configuration(path, overrides, base)
    variants = [Variant(FIRST, base, config)]
    for number in fitting[1:]:
        batches = batches_of(config, number, base)
        if "strong" not in batches:
            ranks = number // config.parallel.tensor_parallel_size
            raise ConfigError(
                f"--processes: {number} is not allowed with train.global_batch_size: "
                f"{config.train.global_batch_size}: there are not enough samples for {ranks} "
                "data-parallel processes"
            )
        for kind in KINDS:
            try:
                other = changed(config, batches[kind])
                validate(other, number)
            except ValueError as error:
                left_out.append({"variant": f"{kind} {number}", "why": str(error)})
                continue
            variants.append(Variant(kind, number, other))
    return variants, left_out


def _does_not_fit(config: RunConfig, processes: int) -> str:
    """Why so many processes cannot run this layout here; empty if they can."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else processes
    if processes > devices:
        return f"{processes} processes, and {devices} CUDA devices are here"
    try:
        Dims(
            world_size=processes,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            expert_parallel_size=config.parallel.expert_parallel_size,
        )
    except LayoutError as error:
        return str(error)
    return ""


def described(config: RunConfig, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What was measured, and where."""
    on_gpu = torch.cuda.is_available()
    return {
        "config": path.name,
        "overrides": list(overrides),
        "unit": task_class(config.data.kind).unit.name,
        "parameters": count_parameters(build_model(config.model)),
        "precision": config.train.precision,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "expert_parallel_size": config.parallel.expert_parallel_size,
        "zero_stage": config.parallel.zero_stage,
        "compiled": False,
        "device": "cuda" if on_gpu else "cpu",
        "device_name": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "cores": cores_here(),
        "torch": torch.__version__,
    }


def point(
    variant: Variant,
    threads: int,
    row: dict[str, Any],
    watched: Sequence[Watched],
    cores: int,
) -> dict[str, Any]:
    """The results of one variant, as JSON values.

    Args:
        variant: What was measured.
        threads: Of each of its processes.
        row: Of `summary`.
        watched: A step of each turn.
        cores: Of this machine.
    """
    config, train = variant.config, variant.config.train
    dims = validate(config, variant.processes)
    on_gpu = torch.cuda.is_available()
    return {
        "kind": variant.kind,
        "processes": variant.processes,
        "threads": threads,
        "computing_on": variant.processes if on_gpu else min(cores, threads * variant.processes),
        "share_cores": not on_gpu and threads * variant.processes > cores,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "accumulation_steps": dims.accumulation_steps(
            train.global_batch_size, train.micro_batch_size
        ),
        **row,
        "units_per_second": train.global_batch_size
        * config.model.units_per_sample()
        / row["seconds"],
        **watched_step(dims, watched),
    }


def watched_step(dims: Dims, watched: Sequence[Watched]) -> dict[str, Any]:
    """Where the time of a step goes: the one of the noted steps that took the median time.

    Args:
        dims: The layout.
        watched: Of each turn.
    """
    divided = [divide([each.watched for each in turn.measured]) for turn in watched]
    seconds = [_whole(parts[0]) for parts in divided]
    middle = sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]
    parts, turn = divided[middle], watched[middle]
    return {
        "watched": {
            "seconds": seconds[middle],
            "over_plain": seconds[middle] / turn.seconds,
            **{
                key: {"mean": fmean(each), "max": max(each), "of_each": each}
                for key in ("computing", "waiting", "moving", "beside")
                for each in [[float(getattr(part, key)) for part in parts]]
            },
        },
        "exchanges": exchange_rows(dims, parts, turn.measured),
    }


def _whole(parts: Parts) -> float:
    return parts.computing + parts.waiting + parts.moving


def exchange_rows(
    dims: Dims, parts: Sequence[Parts], measured: Sequence[Measured]
) -> list[dict[str, Any]]:
    """Calls and bytes of each kind of collective, the mean over processes, and its seconds."""
    axes = axes_of(dims, 0)
    kinds = sorted({kind for each in measured for kind in each.exchanges})
    rows = []
    for kind in kinds:
        amounts = [each.exchanges[kind] for each in measured if kind in each.exchanges]
        stood = [each.of[kind] for each in parts if kind in each.of]
        of_all = len(measured)
        rows.append(
            {
                **kind._asdict(),
                "processes": len(axes.get(kind.axis, ())),
                "calls": sum(each.calls for each in amounts) / of_all,
                "payload_bytes": sum(each.payload for each in amounts) / of_all,
                "sent_bytes": sum(each.sent for each in amounts) / of_all,
                "waiting": sum(each.waiting for each in stood) / of_all,
                "moving": sum(each.moving for each in stood) / of_all,
                "beside": sum(each.beside for each in stood) / of_all,
            }
        )
    return sorted(rows, key=lambda each: -each["sent_bytes"])


def compared(made: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The throughput of a point for each core or GPU that computes, over that of the base.

    Args:
        made: As `point` makes it.
        base: That of the fewest processes.
    """
    samples = made["global_batch_size"] / base["global_batch_size"]
    devices = made["computing_on"] / base["computing_on"]
    interval = made["seconds_ratio_interval"]
    return {
        "efficiency": samples / devices / made["seconds_ratio"],
        "efficiency_interval": interval
        and tuple(samples / devices / each for each in reversed(interval)),
    }


def _number_or_key(text: str) -> int | str:
    """A key that stands behind the numbers is one of the configuration."""
    return text if "=" in text else positive(text)


@benchmark(
    "scaling",
    "--json scaling.json",
    "--processes 1 2 --threads 1 --steps 3",
    "configs/gpt2/124m-smoe-16.yaml --processes 2 4 parallel.expert_parallel_size=2 "
    "model.vocab_size=50257",
)
def scaling(
    config: Annotated[
        str | None,
        Argument(
            "a YAML file; default: the quickstart's dense GPT-2, which then needs no data",
            "CONFIG",
            nargs="?",
        ),
    ],
    overrides: Overrides,
    *,
    processes: Annotated[
        tuple[list[int | str], ...],
        Argument(
            "numbers of processes of this machine; default 1 2 4",
            "P",
            _number_or_key,
            nargs="+",
            repeated=True,
        ),
    ] = (),
    repeats: Annotated[int, Argument("turns of each; default 7", "N", positive)] = 7,
    steps: Annotated[
        int,
        Argument(
            "timed steps of a turn, beside one whose collectives are noted; default 1",
            "N",
            positive,
        ),
    ] = 1,
    threads: Annotated[
        int | None,
        Argument(
            "threads of each process; default: the cores divided by the processes", "N", positive
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Times a step with several numbers of processes: computing, waiting, bytes."""
    words = [*processes] or [[1, 2, 4]]
    keys = [word for given in words for word in given if isinstance(word, str)]
    overrides = [*overrides, *keys]
    numbers = [word for word in words[-1] if isinstance(word, int)]
    if not numbers:
        raise UsageError(f"--processes: {words[-1][0]} is not a number of processes")
    if config is not None and "=" in config and not Path(config).exists():
        overrides, config = [config, *overrides], None  # a key, and no file before it
    with results(json) as show:
        result = bench_scaling(
            None if config is None else Path(config),
            overrides,
            processes=numbers,
            repeats=repeats,
            steps=steps,
            threads=threads,
        )
        show(result, scaling_table(result))


if __name__ == "__main__":
    start(scaling)
