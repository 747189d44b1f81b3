"""Runs what is left of a study, one run after the other, each in processes of its own.

A run is `polyad train` and `polyad evaluate`. What is finished is skipped, what was interrupted
goes on from its newest checkpoint: the same command again is all that is needed. When all are
finished, what else the study wants to know is measured, from their checkpoints.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.text.dataset import PreparedData
from data.text.prepare import prepare
from launch.child import STOPPED, polyad
from launch.records import last_loss, last_routing, median_rate, peak_memory, read_records
from launch.study.folder import (
    RESULTS,
    check_data,
    check_folder,
    locked,
    read_result,
    write_json,
    write_record,
)
from launch.study.measures import all_measures, forget, read_measures
from launch.study.results import summarize
from launch.study.tables import (
    finished_line,
    measure_line,
    nothing_left,
    plan_table,
    progress_line,
    trained_line,
)
from parallel.checkpoint.commit import complete_checkpoints
from parallel.checkpoint.verification import newest_that_opens
from train.config.describe import describe
from train.config.plan import plan_run
from train.config.resolve import resolve
from train.config.rules import validate
from train.errors import ConfigError, RunError, stopped
from train.study.study import Run, Study, load_study

Results = dict[tuple[str, int], dict[str, Any]]
"""Of finished runs, by variant and seed."""


def describe_study(file: Path) -> dict[str, Any]:
    """What a study will train and what of it stands; nothing is written.

    Args:
        file: the study.

    Returns:
        JSON values: the variants' sizes and the state of every run.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    study = load_study(file)
    check_folder(study)
    return _plan(study, _vocab_size(study))


def study(file: Path) -> dict[str, Any]:
    """Runs what is left of a study.

    Args:
        file: the study.

    Returns:
        The comparison, as `summarize` makes it.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong. Nothing was started.
        RunError: a run failed; those that are finished stay.
        Stopped: or KeyboardInterrupt, as a signal asked; the run that was going on has ended.
    """
    study = load_study(file)
    check_folder(study)
    with locked(study):
        data = _prepared(study)
        check_data(study, data.manifest.fingerprint)
        plan = _plan(study, data.manifest.tokenizer.vocab_size)
        results = {
            (run.variant.name, run.seed): result
            for run in study.runs
            if (result := read_result(run)) is not None
        }
        for run in study.runs:
            if _key(run) not in results:
                plan_run(Path(study.config.base), run.overrides, 1)
        _say("\n".join([plan_table(plan), *nothing_left(study, results)]))
        write_record(study, data.manifest.fingerprint)
        for number, run in enumerate(study.runs, start=1):
            if _key(run) in results:
                continue
            _say("\n== " + progress_line(run, number, len(plan["runs"]), _left(study, results)))
            results[_key(run)] = _finish(run)
            beside = results.get((study.config.baseline, run.seed))
            _say(finished_line(run, results[_key(run)], beside))
            _write_results(study, plan, results)
        _measure(study, plan, results)
        return _write_results(study, plan, results)


def _measure(study: Study, plan: Mapping[str, Any], results: Results) -> None:
    """Takes the measures of finished runs that are not there yet."""
    missing = [measure for measure in all_measures(study) if measure.read() is None]
    took: dict[str, list[float]] = {}
    for number, measure in enumerate(missing, start=1):
        left = _seconds_left(took, [m.kind for m in missing[number - 1 :]])
        _say("\n== " + measure_line(measure, number, len(missing), left))
        started = time.monotonic()
        written = measure.file.with_suffix(".evaluation")
        _polyad(measure.run, *measure.arguments, "--json", str(written))
        measure.keep(written)
        took.setdefault(measure.kind, []).append(time.monotonic() - started)
        _write_results(study, plan, results)


def _prepared(study: Study) -> PreparedData:
    """The study's text, prepared if it is not there or not all of it."""
    data, split = study.config.data, study.config.split
    if data.source is not None and data.tokenizer is not None:
        prepare(
            data.source,
            data.tokenizer,
            data.path,
            validation_fraction=data.validation_fraction,
            test_fraction=data.test_fraction,
        )
    try:
        prepared = PreparedData.open(Path(data.path))
    except DataError as error:
        raise ConfigError(f"{study.file}: data.path: {error}") from None
    if not prepared.manifest.splits[split].tokens:
        raise ConfigError(
            f"{study.file}: split: {split} has no text in {data.path}; take another, or prepare "
            f"the text with some"
        )
    return prepared


