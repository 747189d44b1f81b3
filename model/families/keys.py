"""The keys of another library's config.json and ours: one table for reading and writing.

What is read has been read by the library before, with its defaults; writing writes every value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

Tree: TypeAlias = Mapping[str, Any]
"""The content of a config.json."""
ACTIVATIONS = {
    "gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Our names by transformers'; if there are two, the first is written."""


class WeightsError(ValueError):
    """A folder of weights that cannot be read, or a model that cannot be written as another
    library's: a one-line error."""

    exit_status = 2


def configurations(model_type: str) -> Mapping[str, Any]:
    """Returns transformers' own configuration classes by `model_type`.

    Args:
        model_type: What is opened, for the error.

    Raises:
        WeightsError: transformers is not installed.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise WeightsError(
            f"model_type: {model_type}: needs transformers, which cannot be imported: {error}; "
            "`pip install 'polyad[open]'`"
        ) from None
    classes: Mapping[str, Any] = CONFIG_MAPPING
    return classes


def as_the_library_reads(section: Tree, model_type: str) -> Tree:
    """Returns the keys as transformers' own configuration class reads them: checked, with its
    defaults, and with one form of what older and newer files write differently.

    Args:
        section: The keys of a config.json.
        model_type: The name of the class there.

    Raises:
        WeightsError: A value is not allowed, or transformers is not installed.
    """
    keys = {key: value for key, value in section.items() if key != "quantization_config"}
    known = configurations(model_type)
    try:
        config = known[model_type].from_dict(keys)
    except Exception as error:  # of any class: each kind of fault there has its own
        raise WeightsError(" ".join(str(error).split())) from None
    read: Tree = config.to_dict()
    return {**read, **{alias: getattr(config, alias) for alias in config.attribute_map}}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nests values given by dotted keys."""
    section: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = section
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return section


def supported(key: str, value: Any, *allowed: Any) -> Any:
    """Returns a value of theirs, which has to be one of some.

    Raises:
        WeightsError: It is another.
    """
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise WeightsError(f"{key}: {value!r:.60} is not supported; supported: {names}")
    return value


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Key:
    """One or several keys of theirs that correspond to keys of ours."""

    names: Mapping[str, str]
    """Their keys by ours, as named by pydantic, for errors about config.json."""
    read: Callable[[Tree], dict[str, Any]] = _nothing
    """Returns the values of our keys; raises a `WeightsError`, without the file name, for values
    that are not supported."""
    write: Callable[[Any], dict[str, Any]] = _nothing
    """Returns the values of their keys for one of our configurations."""
    reads: tuple[str, ...] = ()
    """Further keys of theirs that it handles."""


def field(
    theirs: str,
    ours: str,
    read: Callable[[Any], Any] = lambda value: value,
    write: Callable[[Any], Any] = lambda value: value,
) -> Key:
    """A value with one key on either side.

    Args:
        theirs: Their key.
        ours: Our key, dotted if it is in a section of the model's.
        read: Returns our value for theirs.
        write: Returns their value for ours.
    """
    return Key(
        {ours: theirs},
        lambda tree: {ours: read(tree.get(theirs))},
        lambda config: {theirs: write(attrgetter(ours)(config))},
    )


def same(*keys: str) -> tuple[Key, ...]:
    """Values whose keys are the same on either side."""
    return tuple(field(key, key) for key in keys)


def constant(**values: Any) -> Key:
    """Values of ours that are the same for every model of a family.

    Args:
        values: Values by our keys, with two underscores for a dot.
    """
    ours = {key.replace("__", "."): value for key, value in values.items()}
    return Key({}, lambda tree: ours)


def only(**values: Any) -> Key:
    """Options of theirs of which only one value is supported.

    Args:
        values: These values by their keys.
    """

    def read(tree: Tree) -> dict[str, Any]:
        for key, value in values.items():
            supported(key, tree.get(key, value), value)
        return {}

    return Key({}, read, lambda config: values, reads=tuple(values))


def implied(**values: Any) -> Key:
    """Options that say what a family computes anyway; they may be absent or null, and are not
    written.

    Args:
        values: The only supported values by their keys.
    """

    def read(tree: Tree) -> dict[str, Any]:
        return only(**values).read({key: each for key, each in tree.items() if each is not None})

    return Key({}, read, reads=tuple(values))


def inner_size(theirs: str) -> Key:
    """The inner width of dense feed-forwards, which is a number there; null here means four times
    the width."""
    ours = "feed_forward.hidden_size"
    return Key(
        {ours: theirs},
        lambda tree: {ours: tree.get(theirs)},
        lambda config: {theirs: config.feed_forward.hidden_size or 4 * config.hidden_size},
    )


def activation(theirs: str) -> Key:
    """The activation function of dense feed-forwards."""
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return field(
        theirs,
        "activation",
        lambda name: ACTIVATIONS[supported(theirs, name, *ACTIVATIONS)],
        lambda ours: names[ours],
    )


def dropouts(*theirs: str, is_read: bool = True) -> Key:
    """Several dropout probabilities there, one here; 0 if they differ.

    Args:
        theirs: Their keys.
        is_read: False: they are only written.
    """

    def read(tree: Tree) -> dict[str, Any]:
        values = [tree.get(key) for key in theirs]
        # Dropout only matters in training.
        return {"dropout": values[0] if values.count(values[0]) == len(values) else 0.0}

    return Key(
        {"dropout": theirs[0]},
        read if is_read else _nothing,
        lambda config: dict.fromkeys(theirs, config.dropout),
    )
