"""The keys of another library's config.json and ours: one table for reading and writing.

Reading uses the library's default for a missing key; writing writes every value.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Tree: TypeAlias = Mapping[str, Any]
"""The content of a config.json."""
ACTIVATIONS = {
    "gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
"""Our names by transformers'; if there are two, the first is written."""

_SIZES = re.compile(
    r"(n|num)_\w+|\w+_(size|dim|rank|step|replace|group)|"
    r"max_position_embeddings|max_window_layers|sliding_window"
)
"""Keys of any family whose value is a whole number, or null."""
_MAY_BE_0 = re.compile(
    r"first_k_dense_replace|max_window_layers|n_shared_experts|num_nextn_predict_layers|"
    r"shared_\w+|sliding_window"
)
"""Those of them where 0 means none."""
_FLAGS = frozenset({
    "attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "rope_interleave",
    "tie_word_embeddings", "use_sliding_window",
})  # fmt: skip
_ROTARY = frozenset({"rope_parameters", "rope_scaling"})
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


class WeightsError(ValueError):
    """A folder of weights that cannot be read, or a model that cannot be written as another
    library's: a one-line error."""

    exit_status = 2


def check_forms(section: Tree) -> None:
    """Checks the types of the keys that other keys are read with.

    Raises:
        WeightsError: One has another form.
    """

    def refuse(key: str, needed: str) -> None:
        raise WeightsError(f"{key}: {section[key]!r:.60} is not supported; it must be {needed}")

    for key, value in section.items():
        if _SIZES.fullmatch(key) and value is not None:
            least = 0 if _MAY_BE_0.fullmatch(key) else 1
            if type(value) is not int or not least <= value < 2**31:
                refuse(key, f"a whole number of at least {least}, below 2^31")
    for key in section.keys() & _FLAGS:
        if section[key] is not None and not isinstance(section[key], bool):
            refuse(key, "true or false")
    for key in section.keys() & _ROTARY:
        inside = section[key] if section[key] is not None else {}
        if not isinstance(inside, dict) or not all(
            isinstance(each, str if name in ("rope_type", "type") else int | float | None)
            for name, each in inside.items()
        ):
            refuse(key, "an object of numbers, with a rope_type")
    if not isinstance(section.get("rope_theta", 1.0), int | float):
        refuse("rope_theta", "a number")
    types, layers = section.get("layer_types"), section.get("num_hidden_layers")
    if types is not None and not (
        isinstance(types, list)
        and all(each in _LAYER_TYPES for each in types)
        and len(types) == (layers or len(types))
    ):
        refuse("layer_types", f"one of {', '.join(_LAYER_TYPES[:2])} for each of {layers} layers")
    dense = section.get("mlp_only_layers")
    if dense is not None and not (
        isinstance(dense, list) and all(type(each) is int for each in dense)
    ):
        refuse("mlp_only_layers", "a list of layer numbers")


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


def value_at(config: Any, key: str) -> Any:
    """Returns the value of a dotted key of our configuration."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


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
    theirs: str, ours: str, default: Any, alias: str | None = None, *, is_needed: bool = False
) -> Key:
    """A value with one key on either side.

    Args:
        theirs: Their key, which is written.
        ours: Our key, dotted if it is in a section of the model's.
        default: The library's default for a missing key.
        alias: Another key of theirs, used by older or newer files.
        is_needed: Whether to refuse null, which here means that the data determines a size; weights
            need a fixed size.
    """

    def read(tree: Tree) -> dict[str, Any]:
        value = tree.get(theirs, default if alias is None else tree.get(alias, default))
        if is_needed and value is None:
            raise WeightsError(f"{theirs}: None: a number of at least 1 is needed")
        return {ours: value}

    return Key(
        {ours: theirs},
        read,
        lambda config: {theirs: value_at(config, ours)},
        reads=() if alias is None else (alias,),
    )


def constant(**values: Any) -> Key:
    """Values of ours that are the same for every model of a family.

    Args:
        values: Values by our keys, with two underscores for a dot.
    """
    ours = {key.replace("__", "."): value for key, value in values.items()}
    return Key({}, lambda tree: ours)


def only(theirs: str, value: Any) -> Key:
    """An option of theirs of which only one value is supported."""

    def read(tree: Tree) -> dict[str, Any]:
        if (found := tree.get(theirs, value)) != value:
            raise WeightsError(f"{theirs}: {found!r:.60} is not supported; supported: {value!r}")
        return {}

    return Key({}, read, lambda config: {theirs: value}, reads=(theirs,))


def implied(**values: Any) -> Key:
    """Options that say what a family computes anyway; they may be absent or null, and are not
    written.

    Args:
        values: The only supported values by their keys.
    """

    def read(tree: Tree) -> dict[str, Any]:
        for theirs, value in values.items():
            if tree.get(theirs) is not None:
                only(theirs, value).read(tree)
        return {}

    return Key({}, read, reads=tuple(values))


def inner_size(theirs: str, default: int | None) -> Key:
    """The inner width of dense feed-forwards.

    Args:
        theirs: Their key.
        default: Their default; None: null, which means four times the width as here.
    """

    def write(config: Any) -> dict[str, Any]:
        dense = config.feed_forward
        size = dense.hidden_size if default is None else dense.inner_size(config.hidden_size)
        return {theirs: size}

    return Key(
        {"feed_forward.hidden_size": theirs},
        lambda tree: {"feed_forward": {"kind": "dense", "hidden_size": tree.get(theirs, default)}},
        write,
    )


def activation(theirs: str, default: str) -> Key:
    """The activation function of dense feed-forwards."""

    def read(tree: Tree) -> dict[str, Any]:
        name = tree.get(theirs, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise WeightsError(f"{theirs}: {name!r:.60} is not supported; {known}")
        return {"activation": ACTIVATIONS[name]}

    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return Key({"activation": theirs}, read, lambda config: {theirs: names[config.activation]})


def dropouts(*theirs: str, is_read: bool = True) -> Key:
    """Several dropout probabilities there, one here; 0 if they differ.

    Args:
        theirs: Their keys.
        is_read: False: they are only written.
    """

    def read(tree: Tree) -> dict[str, Any]:
        values = [tree.get(key, 0.1) for key in theirs]
        # Dropout only matters in training.
        return {"dropout": values[0] if values.count(values[0]) == len(values) else 0.0}

    return Key(
        {"dropout": theirs[0]},
        read if is_read else _nothing,
        lambda config: dict.fromkeys(theirs, config.dropout),
    )