def _vocab_size(study: Study) -> int:
    """The vocabulary, before anything is prepared if need be."""
    data = study.config.data
    try:
        return PreparedData.open(Path(data.path)).manifest.tokenizer.vocab_size
    except DataError as error:
        kind, _, size = (data.tokenizer or "").partition(":")
        if kind == "train" and size.isdecimal():
            return int(size)
        raise ConfigError(
            f"{study.file}: data.path: {error}; how large the vocabulary is, and so "
            f"the model, is known then"
        ) from None


def _plan(study: Study, vocab_size: int) -> dict[str, Any]:
    variants = {}
    for name, variant in study.variants.items():
        try:
            config = resolve(variant.config, vocab_size)
        except ValueError as error:
            raise ConfigError(f"{study.file}: variants.{name}: {error}") from None
        described = describe(config, validate(config, 1))
        variants[name] = {
            key: described["model"][key]
            for key in ("parameters", "active_parameters", "flops_per_token")
        } | {"training": described["training"]}
    measures = all_measures(study)
    return {
        "study": str(study.file),
        "folder": str(study.folder),
        "baseline": study.config.baseline,
        "seeds": study.config.seeds,
        "variants": variants,
        "runs": [
            {
                "variant": run.variant.name,
                "seed": run.seed,
                "finished": run.result_file.exists(),
                "step": _step(run),
            }
            for run in study.runs
        ],
        "measures": {
            "wanted": len(measures),
            "taken": sum(measure.read() is not None for measure in measures),
        },
    }


def _step(run: Run) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    found = complete_checkpoints(run.folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _is_trained(run: Run) -> bool:
    """Whether all steps are done, and the validation after the last one was not cut short."""
    newest = newest_that_opens(run.folder / "checkpoints")
    if newest is None or newest.training_step < run.variant.config.train.steps:
        return False
    return newest.state.unfinished is None


def _finish(run: Run) -> dict[str, Any]:
    """Trains a run to its end and evaluates it."""
    started, from_step = time.monotonic(), _step(run)
    if _is_trained(run):
        _say(trained_line(run))
    else:
        _polyad(run, "train", run.study.config.base, *run.overrides)
    scores = run.result_file.with_suffix(".evaluation")
    split = ("--split", run.study.config.split)
    _polyad(run, "evaluate", str(run.folder), *split, "--json", str(scores))
    evaluation = json.loads(scores.read_text(encoding="utf-8"))
    if evaluation["loss"] is None:
        raise RunError(f"{run}: its loss on the {run.study.config.split} split is not finite")
    records = read_records(run.folder)
    result = {
        "variant": run.variant.name,
        "seed": run.seed,
        "loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "tokens_scored": evaluation["tokens_scored"],
        "step": evaluation["step"],
        "training_loss": last_loss(records),
        "tokens_per_second": median_rate(records),
        "memory_bytes": peak_memory(records),
        "routing": last_routing(records),
        # Of the whole run, for the time that others will take.
        "seconds": time.monotonic() - started if from_step == 0 else None,
    }
    forget(run)
    write_json(run.result_file, result)
    scores.unlink()
    return result


def _polyad(run: Run, *arguments: str) -> None:
    """A command of a run in processes of its own.

    Raises:
        RunError: it failed, and has said why.
        Stopped: or KeyboardInterrupt: a signal asked it or this process to stop.
    """
    kept = "the same command goes on with this run"
    status = polyad(*arguments, results=False)  # a line of ours says them
    if status in STOPPED:
        raise stopped(status - 128, f"{run}: {kept}")
    if status:
        raise RunError(
            f"{run}: `polyad {arguments[0]}` ended with status {status}; {kept}, and all that are "
            f"finished are kept"
        )


def _left(study: Study, results: Mapping[tuple[str, int], Mapping[str, Any]]) -> float:
    """Seconds until the study is done, by the runs that are; NaN before the first one."""
    took: dict[str, list[float]] = {}
    for (name, _), result in results.items():
        if result["seconds"] is not None:
            took.setdefault(name, []).append(result["seconds"])
    return _seconds_left(took, [r.variant.name for r in study.runs if _key(r) not in results])


def _seconds_left(took: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    """Of things by their names, by what those of the same name took; NaN if nothing is known."""
    if not took:
        return math.nan
    mean = {name: statistics.fmean(values) for name, values in took.items()}
    other = statistics.fmean(mean.values())
    return sum(mean.get(name, other) for name in names)


def _write_results(study: Study, plan: Mapping[str, Any], results: Results) -> dict[str, Any]:
    done = [run for run in study.runs if _key(run) in results]
    found = summarize(plan, [results[_key(run)] | read_measures(run) for run in done])
    found["split"] = study.config.split
    found["attack"] = study.config.attack and study.config.attack.model_dump()
    write_json(study.folder / RESULTS, found)
    return found


def _key(run: Run) -> tuple[str, int]:
    return run.variant.name, run.seed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
