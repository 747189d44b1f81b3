"""The base class of every configuration model in this package; the patterns that select names in a
configuration; and its YAML.

A pattern is a name, or the end of one after a dot, with * for any characters, including dots. A
pattern that matches nothing is an error, since it would silently have no effect.

YAML is read by its core schema of version 1.2:

    null      ~  null, or nothing
    boolean   true  false
    number    7  -3  0x1F  0o17  .5  6e-4  1.0e-3  .inf  .nan
    string    anything else, such as 12e4b9  2001-01-01  12:30  yes  1_000, and quoted text

Keys are strings, exactly as written, and appear once. Not allowed are merge keys (`<<`), several
documents per file, and characters that control a terminal or end a path.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Union

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema
from yaml.nodes import MappingNode, Node, ScalarNode

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LARGEST_WHOLE_NUMBER = 2**63 - 1
LARGEST, SMALLEST = 1e30, 1e-30
"""Bounds of a number's magnitude: products of a few such numbers are finite in fp32."""


def whole_number_or(least: int, *others: object) -> BeforeValidator:
    """Annotates a union of whole numbers and a few other values, for one error in one line, where
    pydantic lists those of all members.

    Args:
        least: The smallest number.
        others: The other values, which YAML can write.
    """
    allowed = [f"{least} or more", *("null" if each is None else str(each) for each in others)]

    def check(value: object) -> object:
        if value not in others and (type(value) is not int or value < least):
            raise ValueError(f"{', '.join(allowed[:-1])} or {allowed[-1]}")
        return value

    return BeforeValidator(check)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a tree to dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def divisors(number: int) -> list[int]:
    """Lists all divisors of a number, in order.

    Args:
        number: At least 1.
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def nearest_two(numbers: Iterable[int], wanted: int) -> str:
    """Lists the two of some numbers that are nearest to another, for an error."""
    near = sorted(numbers, key=lambda number: abs(number - wanted))[:2]
    return ", ".join(map(str, sorted(near)))


class SectionError(ValueError):
    """Values of a section that contradict one another or the model.

    A section does not know its own key in the configuration; `within` adds it.

    Args:
        message: The error, with an @ before each key of the section.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("@", ""))
        self._message = message

    def within(self, section: str) -> str:
        """Returns the message with full keys.

        Args:
            section: The dotted key of the section.
        """
        return self._message.replace("@", f"{section}.")


@dataclass(frozen=True)
class NameIn:
    """Annotates a string that has to be a name in a registry, to which plugins may add."""

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks the name; the error is that of a `Literal` of all names."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: object) -> JsonSchemaValue:
        """Lists the names."""
        return {"type": "string", "enum": list(self.registry)}

    def _checked(self, name: str) -> str:
        *names, last = map(repr, self.registry)
        if repr(name) not in (*names, last):
            expected = f"{', '.join(names)} or {last}" if names else last
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": expected}
            )
        return name


@dataclass(frozen=True)
class SectionIn:
    """Annotates a section whose `kind` names its class in a registry, to which plugins may add."""

    registry: Callable[[], "Mapping[str, type[Config]]"]
    """Returns the classes by kind; called when a section is checked."""
    default: str
    """The kind of a section without one."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks a section by its class; errors are those of a union by `kind`."""
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Lists the classes."""
        kinds = tuple(self.registry().values())
        union: Any = Annotated[Union[kinds], Field(discriminator="kind")]  # noqa: UP007  # of a tuple
        description: JsonSchemaValue = handler(TypeAdapter(union).core_schema)
        return description

    def _checked(self, value: object) -> "Config":
        classes = self.registry()
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        kind = value.get("kind", self.default)
        if not isinstance(kind, str) or kind not in classes:
            context = {"discriminator": "'kind'", "tag": str(kind)}
            expected = ", ".join(map(repr, classes))
            raise PydanticKnownError("union_tag_invalid", context | {"expected_tags": expected})
        return classes[kind].model_validate({"kind": kind} | value)


class Config(BaseModel):
    """Keyword-only, frozen, validated; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def changed(self, *keys: str) -> dict[str, Any]:
        """Returns the values of those of some keys that are not at their default."""
        fields = type(self).model_fields
        return {
            key: getattr(self, key) for key in keys if getattr(self, key) != fields[key].default
        }

    @field_validator("*")
    @classmethod
    def _number_can_be_computed_with(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
            raise ValueError(f"Input should be at most {LARGEST_WHOLE_NUMBER}")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"Input should be from {SMALLEST:g} to {LARGEST:g} in magnitude")
        return value


class PatternError(ValueError):
    """A pattern that matches nothing: a one-line error that suggests similar names."""

    exit_status = 2


