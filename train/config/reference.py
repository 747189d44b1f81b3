"""Reference of all configuration keys from the JSON Schema, for `polyad keys` and the site."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from polyad.model.config import Config
from polyad.train.config.text import below, schema_of


class Key(NamedTuple):
    """One key of a section."""

    name: str
    """Name within its section: `steps`."""
    type: str
    """The type in words: `integer >= 1, or null`."""
    default: str
    """The default in YAML, or `required`."""
    meaning: str
    """Description in plain text; empty if explained by a section below."""


class Section(NamedTuple):
    """The keys of one configuration class."""

    places: tuple[str, ...]
    """Dotted keys with this section: `model.feed_forward`, `model.replaced.feed_forward`; empty for
    the top of the file, and `data.mixture[]` for the elements of a list."""
    kind: str | None
    """The value of `kind` that selects this class; None: there is no choice."""
    about: str
    """The first paragraph of the class's docstring."""
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        """Its first place, with the kind if there are several: `data (kind: text)`."""
        name = self.places[0] or "top level"
        return name if self.kind is None else f"{name} (kind: {self.kind})"


def sections(kind: type[Config]) -> list[Section]:
    """Lists all keys of a file, class by class, from the top down.

    Args:
        kind: The class of the file.
    """
    schema = schema_of(kind, "")
    nodes: dict[str, dict[str, Any]] = {
        "": {**schema, "description": ""},
        **schema.get("$defs", {}),
    }
    places: dict[str, dict[str, None]] = {}
    waiting = [("", "")]
    while waiting:
        place, name = waiting.pop(0)
        places.setdefault(name, {})[place] = None
        inner = []
        for key, field in nodes[name]["properties"].items():
            is_list = "array" in [each.get("type") for each in (field, *field.get("anyOf", ()))]
            dotted = f"{place}.{key}".removeprefix(".") + ("[]" if is_list else "")
            inner += [(dotted, each) for each in _references(field)]
        waiting = inner + waiting
    return [_section(nodes[name], tuple(where)) for name, where in places.items()]


def find_keys(whole: Sequence[Section], wanted: str) -> list[Section]:
    """Finds the sections of a dotted key, and those below it.

    Args:
        whole: All sections of a file.
        wanted: A section or a key, such as `train` or `train.steps`.

    Returns:
        The sections, each with the matching keys; empty if there are none.
    """
    result, wanted = [], wanted.replace("[]", "")
    for section in whole:
        places = [place.replace("[]", "") for place in section.places]
        keys = [
            key
            for key in section.keys
            if any(below(f"{place}.{key.name}".removeprefix("."), [wanted]) for place in places)
        ]
        if keys:
            result.append(section._replace(keys=tuple(keys)))
    return result


def as_text(section: Section) -> str:
    """Formats a section for a terminal: every key with its type, default and description."""
    lines = [section.title]
    lines += _wrapped(section.about, "  ")
    if len(section.places) > 1:
        lines += _wrapped(f"Also: {', '.join(section.places[1:])}.", "  ")
    for key in section.keys:
        default = key.default if key.default == "required" else f"default {key.default}"
        lines += ["", *_wrapped(f"{key.name}: {key.type}; {default}", "  ")]
        lines += _wrapped(key.meaning, "      ")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 96, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _section(node: dict[str, Any], places: tuple[str, ...]) -> Section:
    kind = node["properties"].get("kind", {}).get("const")
    about, keys = node.get("description", "").partition("\n\n")[0], []
    for name, field in node["properties"].items():
        if "description" in field or not list(_references(field)):
            default = json.dumps(field.get("default")).strip('"')
            if name in node.get("required", ()):
                default = "required"
            elif default.startswith("{"):
                default = "see its keys"
            keys.append(Key(name, _type(field), default, field.get("description", "")))
    return Section(places, kind, about, tuple(keys))


def _references(node: Any) -> Iterator[str]:
    """Names of the classes that a key can hold, each once."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].removeprefix("#/$defs/")
        for name in ("anyOf", "items", "additionalProperties"):
            yield from _references(node.get(name))
    elif isinstance(node, list):
        for each in node:
            yield from _references(each)


def _type(node: dict[str, Any]) -> str:
    """The type in words."""
    if "anyOf" in node:
        words = dict.fromkeys(_type(each) for each in node["anyOf"])
        return ", or ".join(words)
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return " | ".join(map(str, node["enum"]))
    kind = node.get("type")
    if kind == "array":
        return f"list of {_type(node['items'])}" if "items" in node else "list"
    if kind in ("integer", "number"):
        return " ".join([kind, *_bounds(node)])
    return {"object": "section", None: "section", "string": "text"}.get(kind, str(kind))


def _bounds(node: dict[str, Any]) -> Iterator[str]:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    for name, sign in signs.items():
        if name in node and node[name] < 2**31 - 1:
            yield f"{sign} {node[name]:g}"
