"""The names of the classes that a checkpoint was trained with."""

from pathlib import Path

from polyad.data.json_reader import read_json
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError

CLASSES_FILE = "classes.json"
"""The file of a checkpoint with the names of its classes, in their order."""


def class_names_of(folder: Path) -> list[str] | None:
    """The names of the classes that a checkpoint was trained with; None if it has none.

    Raises:
        ConfigError: The file is damaged.
    """
    file = folder / CLASSES_FILE
    if not file.is_file():
        return None
    names = read_json(file, error=ConfigError)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{file}: is not a list of the names of classes")
    return names


def names_of(weights: Weights) -> list[str] | None:
    """The names of the classes of weights of any format; None: they do not say."""
    named = weights.class_names if isinstance(weights, FamilyWeights) else None
    return class_names_of(weights.folder) if named is None else named


def differing(ours: list[str], theirs: list[str], owner: str) -> str:
    """In words how two lists of classes differ, which they do.

    Args:
        ours: of the data.
        theirs: of weights.
        owner: what an error calls the weights.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} classes, the {owner} was trained with {len(theirs)}"
    first = next(n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    return (
        f"other classes than the {owner} was trained with: class {first} is {ours[first]!r}, "
        f"not {theirs[first]!r}"
    )
