"""Configurations as text: files, overrides, known keys, and their schema."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from polyad.model.config import Config, SectionIn
from polyad.model.config_yaml import ConfigYamlError, load
from polyad.train.errors import ConfigError, one_line, shortened, shown

DOTTED_KEY = re.compile(r"\w+(\.\w+)*")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The JSON Schema with which editors complete and check configurations."""


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value` in place in a tree from `parse_yaml`.

    Raises:
        ConfigError: it does not have this form.
    """
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not DOTTED_KEY.fullmatch(key):
        raise ConfigError(
            f"{shown(override)}: overrides are written key=value, as in train.steps=100"
        )
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(f"{shortened(key)}: {shortened(section)} has no keys below it")
    tree[last] = parse_yaml(value, shortened(override))


def parse_yaml(text: str, origin: str) -> Any:
    """Parses YAML.

    Args:
        text: content of a file, or one value.
        origin: its name in errors.

    Raises:
        ConfigError: it is not YAML, or not the subset used for configurations.
    """
    try:
        return load(text)
    except ConfigYamlError as error:
        raise ConfigError(f"{origin}: {one_line(error)}") from None


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a configuration class, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for annotation in (field.annotation, *field.metadata):
            for member in config_classes(annotation):
                yield from keys(member, f"{prefix}{name}.")


def config_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes of a key: none, one, or those of a union or a registry."""
    if isinstance(annotation, SectionIn):
        yield from annotation.registry().values()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from config_classes(argument)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a tree to dotted keys and their values."""
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


class _PlainSchema(GenerateJsonSchema):
    """A schema without names that pydantic generates, or parts that would reject valid files.

    A section may be of one of several kinds, with a default: if its keys are common to two kinds,
    it must match any of them, not exactly one.
    """

    def field_title_should_be_set(self, schema: object) -> bool:
        """Gives no field a title."""
        return False

    def tagged_union_schema(self, schema: Any) -> dict[str, Any]:
        """Describes a section of several kinds."""
        union = super().tagged_union_schema(schema)
        return {"anyOf": union["oneOf"]}


def schema_of(kind: type[Config], title: str) -> dict[str, Any]:
    """Returns the schema of a file, with descriptions of all keys.

    Rules between keys are not included; `polyad validate` checks them.

    Args:
        kind: class of the file's tree.
        title: title of the schema.
    """
    plain = kind.model_json_schema(schema_generator=_PlainSchema)
    return {"$schema": DIALECT} | plain | {"title": title}
