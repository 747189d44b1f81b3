"""The commands of `polyad`: a function or dataclass for each, whose parameters are the arguments.

See `launch/command.py`. Nothing heavy is imported before one runs.
"""

from typing import Any

from polyad.launch.command import Command
from polyad.launch.commands import bench, data, held_out, plan, runs, weights

GROUPS: dict[str, tuple[Any, ...]] = {  # a decorated class keeps its type for mypy
    "data": (data.Prepare, data.data_verify),
    "before a run": (
        runs.keys,
        runs.configs,
        runs.validate,
        plan.plan,
        bench.bench,
        runs.Doctor,
        runs.verify_layout,
        runs.schema,
    ),
    "training": (runs.Launch, runs.train, runs.study),
    "a trained model": (
        held_out.Evaluate,
        weights.generate,
        weights.predict,
        held_out.report,
        held_out.Robustness,
        held_out.Compare,
        weights.convert,
        weights.inspect,
        data.checkpoint_list,
        data.checkpoint_verify,
    ),
    "its experts": (
        held_out.Specialize,
        held_out.Atlas,
        held_out.SteerExperts,
        held_out.Rewrite,
        held_out.Trace,
        held_out.Prune,
        held_out.Splice,
    ),
}
"""The commands in the order in which a user needs them, by the titles of `polyad --help`."""
COMMANDS: dict[str, Command] = {each.name: each for group in GROUPS.values() for each in group}
