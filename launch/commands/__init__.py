"""The commands of `polyad`: a function for each, whose parameters are the arguments; see
`launch/command.py`. Nothing heavy is imported before one runs."""

from polyad.launch.command import Command
from polyad.launch.commands import (
    bench,
    checkpoints,
    data,
    edits,
    evaluate,
    experts,
    plan,
    predict,
    report,
    runs,
    study,
    weights,
)

GROUPS: dict[str, tuple[Command, ...]] = {
    "data": (data.prepare,),
    "before a run": (
        runs.keys,
        runs.configs,
        runs.validate,
        plan.plan,
        bench.bench,
        runs.doctor,
        runs.verify_layout,
        runs.schema,
    ),
    "training": (runs.launch, runs.train),
    "a trained model": (
        evaluate.evaluate,
        weights.generate,
        predict.predict,
        report.report,
        evaluate.robustness,
        evaluate.compare,
    ),
    "its experts": (
        experts.specialize,
        experts.knockout,
        experts.atlas,
        experts.steer,
        edits.rewrite,
        experts.trace,
        edits.prune,
        edits.splice,
    ),
    "weights": (weights.convert, weights.inspect),
    "comparisons": (study.study,),
    "upkeep": (
        checkpoints.checkpoint_list,
        checkpoints.checkpoint_verify,
        data.data_verify,
    ),
}
"""The commands in the order in which a user needs them, by the titles of `polyad --help`."""
COMMANDS: dict[str, Command] = {each.name: each for group in GROUPS.values() for each in group}
