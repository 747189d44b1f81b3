"""What each command of `polyad bench` does: it calls the file that measures, and shows the result.

Nothing heavy is imported before a handler runs.
"""

import math
import os
from argparse import Namespace
from pathlib import Path

from polyad.launch.bench.arguments import TEXT
from polyad.launch.output import check_json_path, only_results_on_stdout, show
from polyad.launch.parser import UsageError


def _check_images(options: Namespace) -> None:
    """Refuses what is of text beside `--images`."""
    for name, usual in {**TEXT, "config": None, "consumption": None}.items():
        if getattr(options, name) != usual:
            raise UsageError(f"--{name}: {getattr(options, name)} is not allowed with --images")
    if options.overrides:
        raise UsageError(f"{options.overrides[0]}: is not allowed with --images")


def bench_data(options: Namespace) -> None:
    """`polyad bench data`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    check_json_path(options.json)
    if options.images is not None:
        _check_images(options)
        from polyad.data.errors import user_path
        from polyad.launch.bench.images import bench_images, images_table

        with only_results_on_stdout() as stdout:
            folder = user_path(options.images) if options.images else None
            result = bench_images(folder, repeats=options.repeats, randaugment=options.randaugment)
            show(result, images_table(result), options.json, stdout)
        return
    if options.randaugment:
        raise UsageError("--randaugment: means nothing without --images")
    from polyad.launch.bench.data import bench_data, bench_data_of, data_table

    if not 0 < options.megabytes < math.inf:
        raise UsageError(f"--megabytes: {options.megabytes} is not allowed; more than 0")
    if options.consumption is not None and not 0 < options.consumption < math.inf:
        raise UsageError(f"--consumption: {options.consumption} is not allowed; more than 0")
    if options.overrides and options.config is None:
        raise UsageError(f"{options.overrides[0]}: a key of a configuration, which --config names")
    arguments = {
        name: getattr(options, name)
        for name in ("source", "tokenizer", "megabytes", "repeats", "consumption")
    }
    with only_results_on_stdout() as stdout:
        if options.config is None:
            result = bench_data(**arguments)
        else:
            result = bench_data_of(options.config, options.overrides, **arguments)
        show(result, data_table(result), options.json, stdout)


def bench_checkpoint(options: Namespace) -> None:
    """`polyad bench checkpoint`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.checkpoint import bench_checkpoint, checkpoint_bench_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = bench_checkpoint(
            options.folder,
            repeats=options.repeats,
            steps=options.steps,
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
        )
        show(result, checkpoint_bench_table(result), options.json, stdout)


def bench_step(options: Namespace) -> None:
    """`polyad bench step`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library says when it begins
    from polyad.launch.bench.step import bench_step, step_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = bench_step(
            device=options.device,
            precisions=(options.precision,) if options.precision else ("fp32", "bf16"),
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            repeats=options.repeats,
            compiled=options.compile,
            feed_forward=options.feed_forward,
            profiled=options.profile,
        )
        show(result, step_table(result), options.json, stdout)


def bench_plan(options: Namespace) -> None:
    """`polyad bench plan`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.plan import bench_plan, plan_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = bench_plan()
        show(result, plan_table(result), options.json, stdout)


def bench_flips(options: Namespace) -> None:
    """`polyad bench flips`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.flips import MIN_STEPS, bench_flips, flips_table

    check_json_path(options.json)
    if options.steps < MIN_STEPS:
        raise UsageError(f"--steps: {options.steps} is not allowed, at least {MIN_STEPS}")
    with only_results_on_stdout() as stdout:
        result = bench_flips(steps=options.steps)
        show(result, flips_table(result), options.json, stdout)


def bench_layer(options: Namespace) -> None:
    """`polyad bench layer`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.emoe import bench_emoe, emoe_table
    from polyad.launch.bench.expert_parallel import bench_expert_parallel
    from polyad.launch.bench.mumoe import bench_mumoe, mumoe_table
    from polyad.launch.bench.smoe import bench_smoe, smoe_table

    check_json_path(options.json)
    given = {name: value for name, value in vars(options).items() if value is not None}
    only = {
        "top_k": ("smoe", "emoe"), "load": ("smoe",), "expert_parallel": ("smoe",),
        "compile": ("mumoe",),
    }  # fmt: skip
    for name, kinds in only.items():
        if options.kind not in kinds and name in given:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: is of --kind {' or '.join(kinds)}, this is {options.kind}")
    shape = ("tokens", "top_k", "width", "hidden", "repeats", "threads", "device")
    arguments = {name: given[name] for name in shape if name in given}
    for name, argument in (("precision", "precisions"), ("load", "loads")):
        if name in given:
            arguments[argument] = (given[name],)
    with only_results_on_stdout() as stdout:
        if options.kind == "mumoe":
            if "experts" in given:
                arguments["experts"] = tuple(dict.fromkeys(given["experts"]))
            result = bench_mumoe(**arguments, compiled=bool(options.compile))
            table = mumoe_table(result)
        else:
            if "experts" in given:
                if len(given["experts"]) > 1:
                    numbers = " ".join(map(str, given["experts"]))
                    raise UsageError(
                        f"--experts: {numbers}: --kind {options.kind} takes one number"
                    )
                arguments["experts"] = given["experts"][0]
            processes = given.get("expert_parallel", 1)
            if options.kind == "emoe":
                result = bench_emoe(**arguments)
            elif processes == 1:
                result = bench_smoe(**arguments)
            else:
                result = bench_expert_parallel(processes, **arguments)
            table = emoe_table(result) if options.kind == "emoe" else smoe_table(result)
        show(result, table, options.json, stdout)


def bench_routing(options: Namespace) -> None:
    """`polyad bench routing`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.routing import bench_routing
    from polyad.launch.bench.routing_table import routing_table

    check_json_path(options.json)
    given = {name: value for name, value in vars(options).items() if value is not None}
    shape = ("width", "heads", "experts", "top_k", "hidden", "layers", "vocab_size")
    names = (*shape, "repeats", "threads", "device")
    arguments = {name: given[name] for name in names if name in given}
    for name in ("tokens", "model_tokens"):
        if name in given:
            arguments[name] = tuple(given[name])
    if "precision" in given:
        arguments["precisions"] = (given["precision"],)
    with only_results_on_stdout() as stdout:
        result = bench_routing(**arguments, compiled=options.compile)
        show(result, routing_table(result), options.json, stdout)


def bench_scaling(options: Namespace) -> None:
    """`polyad bench scaling`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.bench.scaling import bench_scaling
    from polyad.launch.bench.scaling_table import scaling_table

    check_json_path(options.json)
    config = options.config
    given = options.processes or [[1, 2, 4]]
    keys = [word for words in given for word in words if isinstance(word, str)]
    overrides = [*options.overrides, *keys]
    processes = [word for word in given[-1] if isinstance(word, int)]
    if not processes:
        raise UsageError(f"--processes: {given[-1][0]} is not a number of processes")
    if config is not None and "=" in config and not Path(config).exists():
        config, overrides = None, [config, *overrides]  # a key, and no file before it
    with only_results_on_stdout() as stdout:
        result = bench_scaling(
            None if config is None else Path(config),
            overrides,
            processes=processes,
            repeats=options.repeats,
            steps=options.steps,
            threads=options.threads,
        )
        show(result, scaling_table(result), options.json, stdout)