def matched(key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns the names that match any of the patterns, in their order.

    Args:
        key: The key of the patterns, for errors.
        patterns: Names or ends of names, with * for any characters.
        names: All names.

    Raises:
        PatternError: A pattern matches no name.
    """
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        some = {name for name in names if matches(pattern, name)}
        if not some:
            raise PatternError(f"{key}: {pattern!r} matches nothing; {_near(pattern, names)}")
        chosen |= some
    return [name for name in names if name in chosen]


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern matches a whole name, or the end of one after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _near(pattern: str, names: list[str]) -> str:
    endings = without_blocks(names)
    close = get_close_matches(pattern.replace("*", "N"), endings, 3, 0.4)
    if close:
        return f"the nearest are {', '.join(close)}"
    more = f" and {len(endings) - 8} more" if len(endings) > 8 else ""
    return f"there are {', '.join(endings[:8])}{more}" if endings else "there are none"


def without_blocks(names: Iterable[str]) -> list[str]:
    """Returns the names without block numbers, without duplicates.

    Args:
        names: Names of parameters or layers.
    """
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+(\.|$)", "", name) for name in names))


NUMBER = re.compile(
    r"([-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|0o[0-7]+|0x[\da-fA-F]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z",
    re.ASCII,
)
RENAMED = {
    "combine": {"renormalized": "auto", "normalized": "sum_to_one", "softmax": "scores"},
}
"""By key, values that were called otherwise when a run was made, and their names now."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ConfigYamlError(ValueError):
    """Text that is not valid YAML or not allowed here: a one-line error with its position."""

    exit_status = 2


def load_yaml(text: str) -> Any:
    """Reads one document.

    Args:
        text: The text of a file, or of one value.

    Returns:
        Dictionaries with strings as keys, lists, strings, numbers, booleans and None.

    Raises:
        ConfigYamlError: The text is not valid YAML, or not allowed here.
    """
    try:
        return _copied(yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigYamlError(f"{where}is not YAML: {reason}") from None
    except RecursionError:
        raise ConfigYamlError("is nested too deeply, or an alias refers to itself") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a character, escape or directive
        if isinstance(error, ConfigYamlError):
            raise
        raise ConfigYamlError(f"is not YAML: {' '.join(str(error).split())}") from None


def with_new_names(tree: Any) -> Any:
    """Returns the configuration of an older run with the values of `RENAMED` as they are called
    now."""
    if isinstance(tree, list):
        return [with_new_names(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: RENAMED[key].get(value, value) if key in RENAMED else with_new_names(value)
        for key, value in tree.items()
    }


def dump_yaml(tree: Any) -> str:
    """Writes values so that `load_yaml`, and readers of YAML 1.1, read back the same values.

    Args:
        tree: A value as returned by `load_yaml`.
    """
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings that are strings in YAML 1.1 but numbers in 1.2, such as 1e5."""


class _Loader(yaml.SafeLoader):
    """Resolves what YAML 1.2 does, and refuses a key that appears twice."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys as written; YAML would take the last of equal ones."""
        tree: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.value in ("", "<<"):
                raise _refused(key, "a key must be a string, not empty, a list, a mapping or <<")
            if key.value in tree:
                raise _refused(key, f"key {key.value!r} appears twice")
            tree[key.value] = self.construct_object(value, deep=True)
        return tree

    def construct_scalar(self, node: ScalarNode | MappingNode) -> str:
        """A text that can be printed and can name a file."""
        # JSON writes characters beyond 16 bits as surrogates.
        text: str = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        if control := _CONTROL.search(text):
            raise _refused(node, f"control character {control[0]!r} in a string is not allowed")
        return text

    def construct_number(self, node: ScalarNode) -> int | float:
        """A number of YAML 1.2, in which 0012 is 12."""
        text = node.value
        if text[:2] in {"0o", "0x"}:
            return int(text, 0)
        if text[-3:].lower() in {"inf", "nan"}:
            return float(text.replace(".", ""))
        return int(text) if text.lstrip("+-").isdecimal() else float(text)


_Loader.yaml_implicit_resolvers = {}  # those of YAML 1.1
_TAG = "tag:yaml.org,2002:"
_WORDS = {"null": r"~|null|Null|NULL|", "bool": "true|True|TRUE|false|False|FALSE"}
_Dumper.add_implicit_resolver(f"{_TAG}float", NUMBER, list("-+.0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", NUMBER, list("-+.0123456789"))
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_number)
for _name, _pattern in _WORDS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"({_pattern})\Z"), None)


def _copied(tree: Any) -> Any:
    """A tree in which an alias is a copy, so that a change of one place leaves the other."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _refused(place: Node, reason: str) -> ConfigYamlError:
    return ConfigYamlError(f"line {place.start_mark.line + 1}: {reason}")
