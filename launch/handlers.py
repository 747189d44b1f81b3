"""What each command of `polyad` does: it calls the room that does the work.

Nothing heavy is imported before a handler runs.
"""

import sys
import time
from argparse import Namespace
from typing import Any

from launch.machine import is_main
from launch.output import check_json_path, only_results_on_stdout, show
from launch.parser import UsageError


def prepare(options: Namespace) -> None:
    """`polyad prepare`."""
    given = vars(options)
    images, held_out, domains = (given.pop(name) for name in ("images", "held_out", "domains"))
    if images is not None:
        _prepare_images(images, held_out, domains, given)
        return
    if held_out is not None:
        raise UsageError(f"--held-out: {held_out} means nothing without --images")
    if domains:
        raise UsageError("--domains: means nothing without --images")
    missing = [f"--{name}" for name in ("source", "tokenizer") if given[name] is None]
    if missing:
        raise UsageError(f"needs {' and '.join(missing)}, or --images for images")
    from launch.preparation import prepare_in_parts, take_parts

    in_parts = take_parts(given)
    if in_parts.parts is not None:
        prepare_in_parts(given, in_parts)
        return
    from data.text.prepare import prepare
    from launch.tables import prepared_table

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare(**given)
        seconds = time.monotonic() - started
        stdout.write(prepared_table(manifest, options.output, seconds) + "\n")


def _prepare_images(
    source: str, held_out: float | None, domains: bool, given: dict[str, Any]
) -> None:
    for name, value in given.items():
        if name not in ("output", "overwrite") and value not in _TEXT_DEFAULTS.get(name, (None,)):
            option = _TEXT_OPTIONS.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option}: {value} is of text, and is not allowed with --images")
    from data.images.prepare import prepare_images, prepared_rows

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare_images(
            source,
            given["output"],
            held_out=held_out,
            domains=domains,
            overwrite=given["overwrite"],
        )
        rows = list(prepared_rows(manifest, given["output"], time.monotonic() - started))
        width = max(len(name) for name, _ in rows)
        stdout.write("".join(f"{name:{width}}  {value}\n" for name, value in rows))


_TEXT_OPTIONS = {"file_format": "format"}
_TEXT_DEFAULTS: dict[str, tuple[object, ...]] = {
    "validation_fraction": (0.05,),
    "test_fraction": (0.05,),
    "text_key": ("text",),
    "documents": ("files",),
    "streaming": (False,),
    "begin": (False,),
    "join": (False,),
    "dry_run": (False,),
    "via": ("local",),
}
"""What options of text are when nobody gave them."""


def data_verify(options: Namespace) -> None:
    """`polyad data verify`."""
    from launch.data import check_verified, data_table, verify_data

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = verify_data(options.folders)
        show(result, data_table(result), options.json, stdout)
        check_verified(result)


def train(options: Namespace) -> None:
    """`polyad train`."""
    from launch.machine import bind_to_cores, end_with_launcher, prepare_environment
    from launch.tables import trained_table
    from launch.torchrun import forget_stop

    launched = end_with_launcher()
    bind_to_cores()
    forget_stop()
    prepare_environment()
    from parallel import comm
    from train.pretrain import main as train

    with only_results_on_stdout() as stdout:
        state = train(options.config, options.overrides, launched=launched)
        if is_main():
            stdout.write(trained_table(state, options.config, options.overrides) + "\n")
        comm.shutdown()


def launch(options: Namespace) -> int:
    """`polyad launch`."""
    from launch.machine import end_with_launcher
    from launch.via.options import launch_from

    end_with_launcher()
    return launch_from(options)


def evaluate(options: Namespace) -> None:
    """`polyad evaluate`."""
    from launch.machine import end_with_launcher, prepare_environment

    end_with_launcher()
    prepare_environment()
    from data.images.noise import GaussianNoise
    from data.text.attack import WordSwap
    from parallel import comm
    from parallel.checkpoint.checkpoint import best_checkpoint
    from train.evaluation.evaluate import evaluate, result_table
    from train.evaluation.stability import PROBE_UNITS, compare, comparison_table

    check_json_path(options.json)
    _check_evaluation(options)
    if options.best:
        options.path = best_checkpoint(options.path)
    chosen = {"data": options.data, "split": options.split, "overrides": tuple(options.overrides)}
    stored = {"weights": options.weights, "base": options.base}
    with only_results_on_stdout() as stdout:
        if options.compare is not None:
            units = PROBE_UNITS if options.probe_tokens is None else options.probe_tokens
            result = compare(options.path, options.compare, units=units, **chosen)
            table = comparison_table(result)
        elif options.specialization:
            from train.evaluation.specialization import specialization, specialization_table

            result = specialization(options.path, **stored, **chosen)
            table = specialization_table(result)
        elif options.rewrite is not None:
            from train.evaluation.rewriting import rewriting, rewriting_table

            result = rewriting(options.path, options.rewrite, **stored, **chosen)
            table = rewriting_table(result)
        elif options.robustness is not None:
            from data.errors import user_path
            from train.evaluation.robustness import robustness, robustness_table

            name, place = options.robustness
            del chosen["split"]
            result = robustness(options.path, name, user_path(place), **stored, **chosen)
            table = robustness_table(result)
        else:
            attack: WordSwap | GaussianNoise | None = None
            if options.attack is not None:
                kind = WordSwap if options.attack == "word-swap" else GaussianNoise
                attack = kind(options.rate, options.seed or 0)
            result = evaluate(
                options.path,
                attack=attack,
                leak=options.leak,
                **stored,
                **chosen,
            )
            table = result_table(result)
        if is_main():
            show(result, table, options.json, stdout)
        comm.shutdown()


