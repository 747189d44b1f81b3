"""A configuration as people write it, and its faults in words."""

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from train.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 6e-4 is a number, and a key stands once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value` in a tree, in place.

    Raises:
        ConfigError: it is no such thing.
    """
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(f"{override!r}: overrides are written key=value, as in train.steps=100")
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if inner is None:
            inner = tree[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {section} is a value and has no keys below it")
        tree = inner
    tree[last] = parse_yaml(value, override)


def parse_yaml(text: str, origin: str) -> Any:
    """Reads YAML as people write it.

    Args:
        text: of a file, or of one value.
        origin: what it is called in an error.

    Raises:
        ConfigError: it is not YAML, or a key stands twice.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{origin}: is nested too deeply") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{origin}: is not YAML: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def describe(error: ValidationError, tree: type[BaseModel]) -> str:
    """All faults in one line, the first few in full.

    Args:
        error: what pydantic found.
        tree: the configuration class whose keys are known.
    """
    known = set(keys(tree))
    faults = [_fault(fault, known) for fault in error.errors(include_url=False)]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more


def _fault(fault: Any, known: set[str]) -> str:
    # A union puts the member's kind into the location: model.feed_forward.dense.hidden_size.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    message: str = fault["msg"].removeprefix("Value error, ")
    if not parts:
        return message  # a rule of the whole tree names its keys itself
    *sections, last = parts
    without_kind = [sections[:i] + sections[i + 1 :] for i in range(len(sections))]
    candidates = [s for s in (sections, *without_kind) if not s or _without_index(s) in known]
    key = ".".join([*(candidates[0] if candidates else sections), last])
    if kind == "extra_forbidden" and key in known:  # of another member of the union
        section, chosen = ".".join(sections[:-1]), sections[-1]
        return f"{key}: is not a key of {section}.kind: {chosen}, but of another kind"
    if kind == "extra_forbidden":
        section = _without_index(key.split(".")[:-1])
        siblings = [k for k in known if k.rpartition(".")[0] == section]
        close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
        close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if close:
            return f"unknown key {key}; the nearest is {close[0]}"
        return f"unknown key {key}; there are {', '.join(sorted(siblings))}"
    if kind == "union_tag_invalid":
        chooser = fault["ctx"]["discriminator"].strip("'")
        tag = fault["ctx"]["tag"]
        *others, other = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        allowed = " or ".join([", ".join(others), other] if others else [other])
        return f"{key}.{chooser}: {tag!r} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key}: {fault['input']!r} is not allowed: a section of keys is needed"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the rule names its keys itself
    return f"{key}: {fault['input']!r} is not allowed: {message[0].lower()}{message[1:]}"


def _without_index(sections: list[str]) -> str:
    """The dotted key, without the place in a list: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())


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
