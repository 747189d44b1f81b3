"""What commands share that read a checkpoint over held-out data.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from polyad.launch.command import Argument, Json, Overrides, Positive
from polyad.launch.commands.options import (
    Base,
    Best,
    CheckpointOrRun,
    Data,
    Intervene,
    Split,
    Weights,
)
from polyad.launch.machine import is_main
from polyad.launch.output import results

Tokens = Annotated[
    Positive | None,
    Argument(
        "approximate number of tokens or images to read, spread evenly over the split; default "
        "65536"
    ),
]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A command that reads a checkpoint over held-out data."""

    path: CheckpointOrRun = field(kw_only=False)
    overrides: Overrides = field(kw_only=False)
    data: Data = None
    best: Best = False
    json: Json = None

    measure: ClassVar[str]
    """The name of what is measured."""

    def options(self) -> dict[str, Any]:
        """The options of the analysis: those of this command alone."""
        shared = {each.name for each in fields(CheckpointOptions)}
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: own[name] for name in own if name not in shared and own[name] is not None}

    def reading(self) -> dict[str, Any]:
        """What is read, as `polyad.train.measures.measure.examine` takes it."""
        return {"data": self.data, "overrides": tuple(self.overrides)}

    def measured(self, checkpoint: Path) -> tuple[object, str]:
        """Returns the result of a checkpoint, and the same as text."""
        from polyad.train.measures.measure import examine
        from polyad.train.measures.registry import MEASURES

        analysis = MEASURES[self.measure]
        result = examine(checkpoint, analysis, **self.options(), **self.reading())
        return result, result.text()

    def chosen(self, choose: Callable[[Path], Path]) -> Self:
        """Returns the same with the checkpoint that rank 0 chooses; all processes call this."""
        from polyad.parallel.checkpoint.load import chosen_by_main

        return replace(self, path=chosen_by_main(self.path, choose))

    def run(self) -> None:
        """Shows the result."""
        from polyad.launch.machine import end_with_launcher, prepare_environment

        end_with_launcher()
        prepare_environment()
        from polyad.parallel import comm
        from polyad.parallel.checkpoint.load import best_checkpoint, newest_of, read_newest

        command, choose = self, best_checkpoint if self.best else newest_of
        with results(self.json) as show:
            if comm.environment_world_size() > 1:
                facts = {"name": type(self).__name__, **vars(self)}
                del facts["json"]
                shown = {f"the command's {key}": f"{value}" for key, value in facts.items()}
                comm.initialize(facts=shown)
                command, choose = self.chosen(choose), newest_of
            result, text = read_newest(command.path, command.measured, choose)
            if is_main():
                show(result, text)
            comm.shutdown()


@dataclass(frozen=True, kw_only=True)
class SplitOptions(DataOptions):
    """One that reads a split."""

    split: Split = "validation"

    def reading(self) -> dict[str, Any]:
        """What is read."""
        return super().reading() | {"split": self.split}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(SplitOptions):
    """One that also says which weights of the checkpoint are meant."""

    weights: Weights = "trained"
    base: Base = None
    intervene: Intervene = ()

    def reading(self) -> dict[str, Any]:
        """What is read."""
        from polyad.train.experts.interventions import parse_intervention

        own = {"weights": self.weights, "base": self.base}
        interventions = [parse_intervention(text) for text in self.intervene]
        return super().reading() | own | {"interventions": interventions}
