"""What commands share that read a checkpoint: arguments, and options of those with held-out data.

The latter run in one process, or in each that torchrun has started; rank 0 shows the result.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from polyad.launch.command import Argument, Json, Overrides, Positive, results
from polyad.launch.processes import end_with_launcher, is_main

if TYPE_CHECKING:
    from polyad.train.reading import EvaluationContext


def weights_folder(text: str) -> Path:
    """Parses the path of a run, a checkpoint or a folder of weights.

    Raises:
        ArgumentTypeError: it is a configuration or prepared data.
    """
    path = Path(text)
    if (path / "manifest.json").is_file() and not (path / "config.yaml").is_file():
        raise ArgumentTypeError(
            f"{text} is prepared data; give the folder of a run here, and the data as --data {text}"
        )
    if not path.is_dir():
        from polyad.train.config.run import find_config

        if find_config(path).is_file() and find_config(path).suffix in {".yaml", ".yml"}:
            raise ArgumentTypeError(
                f"{text} is a configuration; give the folder of a run, the run.folder in it"
            )
    return path


CheckpointOrRun = Annotated[
    Path,
    Argument(
        "a checkpoint, or a run (its newest checkpoint is used)",
        "CHECKPOINT_OR_RUN",
        weights_folder,
    ),
]
AnyWeights = Annotated[
    Path, Argument("a checkpoint, a run, or a folder of weights", "CHECKPOINT", weights_folder)
]
TokenizerFile = Annotated[
    str | None,
    Argument(
        "tokenizer file or folder, as for polyad prepare; default: the checkpoint's own", "PATH"
    ),
]
Precision = Annotated[
    Literal["fp32", "bf16"], Argument("precision of the computation; default fp32")
]
Data = Annotated[
    str | None,
    Argument("prepared data to read; default: the data that the run was trained on", "DIR"),
]
Best = Annotated[
    bool,
    Argument(
        "for a run with checkpoint.keep_best: use the checkpoint with the best validation score "
        "instead of the newest"
    ),
]
Split = Annotated[
    Literal["validation", "test", "train"], Argument("split to read; default validation")
]
Weights = Annotated[
    Literal["trained", "ema"],
    Argument(
        "which weights of a checkpoint to use: the trained ones, or their moving average (kept by "
        "runs with train.ema); default trained"
    ),
]
Base = Annotated[
    Path | None,
    Argument(
        "base model of a checkpoint with adapters, or of a peft folder; for a checkpoint it must "
        "hold exactly the weights that the adapters were trained on; default: the path in the "
        "adapters' configuration"
    ),
]
Intervene = Annotated[
    Sequence[str],
    Argument(
        "change what experts do at every token; HOW is zero (their output becomes 0), "
        "renormalize (as well, and the other experts take over their weight), swap (expert to=E "
        "takes their place), mean (their output becomes its mean), prune (removed from the "
        "router, the next best enter), scale or clamp (multiply their routing weight by value=X, "
        "or set it to X), force or avoid (rank them first or last), or steer (add value=X times "
        "their gate columns to the input of the block); may be repeated; experts of a hierarchy "
        "are numbered across its levels",
        "layer=L,expert=E+F,how=HOW",
    ),
]
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
        own = vars(self).items()
        return {name: value for name, value in own if name not in shared and value is not None}

    def opened(self, checkpoint: Path) -> "EvaluationContext":
        """Opens a checkpoint with its data."""
        from polyad.train.experts.interventions import parse_intervention
        from polyad.train.reading import open_evaluated

        shared = ("data", "overrides", "weights", "base")
        options = {name: value for name, value in vars(self).items() if name in shared}
        interventions = [parse_intervention(text) for text in getattr(self, "intervene", ())]
        return open_evaluated(checkpoint, interventions=interventions, **options)

    def measured(self, checkpoint: Path) -> tuple[object, str]:
        """Returns the result of a checkpoint, and the same as text."""
        from polyad.train.measures.measure import examine
        from polyad.train.measures.registry import MEASURES

        opened, analysis = self.opened(checkpoint), MEASURES[self.measure](**self.options())
        result = examine(opened, analysis, getattr(self, "split", "validation"))
        return result, result.text()

    def chosen(self, choose: Callable[[Path], Path]) -> Self:
        """Returns the same with the checkpoint that rank 0 chooses; all processes call this."""
        from polyad.parallel.checkpoint.load import chosen_by_main

        return replace(self, path=chosen_by_main(self.path, choose))

    def run(self) -> None:
        """Shows the result."""
        end_with_launcher()
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


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(SplitOptions):
    """One that also says which weights of the checkpoint are meant."""

    weights: Weights = "trained"
    base: Base = None
    intervene: Intervene = ()
