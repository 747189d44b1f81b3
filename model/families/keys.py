"""The keys of another library's config.json, each with ours: one table reads and writes them.

A key reads what the file says, or the library's default where it does not say, and writes every
value out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Tree: TypeAlias = Mapping[str, Any]
"""The content of a config.json."""
ACTIVATIONS = {
    "gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Ours, by transformers' name; of two names the first is written."""


class HuggingFaceError(ValueError):
    """A folder of another library, or a model, that cannot be brought over: one line with why."""

    exit_status = 2


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A section of values by dotted keys."""
    section: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = section
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return section


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key of a configuration of ours."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _accept(_: Tree) -> None:
    pass


@dataclass(frozen=True)
class Key:
    """A key of theirs, or a few that are one of ours."""

    names: Mapping[str, str]
    """Theirs by ours as pydantic says them, for errors about config.json."""
    read: Callable[[Tree], dict[str, Any]] = _nothing
    """The values of ours."""
    write: Callable[[Any], dict[str, Any]] = _nothing
    """The values of theirs, of a configuration of ours that has these keys."""
    refuse: Callable[[Tree], None] = _accept
    """Raises a `HuggingFaceError`, without the file's name, at what is not built here."""
    reads: tuple[str, ...] = ()
    """Further keys of theirs that it knows."""


def field(
    theirs: str, ours: str, default: Any, alias: str | None = None, *, is_needed: bool = False
) -> Key:
    """A value with one key there and one here.

    Args:
        theirs: The key there, which is written.
        ours: The key here, dotted where it is in a section of the model's.
        default: What the library takes where the file does not say.
        alias: Another key there, as older or newer files have it.
        is_needed: Whether null is refused: here it leaves a size to the data, which weights do not
            have.
    """

    def read(tree: Tree) -> Any:
        return tree.get(theirs, default if alias is None else tree.get(alias, default))

    def refuse(tree: Tree) -> None:
        if is_needed and read(tree) is None:
            raise HuggingFaceError(f"{theirs}: None: a number of at least 1 is needed")

    return Key(
        {ours: theirs},
        lambda tree: {ours: read(tree)},
        lambda config: {theirs: value_at(config, ours)},
        refuse,
        reads=() if alias is None else (alias,),
    )


def constant(**values: Any) -> Key:
    """Values of ours that every model of a family has.

    Args:
        values: By our keys, with two underscores for a dot.
    """
    ours = {key.replace("__", "."): value for key, value in values.items()}
    return Key({}, lambda tree: ours)


def only(theirs: str, value: Any) -> Key:
    """An option of theirs of which one value is built here."""

    def refuse(tree: Tree) -> None:
        found = tree.get(theirs, value)
        if found != value:
            raise HuggingFaceError(
                f"{theirs}: {found!r:.60} is not supported; supported: {value!r}"
            )

    return Key({}, write=lambda config: {theirs: value}, refuse=refuse, reads=(theirs,))


def absent(theirs: str) -> Key:
    """An option of theirs of which no value is built here."""

    def refuse(tree: Tree) -> None:
        if tree.get(theirs):
            raise HuggingFaceError(f"{theirs}: is not supported; it must be absent")

    return Key({}, refuse=refuse)


def inner_size(theirs: str, default: int | None) -> Key:
    """The inner width of dense feed-forwards.

    Args:
        theirs: The key there.
        default: None: it is null there, for four times the width as here.
    """

    def write(config: Any) -> dict[str, Any]:
        dense = config.feed_forward
        size = dense.hidden_size if default is None else dense.inner_size(config.hidden_size)
        return {theirs: size}

    return Key(
        {"feed_forward.dense.hidden_size": theirs},
        lambda tree: {"feed_forward": {"kind": "dense", "hidden_size": tree.get(theirs, default)}},
        write,
    )


def activation(theirs: str, default: str) -> Key:
    """The activation function of dense feed-forwards."""

    def refuse(tree: Tree) -> None:
        name = tree.get(theirs, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise HuggingFaceError(f"{theirs}: {name!r:.60} is not supported; {known}")

    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return Key(
        {"activation": theirs},
        lambda tree: {"activation": ACTIVATIONS[tree.get(theirs, default)]},
        lambda config: {theirs: names[config.activation]},
        refuse,
    )


def dropouts(*theirs: str, is_read: bool = True) -> Key:
    """Several probabilities there, one here, and none where they differ.

    Args:
        theirs: The keys there.
        is_read: False: they are written alone.
    """

    def read(tree: Tree) -> dict[str, Any]:
        values = [tree.get(key, 0.1) for key in theirs]
        # Dropout matters in training alone.
        return {"dropout": values[0] if values.count(values[0]) == len(values) else 0.0}

    return Key(
        {"dropout": theirs[0]},
        read if is_read else _nothing,
        lambda config: dict.fromkeys(theirs, config.dropout),
    )
