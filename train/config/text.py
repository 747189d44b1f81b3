"""A configuration as people write it: files, overrides, what keys there are, and their schema."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from polyad.model.config import Config
from polyad.model.config_yaml import ConfigYamlError, Written, load_written
from polyad.train.errors import ConfigError, one_line, shortened, shown

DOTTED_KEY = re.compile(r"\w+(\.\w+)*")
MAX_SECTIONS = 20
"""Sections of a dotted key at most."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The JSON Schema that editors complete and check configurations with."""


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value` in a tree as `parse_yaml` gives it, in place.

    Raises:
        ConfigError: it is not of this form.
    """
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not DOTTED_KEY.fullmatch(key) or len(sections) > MAX_SECTIONS:
        raise ConfigError(
            f"{shown(override)}: overrides are written key=value, as in train.steps=100"
        )
    for section in sections:
        inner = tree.setdefault(section, {})
        if inner is None:
            inner = tree[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{shortened(key)}: {shortened(section)} is a single value, and has no keys below "
                "it"
            )
        tree = inner
    tree[last] = parse_yaml(value, shortened(override))


def parse_yaml(text: str, origin: str) -> Any:
    """Reads YAML as people write it.

    Args:
        text: of a file, or of one value.
        origin: what it is called in an error.

    Returns:
        The tree, with numbers and booleans as they are written: `settle` makes values of them.

    Raises:
        ConfigError: it is not YAML, or not such as configurations are written in.
    """
    try:
        return load_written(text)
    except ConfigYamlError as error:
        reason = one_line(error)
        if "\n" not in text:
            reason = reason.removeprefix("line 1: ")
        raise ConfigError(f"{origin}: {reason}") from None


def settle(tree: Any, annotation: Any) -> Any:
    """Decides what numbers and booleans are: text, where a key is for text, else their value.

    So a folder may be called 12e4 or 0012, and keeps its name.

    Args:
        tree: as `parse_yaml` gives it; it is not changed.
        annotation: the type of the tree: a configuration class, or that of one of its keys; what is
            `Any` keeps how it was written.
    """
    if annotation is Any:
        return tree
    if isinstance(tree, Written):
        return tree.text if _is_text(annotation) else tree.value
    if isinstance(tree, list):
        # The classes of a configuration are found within a list.
        inner = Any if get_args(annotation) == (Any,) else annotation
        return [settle(value, inner) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if get_origin(annotation) is dict:
        return {key: settle(value, get_args(annotation)[1]) for key, value in tree.items()}
    fields: dict[str, Any] = {}
    for member in config_classes(annotation):
        fields = {name: f.annotation for name, f in member.model_fields.items()} | fields
    return {key: settle(value, fields.get(key)) for key, value in tree.items()}


def _is_text(annotation: Any) -> bool:
    """Whether a key is for text, or for a list of texts."""
    if annotation is str:
        return True
    if get_origin(annotation) in (Literal, dict):
        return False
    return any(_is_text(argument) for argument in get_args(annotation))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a configuration class, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in config_classes(field.annotation):
            yield from keys(member, f"{prefix}{name}.")


def config_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes that a key can hold: none, one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from config_classes(argument)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def below(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of some keys, or in one of some sections."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def schema_of(kind: type[Config], title: str) -> dict[str, Any]:
    """The schema of a file, with what every key means.

    Rules between keys are not in it: `polyad validate` knows them.

    Args:
        kind: of the file's tree.
        title: of the schema.
    """
    plain: dict[str, Any] = _plain(kind.model_json_schema())
    return {"$schema": DIALECT} | plain | {"title": title}


def _plain(node: Any) -> Any:
    """Without what would refuse good files, or names that pydantic makes up.

    Sections are of one of several kinds, one of which holds where the file names none: a section of
    keys that two kinds have is of any of them, not of one.
    """
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = {
        ("anyOf" if key == "oneOf" else key): _plain(value)
        for key, value in node.items()
        if key != "discriminator"
    }
    if "properties" in plain:  # a key of ours may be called `title`
        plain["properties"] = {name: _untitled(each) for name, each in plain["properties"].items()}
    return plain


def _untitled(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "title"}
