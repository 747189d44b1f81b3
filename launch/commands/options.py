"""Options that several commands take which read a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument, names

CheckpointOrRun = Annotated[
    Path, Argument("a run means its newest checkpoint", "CHECKPOINT_OR_RUN")
]
Data = Annotated[str | None, Argument("prepared data; default: what the run was trained on", "DIR")]
Best = Annotated[
    bool,
    Argument(
        "of a run with checkpoint.keep_best: the checkpoint of its best validation in place "
        "of the newest"
    ),
]
Split = Annotated[Literal["validation", "test", "train"], Argument()]
Weights = Annotated[
    Literal["trained", "ema"],
    Argument(
        "of a checkpoint: those that were trained, or their moving average, which a run with "
        "train.ema keeps; default trained"
    ),
]
Base = Annotated[
    Path | None,
    Argument(
        "of a checkpoint of adapters, or a folder of peft's: where their base is; that of a "
        "checkpoint has to have the same numbers; default: where their configuration says",
        "PATH",
    ),
]
Stream = Annotated[
    Path | None,
    Argument(
        "read a decoder block by block, and keep in FOLDER how far that is, so that the same "
        "command goes on after a stop; without it a decoder is read so if it does not fit into "
        "memory, and nothing is kept",
        "FOLDER",
    ),
]
NUMBERS = "N,N,..."


def numbers(about: str) -> Argument:
    """A list of blocks or experts.

    Args:
        about: what it is for.
    """
    return Argument(about, NUMBERS, names)


Intervene = Annotated[
    Sequence[str],
    Argument(
        "change what experts do, at every token: contribution (output 0), route-around, swap (to=E "
        "in their place), mean, prune, scale or clamp (value=X, of their weight), force or avoid "
        "(ranked first or last); may be given several times; experts of a hierarchy are counted "
        "over its levels",
        "layer=L,expert=E+F,how=HOW",
        repeated=True,
    ),
]


def steering(about: str) -> Argument:
    """Experts that are added to what enters a block.

    Args:
        about: what it is for.
    """
    return Argument(about, "layer=N,expert=N,strength=X", repeated=True)
