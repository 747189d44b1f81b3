"""The commands of `polyad`, in the order of its help: a function for each, whose parameters are the
arguments; see `launch/command.py`. Nothing heavy is imported before one runs."""

from polyad.launch.command import Command
from polyad.launch.commands import (
    bench,
    checkpoints,
    data,
    evaluate,
    explore,
    plan,
    report,
    runs,
    study,
    weights,
)

COMMANDS: dict[str, Command] = {
    each.name: each
    for each in (
        data.prepare,
        runs.train,
        runs.launch,
        evaluate.evaluate,
        evaluate.compare,
        evaluate.robustness,
        evaluate.knockout,
        evaluate.atlas,
        evaluate.audit,
        evaluate.probe,
        evaluate.prune,
        evaluate.specialize,
        evaluate.rewrite,
        evaluate.steer,
        evaluate.contrast,
        evaluate.trace,
        evaluate.take,
        explore.explore,
        weights.generate,
        weights.convert,
        weights.inspect,
        runs.validate,
        runs.schema,
        runs.doctor,
        runs.verify_layout,
        plan.plan,
        bench.bench,
        report.report,
        study.study,
        checkpoints.checkpoint_list,
        checkpoints.checkpoint_verify,
        checkpoints.checkpoint_delete,
        data.data_verify,
    )
}
