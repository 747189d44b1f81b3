"""What commands share that read a checkpoint over held-out data.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from polyad.launch.command import Argument, Json, non_negative, positive
from polyad.launch.commands.options import (
    Base,
    Best,
    Data,
    Intervene,
    Split,
    Weights,
)
from polyad.launch.machine import is_main
from polyad.launch.output import results

if TYPE_CHECKING:
    from polyad.train.measures.measure import Examination

Found = tuple[object, str]
"""A result, and the same for a person."""
Measure = Callable[[Path], Found]
"""What is measured of a checkpoint, by all processes."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What is read, and where the result goes."""

    data: Data = None
    best: Best = False
    split: Split = "validation"
    json: Json = None

    def keywords(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The arguments of what reads it."""
        return {"data": self.data, "split": self.split, "overrides": tuple(overrides)}


@dataclass(frozen=True, kw_only=True)
class Stored(HeldOut):
    """The same, and which weights of the checkpoint are meant."""

    weights: Weights = "trained"
    base: Base = None
    intervene: Intervene = ()

    def keywords(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The arguments of what reads it."""
        from polyad.train.experts.interventions import parse_intervention

        own = {"weights": self.weights, "base": self.base}
        interventions = [parse_intervention(text) for text in self.intervene]
        return super().keywords(overrides) | own | {"interventions": interventions}


Tokens = Annotated[
    int | None,
    Argument(
        "approximate number of tokens or images to read, spread evenly over the split; default "
        "65536",
        "N",
        positive,
    ),
]
Seed = Annotated[int, Argument("random seed; default 0", "S", non_negative)]


def measure_named(
    name: str, held: Stored, overrides: Sequence[str], **options: Any
) -> Callable[[Path], Found]:
    """What takes a measure of the registry of a checkpoint."""

    def take_it(checkpoint: Path) -> Found:
        from polyad.train.measures.registry import MEASURES

        return examined(checkpoint, MEASURES[name], held, overrides, **options)

    return take_it


def examined(
    checkpoint: Path,
    kind: "type[Examination]",
    held: HeldOut,
    overrides: Sequence[str],
    **options: Any,
) -> Found:
    """What an examination finds out about a checkpoint."""
    from polyad.train.measures.measure import examine

    found = examine(checkpoint, kind, **options, **held.keywords(overrides))
    return found, found.text()


def show_measured(
    name: str, path: Path, held: HeldOut, asked: dict[str, Any], measure: Measure
) -> None:
    """Shows what is measured of a checkpoint.

    Args:
        name: of the command.
        path: of a checkpoint or a run.
        held: what is read.
        asked: the command's other arguments; `other`, a path, becomes that which rank 0 has found.
        measure: of the checkpoint's folder.
    """
    from polyad.launch.machine import end_with_launcher, prepare_environment

    end_with_launcher()
    prepare_environment()
    from polyad.parallel import comm
    from polyad.parallel.checkpoint.load import (
        best_checkpoint,
        chosen_by_main,
        newest_of,
        read_newest,
    )
    from polyad.parallel.meeting import agree

    choose = best_checkpoint if held.best else newest_of
    with results(held.json) as show:
        if comm.environment_world_size() > 1:
            facts = {"name": name, "path": path} | vars(held) | asked
            del facts["json"]
            agree("the command", {f"the command's {key}": f"{facts[key]}" for key in facts})
            path, choose = chosen_by_main("path", path, choose), newest_of
            if "other" in asked:
                asked["other"] = chosen_by_main("--with", asked["other"], newest_of)
        result, table = read_newest(path, measure, choose)
        if is_main():
            show(result, table)
        comm.shutdown()