def _check_evaluation(options: Namespace) -> None:
    """Which options of `polyad evaluate` go together."""
    from data.images.imagenet import ROBUSTNESS_SETS

    needs = {"--rate": "--attack", "--seed": "--attack", "--probe-tokens": "--compare"}
    for option, needed in needs.items():
        value = getattr(options, option.removeprefix("--").replace("-", "_"))
        if value is not None and getattr(options, needed.removeprefix("--")) is None:
            raise UsageError(f"{option}: {value} means nothing without {needed}")
    if options.attack is not None and options.rate is None:
        raise UsageError(f"--attack {options.attack}: needs --rate, a number from 0 to 1")
    in_place = [
        option
        for option, value in (
            ("--compare", options.compare),
            ("--specialization", options.specialization or None),
            ("--rewrite", options.rewrite),
            ("--robustness", options.robustness),
        )
        if value is not None
    ]
    for option, value in (("--attack", options.attack), ("--leak", options.leak)):
        if value is not None and in_place:
            raise UsageError(f"{option}: {value} is not allowed with {in_place[0]}")
    if options.weights != "trained" and options.compare is not None:
        raise UsageError(f"--weights: {options.weights} is not allowed with --compare")
    if options.base is not None and options.compare is not None:
        raise UsageError(f"--base: {options.base} is not allowed with --compare")
    if len(in_place) > 1:
        raise UsageError(f"{in_place[1]}: is not allowed with {in_place[0]}")
    if options.robustness is not None and options.robustness[0] not in ROBUSTNESS_SETS:
        raise UsageError(
            f"--robustness: {options.robustness[0]!r} is not allowed; "
            f"{', '.join(ROBUSTNESS_SETS)} are"
        )


def report(options: Namespace) -> None:
    """`polyad report`."""
    from launch.machine import prepare_environment

    prepare_environment()
    from train.experts.report.command import report, report_line

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = report(
            options.run,
            output=options.output,
            checkpoint=options.checkpoint,
            best=options.best,
            data=options.data,
            split=options.split,
            layers=options.layers,
            experts=options.experts,
            top=options.top,
            tokens=options.tokens,
        )
        show(result, report_line(result), options.json, stdout)


def study(options: Namespace) -> None:
    """`polyad study`."""
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.study.figure import check_figure, figure
    from launch.study.progress import plans_table
    from launch.study.run import describe_study, study
    from launch.study.tables import result_table

    check_json_path(options.json)
    if options.figure is not None:
        check_figure(options.figure, dry_run=options.dry_run)
    with only_results_on_stdout() as stdout:
        if options.dry_run:
            plan = describe_study(options.study)
            show(plan, plans_table(plan), options.json, stdout)
            return
        result = study(options.study)
        if options.figure is not None:
            options.figure.write_text(figure(result), encoding="utf-8")
        show(result, result_table(result, markdown=options.markdown), options.json, stdout)


def convert(options: Namespace) -> None:
    """`polyad convert`."""
    from launch.machine import prepare_environment

    prepare_environment()
    from train.exchange.change import Change
    from train.exchange.convert import conversion_table, convert
    from train.exchange.factorize import Factorizing
    from train.exchange.split import Splitting
    from train.exchange.upcycle import Upcycling

    check_json_path(options.json)
    change: Change | None = None
    for text, kind in (
        (options.upcycle, Upcycling),
        (options.split, Splitting),
        (options.factorize, Factorizing),
    ):
        if text is not None:
            change = kind(text)
    with only_results_on_stdout() as stdout:
        result = convert(
            options.source,
            options.destination,
            options.to,
            change,
            options.weights,
            options.merge,
            options.base,
        )
        show(result, conversion_table(result), options.json, stdout)


