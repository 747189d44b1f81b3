"""The commands of `polyad`, in the order of its help: a function for each, whose parameters are the
arguments; see `launch/command.py`. Nothing heavy is imported before one runs."""

from polyad.launch.command import Command
from polyad.launch.commands import (
    bench,
    checkpoints,
    data,
    evaluate,
    experts,
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
        experts.knockout,
        experts.atlas,
        experts.audit,
        experts.probe,
        experts.prune,
        experts.subset,
        experts.specialize,
        experts.rewrite,
        experts.steer,
        experts.contrast,
        experts.trace,
        experts.take,
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
