"""Reference of all configuration keys from the JSON Schema, for `polyad keys` and the site."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
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

    def dotted(self, places: Iterable[str]) -> list[str]:
        """The full dotted key in each of several sections."""
        return [f"{place}.{self.name}" if place else self.name for place in places]


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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {"keys": [key._asdict() for key in self.keys]}


def sections(kind: type[Config]) -> list[Section]:
    """Lists all keys of a file, class by class, from the top down.

    Args:
        kind: The class of the file.
    """
    schema = schema_of(kind, "")
    places: dict[str, list[str]] = {}
    waiting = [("", "")]
    while waiting:
        place, name = waiting.pop(0)
        places.setdefault(name, []).append(place)
        inner = []
        for key, field in _node(schema, name)["properties"].items():
            dotted = (f"{place}.{key}" if place else key) + ("[]" if _is_list(field) else "")
            inner += [(dotted, each) for each in _references(field)]
        waiting = inner + waiting
    return [_section(schema, name, tuple(dict.fromkeys(found))) for name, found in places.items()]


def find_keys(found: Sequence[Section], wanted: str) -> list[Section]:
    """Finds the sections of a dotted key, and those below it.

    Args:
        found: All sections of a file.
        wanted: A section or a key, such as `train` or `train.steps`.

    Returns:
        The sections, each with the matching keys; empty if there are none.
    """
    result, wanted = [], wanted.replace("[]", "")
    for section in found:
        dotted = [place.replace("[]", "") for place in section.places]
        if any(below(place, [wanted]) for place in dotted):
            result.append(section)
            continue
        keys = [key for key in section.keys if wanted in key.dotted(dotted)]
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


def _node(schema: dict[str, Any], name: str) -> dict[str, Any]:
    node: dict[str, Any] = schema["$defs"][name] if name else schema
    return node


def _section(schema: dict[str, Any], name: str, places: tuple[str, ...]) -> Section:
    node = _node(schema, name)
    about = node.get("description", "").partition("\n\n")[0] if name else ""
    constant = node["properties"].get("kind", {}).get("const")
    required = node.get("required", ())
    keys = [
        _key(key, field, key in required, bool(list(_references(field))))
        for key, field in node["properties"].items()
        if "description" in field or not list(_references(field))
    ]
    return Section(places, constant, about, tuple(keys))


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


def _is_list(node: dict[str, Any]) -> bool:
    return any(each.get("type") == "array" for each in [node, *node.get("anyOf", ())])


def _key(name: str, field: dict[str, Any], required: bool, is_section: bool) -> Key:
    default = json.dumps(field.get("default")).strip('"')
    if required:
        default = "required"
    elif is_section and field.get("default") is not None:
        default = "see its keys"
    return Key(name, _type(field), default, field.get("description", ""))


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