def generate(options: Namespace) -> None:
    """`polyad generate`."""
    from launch.machine import prepare_environment

    prepare_environment()
    from train.evaluation.generate import Sampling, generate
    from train.experts.steering import effect_lines, parse_steering

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
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
            ),
            use_cache=not options.no_cache,
            precision=options.precision,
            steerings=steerings,
            base=options.base,
            write=write,
        )
        speed = f"{len(result['token_ids'])} tokens, {result['tokens_per_second']:,.0f} tokens/s"
        print(f"\n{speed}, ended by {result['ended_by']}", file=sys.stderr)
        print(effect_lines(result["steering"]), end="", file=sys.stderr)
        show(result, "", options.json, stdout)


def validate(options: Namespace) -> None:
    """`polyad validate`."""
    from parallel.comm import environment_world_size
    from train.config.describe import describe_run, description_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        description = describe_run(
            options.config,
            options.overrides,
            options.processes or environment_world_size(),
            with_data=not options.without_data,
        )
        show(description, description_table(description), options.json, stdout)


def checkpoint_list(options: Namespace) -> None:
    """`polyad checkpoint list`."""
    from launch.checkpoints import checkpoint_table, list_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = list_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)


def checkpoint_verify(options: Namespace) -> int:
    """`polyad checkpoint verify`."""
    from launch.checkpoints import checkpoint_table, verify_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = verify_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)
    return 0 if result["good"] else 2


def checkpoint_delete(options: Namespace) -> None:
    """`polyad checkpoint delete`."""
    from launch.checkpoints import checkpoint_table, delete_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        last_too = options.even_the_last_good
        result = delete_checkpoints(options.folders, even_the_last_good=last_too)
        show(result, checkpoint_table(result), options.json, stdout)


def schema(options: Namespace) -> None:
    """`polyad schema`."""
    from launch.schema import schema_text

    sys.stdout.write(schema_text(options.kind))


def doctor(options: Namespace) -> int:
    """`polyad doctor`."""
    from launch.doctor.command import check, examine, in_a_group, table
    from launch.machine import end_with_launcher, prepare_environment
    from launch.via.options import launch_from

    check_json_path(options.json)
    end_with_launcher()
    if not in_a_group():
        if options.processes_per_node is None and options.via != "ssh":
            options.processes_per_node = 1
        words = ["--json", options.json] if options.json else []
        return launch_from(options, ("doctor", *words))
    prepare_environment()
    with only_results_on_stdout() as stdout:
        result = examine(options.config, options.overrides)
        if result is not None:
            show(result, table(result), options.json, stdout)
            check(result)
    return 0


def verify_layout(options: Namespace) -> None:
    """`polyad verify-layout`."""
    from launch.verify_layout import (
        become_processes,
        check,
        check_processes,
        table,
        verify_layout,
    )
    from parallel.comm import environment_world_size

    check_json_path(options.json)
    found = environment_world_size()
    processes = check_processes(options.processes, found)
    if found == 1:
        from train.config.run import load_config
        from train.layout.small import small_config

        small_config(load_config(options.config, options.overrides), processes)
        words = [str(options.config), "--processes", str(processes)]
        words += ["--json", options.json] if options.json else []
        become_processes([*words, *options.overrides], processes)
    with only_results_on_stdout() as stdout:
        result = verify_layout(options.config, options.overrides, processes)
        if result is not None:
            show(result, table(result), options.json, stdout)
            check(result)


def plan(options: Namespace) -> None:
    """`polyad plan`."""
    from launch.plan.command import (
        HERE,
        become_processes,
        check,
        check_options,
        configuration,
        plan,
        plan_here,
    )
    from launch.plan.table import table
    from launch.study.figure import check_figure
    from parallel.comm import environment_world_size
    from parallel.plan.devices import DEVICES
    from train.forecast.forecast import Machines

    check_json_path(options.json)
    if options.figure:
        check_figure(options.figure, dry_run=False)
    check_options(options)
    processes = options.nodes * options.processes_per_node
    config = configuration(options.config, options.overrides, processes)
    if options.device == HERE:
        if processes > 1 and environment_world_size() == 1:
            become_processes(options)
        with only_results_on_stdout() as stdout:
            here = plan_here(config, processes, check_steps=options.check or 0)
            if here is not None:
                show(here, table(here), options.json, stdout)
        return
    machines = Machines(
        device=DEVICES[options.device],
        nodes=options.nodes,
        processes_per_node=options.processes_per_node,
        storage=1e9 * options.storage,
        hours_of_one=options.failures,
    )
    with only_results_on_stdout() as stdout:
        result = plan(
            config,
            machines,
            imbalance=options.imbalance,
            search=options.search,
            scale=options.figure is not None,
        )
        if options.figure:
            from launch.plan.figure import figure

            options.figure.write_text(figure(result), encoding="utf-8")
        show(result, table(result), options.json, stdout)
        check(result)
