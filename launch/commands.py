"""The commands of `polyad`: for each a handler, which calls the room that does the work.

Nothing heavy is imported before a handler runs.
"""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from launch.arguments import (
    bench_checkpoint_arguments,
    bench_data_arguments,
    bench_flips_arguments,
    bench_layer_arguments,
    bench_routing_arguments,
    bench_step_arguments,
    checkpoint_arguments,
    checkpoint_delete_arguments,
    config_arguments,
    convert_arguments,
    evaluate_arguments,
    generate_arguments,
    launch_arguments,
    prepare_arguments,
    report_arguments,
    study_arguments,
    validate_arguments,
)
from launch.machine import is_main
from launch.output import check_json_path, only_results_on_stdout, show
from launch.parser import Parser, UsageError


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `polyad`."""

    summary: str
    example: str
    arguments: Callable[[Parser], None]
    """Declares its arguments."""
    handler: Callable[[Namespace], int | None]
    """Does it; None is success."""


def _prepare(options: Namespace) -> None:
    from data.prepare import prepare
    from launch.tables import prepared_table

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare(**vars(options))
        seconds = time.monotonic() - started
        stdout.write(prepared_table(manifest, options.output, seconds) + "\n")


def _train(options: Namespace) -> None:
    from launch.machine import end_with_launcher, prepare_environment
    from launch.tables import trained_table
    from launch.torchrun import forget_stop

    end_with_launcher()
    forget_stop()
    prepare_environment()
    from parallel import comm
    from train.pretrain import main as train

    with only_results_on_stdout() as stdout:
        state = train(options.config, options.overrides)
        if is_main():
            stdout.write(trained_table(state, options.config, options.overrides) + "\n")
        comm.shutdown()


def _launch(options: Namespace) -> None:
    from launch.machine import end_with_launcher
    from launch.options import launch_from

    end_with_launcher()
    launch_from(options)


def _evaluate(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from data.attack import WordSwap
    from parallel import comm
    from train.evaluate import evaluate, result_table
    from train.stability import PROBE_TOKENS, compare, comparison_table

    check_json_path(options.json)
    _check_evaluation(options)
    chosen = {"data": options.data, "split": options.split, "overrides": tuple(options.overrides)}
    with only_results_on_stdout() as stdout:
        if options.compare is not None:
            tokens = PROBE_TOKENS if options.probe_tokens is None else options.probe_tokens
            result = compare(options.path, options.compare, tokens=tokens, **chosen)
            table = comparison_table(result)
        else:
            attack = WordSwap(options.rate, options.seed or 0) if options.attack else None
            result = evaluate(options.path, attack=attack, leak=options.leak, **chosen)
            table = result_table(result)
        if is_main():
            show(result, table, options.json, stdout)
        comm.shutdown()


def _check_evaluation(options: Namespace) -> None:
    """Which options of `polyad evaluate` go together."""
    needs = {"--rate": "--attack", "--seed": "--attack", "--probe-tokens": "--compare"}
    for option, needed in needs.items():
        value = getattr(options, option.removeprefix("--").replace("-", "_"))
        if value is not None and getattr(options, needed.removeprefix("--")) is None:
            raise UsageError(f"{option}: {value} means nothing without {needed}")
    if options.attack is not None and options.rate is None:
        raise UsageError(f"--attack {options.attack}: needs --rate, a number from 0 to 1")
    if options.attack is not None and options.compare is not None:
        raise UsageError(f"--attack: {options.attack} is not allowed with --compare")
    if options.leak is not None and options.compare is not None:
        raise UsageError(f"--leak: {options.leak} is not allowed with --compare")


def _report(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from train.report.command import TOKENS, report, report_line

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = report(
            options.run,
            output=options.output,
            checkpoint=options.checkpoint,
            data=options.data,
            split=options.split,
            layers=options.layers,
            experts=options.experts,
            top=options.top,
            tokens=TOKENS if options.tokens is None else options.tokens,
        )
        show(result, report_line(result), options.json, stdout)


def _study(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.study.figure import check_figure, figure
    from launch.study.run import describe_study, study
    from launch.study.tables import plan_table, result_table

    check_json_path(options.json)
    if options.figure is not None:
        check_figure(options.figure, dry_run=options.dry_run)
    with only_results_on_stdout() as stdout:
        if options.dry_run:
            plan = describe_study(options.study)
            show(plan, plan_table(plan), options.json, stdout)
            return
        result = study(options.study)
        if options.figure is not None:
            options.figure.write_text(figure(result), encoding="utf-8")
        show(result, result_table(result, markdown=options.markdown), options.json, stdout)


def _convert(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from train.convert import conversion_table, convert
    from train.upcycle import Upcycling

    check_json_path(options.json)
    upcycling = None if options.upcycle is None else Upcycling(options.upcycle)
    with only_results_on_stdout() as stdout:
        result = convert(options.source, options.destination, options.to, upcycling)
        show(result, conversion_table(result), options.json, stdout)


def _generate(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from train.generate import Sampling, generate
    from train.steering import effect_lines, parse_steering

    check_json_path(options.json)
    steerings = [parse_steering(text) for text in options.steer]
    with only_results_on_stdout() as stdout:

        def write(text: str) -> None:
            if options.json != "-" and text:
                stdout.write(text)
                stdout.flush()

        result = generate(
            options.path,
            options.prompt,
            tokenizer=options.tokenizer,
            max_tokens=options.max_tokens,
            sampling=Sampling(
                temperature=options.temperature, top_p=options.top_p, seed=options.seed
            ),
            use_cache=not options.no_cache,
            precision=options.precision,
            steerings=steerings,
            write=write,
        )
        speed = f"{len(result['token_ids'])} tokens, {result['tokens_per_second']:,.0f} tokens/s"
        print(f"\n{speed}, ended by {result['ended_by']}", file=sys.stderr)
        print(effect_lines(result["steering"]), end="", file=sys.stderr)
        show(result, "", options.json, stdout)


def _validate(options: Namespace) -> None:
    from parallel.comm import environment_world_size
    from train.describe import describe_run, description_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        description = describe_run(
            options.config,
            options.overrides,
            options.processes or environment_world_size(),
            with_data=not options.without_data,
        )
        show(description, description_table(description), options.json, stdout)


def _checkpoint_list(options: Namespace) -> None:
    from launch.checkpoints import checkpoint_table, list_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = list_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)


def _checkpoint_verify(options: Namespace) -> int:
    from launch.checkpoints import checkpoint_table, verify_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = verify_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)
    return 0 if result["good"] else 2


def _checkpoint_delete(options: Namespace) -> None:
    from launch.checkpoints import checkpoint_table, delete_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        last_too = options.even_the_last_good
        result = delete_checkpoints(options.folders, even_the_last_good=last_too)
        show(result, checkpoint_table(result), options.json, stdout)


def _bench_data(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.data import bench_data, bench_data_of, data_table

    check_json_path(options.json)
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


def _bench_checkpoint(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.checkpoint import bench_checkpoint, checkpoint_bench_table

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


def _bench_step(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.step import bench_step, step_table

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
        )
        show(result, step_table(result), options.json, stdout)


def _bench_flips(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.flips import MIN_STEPS, bench_flips, flips_table

    check_json_path(options.json)
    if options.steps < MIN_STEPS:
        raise UsageError(f"--steps: {options.steps} is not allowed, at least {MIN_STEPS}")
    with only_results_on_stdout() as stdout:
        result = bench_flips(steps=options.steps)
        show(result, flips_table(result), options.json, stdout)


def _bench_layer(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.expert_parallel import bench_expert_parallel
    from launch.bench.mumoe import bench_mumoe, mumoe_table
    from launch.bench.smoe import bench_smoe, smoe_table

    check_json_path(options.json)
    given = {name: value for name, value in vars(options).items() if value is not None}
    only = {"smoe": ("top_k", "load", "expert_parallel"), "mumoe": ("compile",)}
    for kind, names in only.items():
        for name in names:
            if kind != options.kind and name in given:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option}: is of --kind {kind}, this is {options.kind}")
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
                    raise UsageError(f"--experts: {numbers}: --kind smoe takes one number")
                arguments["experts"] = given["experts"][0]
            processes = given.get("expert_parallel", 1)
            result = (
                bench_smoe(**arguments)
                if processes == 1
                else bench_expert_parallel(processes, **arguments)
            )
            table = smoe_table(result)
        show(result, table, options.json, stdout)


def _bench_routing(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.routing import bench_routing
    from launch.bench.routing_table import routing_table

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


COMMANDS: dict[str, Command] = {
    "prepare": Command(
        summary="Turns text into tokens: .bin and .idx files, a tokenizer and manifest.json.",
        example="polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
        arguments=prepare_arguments,
        handler=_prepare,
    ),
    "train": Command(
        summary="Trains in this process, or in those of torchrun; goes on where the run stands.",
        example="polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib train.steps=20\n"
        "torchrun --nproc-per-node 2 -m launch train configs/quickstart/gpt2.yaml "
        "data.path=runs/stdlib",
        arguments=config_arguments,
        handler=_train,
    ),
    "launch": Command(
        summary="Checks a run, then trains it in P processes of this machine, or of N hosts.",
        example="polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 "
        "data.path=runs/stdlib\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via torchrun "
        "--rdzv-endpoint node-1:29400\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via slurm "
        "--gpus-per-node 4 --time 24:00:00 --dry-run",
        arguments=launch_arguments,
        handler=_launch,
    ),
    "evaluate": Command(
        summary="Scores prepared text, as it is or attacked; or compares the routing of two "
        "checkpoints.",
        example="polyad evaluate runs/quickstart/run --split test evaluation.stride=128\n"
        "polyad evaluate runs/quickstart/run/checkpoints/step-00000100 --json - > result.json\n"
        "polyad evaluate runs/quickstart/run --attack word-swap --rate 0.1 --seed 1\n"
        "polyad evaluate runs/quickstart/run --compare "
        "runs/quickstart/run/checkpoints/step-00000100",
        arguments=evaluate_arguments,
        handler=_evaluate,
    ),
    "validate": Command(
        summary="Checks a run without starting it, and says what it will do and cost.",
        example="polyad validate configs/gpt2/124m.yaml --processes 8 --without-data "
        "model.vocab_size=50257",
        arguments=validate_arguments,
        handler=_validate,
    ),
    "report": Command(
        summary="Draws a run: curves, load of experts, and the tokens that they get most of.",
        example="polyad report runs/quickstart/run\n"
        "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
        arguments=report_arguments,
        handler=_report,
    ),
    "study": Command(
        summary="Trains variants of a run over several seeds, and compares them in pairs.",
        example="polyad study configs/studies/mumoe.yaml --dry-run\n"
        "polyad study configs/studies/mumoe.yaml --markdown",
        arguments=study_arguments,
        handler=_study,
    ),
    "checkpoint list": Command(
        summary="Lists the checkpoints of a run: step, size, and whether one is damaged.",
        example="polyad checkpoint list runs/quickstart/run",
        arguments=checkpoint_arguments,
        handler=_checkpoint_list,
    ),
    "checkpoint verify": Command(
        summary="Reads every byte of checkpoints; exit status 2 if one is damaged.",
        example="polyad checkpoint verify runs/quickstart/run --json -\n"
        "polyad checkpoint verify runs/quickstart/run/checkpoints/step-00000100",
        arguments=checkpoint_arguments,
        handler=_checkpoint_verify,
    ),
    "checkpoint delete": Command(
        summary="Deletes checkpoints, but not the last good one of a run.",
        example="polyad checkpoint delete runs/quickstart/run/checkpoints/step-00000100",
        arguments=checkpoint_delete_arguments,
        handler=_checkpoint_delete,
    ),
    "bench data": Command(
        summary="Times encoding beside the tokenizers library, and the loader beside training.",
        example="polyad bench data --json data.json\n"
        "polyad bench data --config configs/gpt2/355m.yaml --megabytes 32",
        arguments=bench_data_arguments,
        handler=_bench_data,
    ),
    "bench checkpoint": Command(
        summary="Times saving and loading GPT-2 124M with its moments beside a plain write.",
        example="polyad bench checkpoint --folder runs --json checkpoint.json",
        arguments=bench_checkpoint_arguments,
        handler=_bench_checkpoint,
    ),
    "bench step": Command(
        summary="Times a training step of GPT-2 124M beside transformers', or of a muMoE's.",
        example="polyad bench step --precision bf16 --json step.json\n"
        "polyad bench step --device cuda --precision bf16 --batch-size 32 --compile\n"
        "polyad bench step --feed-forward mumoe-cp",
        arguments=bench_step_arguments,
        handler=_bench_step,
    ),
    "bench flips": Command(
        summary="Flips bits of weights and gradients, and says which the monitors notice.",
        example="polyad bench flips --json flips.json",
        arguments=bench_flips_arguments,
        handler=_bench_flips,
    ),
    "bench layer": Command(
        summary="Times a layer of experts, sparse or factorized, beside a dense MLP and peers.",
        example="polyad bench layer --precision bf16 --json layer.json\n"
        "polyad bench layer --expert-parallel 2 --precision bf16\n"
        "polyad bench layer --kind mumoe --experts 256 --threads 1",
        arguments=bench_layer_arguments,
        handler=_bench_layer,
    ),
    "bench routing": Command(
        summary="Times graphs of tokens beside the plain router and the T x T form.",
        example="polyad bench routing --tokens 512 2048 --precision bf16 --json routing.json\n"
        "polyad bench routing --tokens 8192 --layers 0",
        arguments=bench_routing_arguments,
        handler=_bench_routing,
    ),
    "generate": Command(
        summary="Continues a text with a checkpoint.",
        example="polyad generate runs/quickstart/run --prompt 'def ' --temperature 0.8 "
        "--top-p 0.95 --seed 1\n"
        "polyad generate runs/quickstart/run --prompt 'def ' --steer layer=3,expert=2,strength=8",
        arguments=generate_arguments,
        handler=_generate,
    ),
    "convert": Command(
        summary="Weights to a Hugging Face folder or plain safetensors, or to a checkpoint.",
        example="polyad convert runs/quickstart/run exported --to safetensors\n"
        "polyad convert gpt2 runs/gpt2-start --to polyad\n"
        "polyad convert gpt2 runs/gpt2-experts --to polyad --upcycle num_experts=8,top_k=2",
        arguments=convert_arguments,
        handler=_convert,
    ),
}
