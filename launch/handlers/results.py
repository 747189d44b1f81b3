"""What the commands do that take a checkpoint or a study."""

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from polyad.data.files import write_whole
from polyad.launch.machine import is_main
from polyad.launch.output import check_json_path, only_results_on_stdout, show
from polyad.launch.parser import UsageError


def evaluate(options: Namespace) -> None:
    """`polyad evaluate`."""
    from polyad.launch.machine import end_with_launcher, prepare_environment

    end_with_launcher()
    prepare_environment()
    from polyad.parallel import comm
    from polyad.parallel.checkpoint.finding import (
        best_checkpoint,
        chosen_by_main,
        newest_of,
        read_newest,
    )
    from polyad.parallel.meeting import agree

    check_json_path(options.json)
    _check_evaluation(options)
    choose = best_checkpoint if options.best else newest_of
    with only_results_on_stdout() as stdout:
        if comm.environment_world_size() > 1:
            asked = {key: f"{value}" for key, value in vars(options).items() if key != "json"}
            agree("the command", {f"the command's {key}": value for key, value in asked.items()})
            options.path, choose = chosen_by_main("path", options.path, choose), newest_of
            if options.compare is not None:
                options.compare = chosen_by_main("--compare", options.compare, newest_of)
        result, table = read_newest(
            options.path, lambda chosen: _evaluated(chosen, options), choose
        )
        if is_main():
            show(result, table, options.json, stdout)
        comm.shutdown()


def _evaluated(path: Path, options: Namespace) -> tuple[dict[str, Any], str]:
    """What `polyad evaluate` finds at a checkpoint, and its table."""
    from polyad.data.images.noise import GaussianNoise
    from polyad.data.text.attack import WordSwap
    from polyad.parallel.checkpoint.finding import read_newest
    from polyad.train.evaluation.evaluate import evaluate, result_table
    from polyad.train.evaluation.stability import PROBE_UNITS, compare, comparison_table
    from polyad.train.experts.steering import parse_steering

    steerings = [parse_steering(text) for text in options.steer]
    chosen = {"data": options.data, "split": options.split, "overrides": tuple(options.overrides)}
    stored = {"weights": options.weights, "base": options.base}
    if options.compare is not None:
        units = PROBE_UNITS if options.probe_tokens is None else options.probe_tokens
        result = read_newest(
            options.compare, lambda other: compare(path, other, units=units, **chosen)
        )
        return result, comparison_table(result)
    if options.specialization:
        from polyad.train.evaluation.specialization import specialization, specialization_table

        result = specialization(path, **stored, **chosen)
        return result, specialization_table(result)
    if options.knockout:
        from polyad.train.evaluation.knockout import knockout
        from polyad.train.evaluation.knockout_table import knockout_table
        from polyad.train.experts.knockout_pass import KNOCKOUT_TOKENS

        result = knockout(
            path,
            tokens=options.probe_tokens or KNOCKOUT_TOKENS,
            layers=options.layers,
            experts=options.experts,
            steerings=steerings,
            **stored,
            **chosen,
        )
        return result, knockout_table(result)
    if options.rewrite is not None:
        from polyad.train.evaluation.rewriting import rewriting, rewriting_table

        result = rewriting(path, options.rewrite, **stored, **chosen)
        return result, rewriting_table(result)
    if options.robustness is not None:
        from polyad.data.errors import user_path
        from polyad.train.evaluation.robustness import robustness, robustness_table

        name, place = options.robustness
        del chosen["split"]
        result = robustness(path, name, user_path(place), **stored, **chosen)
        return result, robustness_table(result)
    attack: WordSwap | GaussianNoise | None = None
    if options.attack is not None:
        kind = WordSwap if options.attack == "word-swap" else GaussianNoise
        attack = kind(options.rate, options.seed or 0)
    result = evaluate(
        path,
        attack=attack,
        leak=options.leak,
        **stored,
        **chosen,
    )
    return result, result_table(result)


