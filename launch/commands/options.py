"""Arguments that several commands take which read a checkpoint."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument


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
        "change what experts do at every token; HOW is contribution (their output becomes 0), "
        "route-around (as well, and the other experts take over their weight), swap (expert to=E "
        "takes their place), mean (their output becomes its mean), prune (removed from the "
        "router, the next best enter), scale or clamp (multiply their routing weight by value=X, "
        "or set it to X), force or avoid (rank them first or last), or steer (add value=X times "
        "their gate columns to the input of the block); may be repeated; experts of a hierarchy "
        "are numbered across its levels",
        "layer=L,expert=E+F,how=HOW",
    ),
]