def _check_evaluation(options: Namespace) -> None:
    """Which options of `polyad evaluate` go together."""
    from polyad.data.images.imagenet import ROBUSTNESS_SETS

    needs = {
        "--rate": ["--attack"],
        "--seed": ["--attack"],
        "--probe-tokens": ["--compare", "--knockout"],
        "--layers": ["--knockout"],
        "--experts": ["--knockout"],
        "--steer": ["--knockout"],
    }
    for option, needed in needs.items():
        value = getattr(options, option.removeprefix("--").replace("-", "_"))
        given = [getattr(options, other.removeprefix("--")) for other in needed]
        if value not in (None, []) and all(other in (None, False) for other in given):
            said = ",".join(value) if isinstance(value, list) else value
            raise UsageError(f"{option}: {said} means nothing without {' or '.join(needed)}")
    if options.attack is not None and options.rate is None:
        raise UsageError(f"--attack {options.attack}: needs --rate, a number from 0 to 1")
    in_place = [
        option
        for option, value in (
            ("--compare", options.compare),
            ("--specialization", options.specialization or None),
            ("--knockout", options.knockout or None),
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
    if options.robustness is not None and options.split != "validation":
        raise UsageError(f"--split: {options.split} is not allowed with --robustness")
    if options.robustness is not None and options.robustness[0] not in ROBUSTNESS_SETS:
        raise UsageError(
            f"--robustness: {options.robustness[0]!r} is not allowed; "
            f"{', '.join(ROBUSTNESS_SETS)} are"
        )


def report(options: Namespace) -> None:
    """`polyad report`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.experts.report.command import report, report_line

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
            knockout=options.knockout,
        )
        show(result, report_line(result), options.json, stdout)


def study(options: Namespace) -> None:
    """`polyad study`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.launch.study.figure import check_figure, figure
    from polyad.launch.study.folder import form_of, kept_result
    from polyad.launch.study.page import check_page, page
    from polyad.launch.study.progress import plans_table
    from polyad.launch.study.run import compare_finished, describe_study, study
    from polyad.launch.study.tables import result_table
    from polyad.train.errors import ConfigError, RunError, Stopped

    check_json_path(options.json)
    _check_study(options)
    if options.figure is not None:
        check_figure(options.figure, dry_run=options.dry_run)
    if options.page is not None:
        check_page(options.page, dry_run=options.dry_run)
    with only_results_on_stdout() as stdout:
        if options.dry_run:
            plan = describe_study(options.study, options.jobs, options.budget)
            show(plan, plans_table(plan), options.json, stdout)
            return
        try:
            if _is_kept(options.study):
                with form_of(options.study):
                    result = kept_result(options.study)
            elif options.beside is None:
                result = study(options.study, options.jobs, options.budget)
            elif (known := compare_finished(options.study, options.beside)) is not None:
                result = known
            else:
                raise ConfigError(f"{options.study}: no run is finished, so none is compared")
        except (RunError, Stopped, KeyboardInterrupt):
            if options.page is not None and (found := compare_finished(options.study)):
                write_whole(options.page, page(found))
            raise
        with form_of(options.study) if _is_kept(options.study) else nullcontext():
            if options.figure is not None:
                write_whole(options.figure, figure(result))
            if options.page is not None:
                write_whole(options.page, page(result))
            table = result_table(result, markdown=options.markdown)
        show(result, table, options.json, stdout)


def _check_study(options: Namespace) -> None:
    """Which options of `polyad study` go together."""
    training = {
        "--dry-run": options.dry_run,
        "--jobs": options.jobs > 1,
        "--budget": options.budget is not None,
    }
    given = [option for option, is_given in training.items() if is_given]
    if options.beside is not None and given:
        raise UsageError(f"--beside: {options.beside} is not allowed with {given[0]}")
    if options.beside is not None:
        given.append("--beside")
    if _is_kept(options.study) and given:
        raise UsageError(f"{given[0]}: is not allowed with {options.study}, which is a result")


def _is_kept(study: Path) -> bool:
    """Whether it is a result that was kept, and no study."""
    return study.suffix == ".json"


def convert(options: Namespace) -> None:
    """`polyad convert`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.exchange.change import Change
    from polyad.train.exchange.convert import conversion_table, convert
    from polyad.train.exchange.factorize import Factorizing
    from polyad.train.exchange.linear_score import LinearScores
    from polyad.train.exchange.split import Splitting
    from polyad.train.exchange.upcycle import Upcycling

    check_json_path(options.json)
    change: Change | None = LinearScores() if options.linear_score else None
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
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.parallel.checkpoint.finding import best_checkpoint, newest_of, read_newest
    from polyad.train.evaluation.generate import Sampling, generate
    from polyad.train.experts.steering import effect_lines, parse_steering

    check_json_path(options.json)
    steerings = [parse_steering(text) for text in options.steer]
    with only_results_on_stdout() as stdout:

        def write(text: str) -> None:
            if options.json != "-" and text:
                stdout.write(text)
                stdout.flush()

        result = read_newest(
            options.path,
            lambda chosen: generate(
                chosen,
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
            ),
            best_checkpoint if options.best else newest_of,
        )
        speed = f"{len(result['token_ids'])} tokens, {result['tokens_per_second']:,.0f} tokens/s"
        print(f"\n{speed}, ended by {result['ended_by']}", file=sys.stderr)
        print(effect_lines(result["steering"]), end="", file=sys.stderr)
        show(result, "", options.json, stdout)
