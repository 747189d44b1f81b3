"""The YAML of configurations: the core schema of YAML 1.2, parsed strictly.

    null      ~  null, or nothing
    boolean   true  false
    number    7  -3  0x1F  0o17  .5  6e-4  1.0e-3  .inf  .nan
    string    anything else, such as 12e4b9  2001-01-01  12:30  yes  1_000, and quoted text

Keys are strings, exactly as written, and appear once. Not allowed are tags (`!!int`), merge keys
(`<<`), several documents per file, and characters that control a terminal or end a path.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_DIGITS = 100
"""Maximum length of a number; longer ones are strings, which no numeric key accepts."""

NUMBER = re.compile(
    r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|0o[0-7]+|0x[\da-fA-F]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    re.ASCII,
)
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class ConfigYamlError(ValueError):
    """Text that is not valid YAML or not allowed here: a one-line error with its position."""

    exit_status = 2


@dataclass(frozen=True)
class Written:
    """A number or boolean with its text, which is used by keys that expect text, such as a path."""

    text: str
    value: int | float | bool


def load(text: str) -> Any:
    """Reads one document.

    Args:
        text: The text of a file, or of one value.

    Returns:
        Dictionaries with strings as keys, lists, strings, numbers, booleans and None.

    Raises:
        ConfigYamlError: The text is not valid YAML, or not allowed here.
    """
    return _values(load_written(text))


def load_written(text: str) -> Any:
    """Loads like `load`, but wraps each number and boolean in `Written`."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else _tree(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigYamlError(f"{where}is not YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigYamlError(
            f"line {line}: is not YAML: character {chr(error.character)!r} is not allowed"
        ) from None
    except RecursionError:
        raise ConfigYamlError("is nested too deeply, or an alias refers to itself") from None
    except (ValueError, OverflowError) as error:  # an escape or directive out of range
        if isinstance(error, ConfigYamlError):
            raise
        raise ConfigYamlError(f"is not YAML: {error}") from None


def dump(tree: Any) -> str:
    """Writes values so that `load`, and readers of YAML 1.1, read back the same values.

    Args:
        tree: A value as returned by `load`.
    """
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings that are strings in YAML 1.1 but numbers in 1.2, such as 1e5."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def _tree(node: Node) -> Any:
    if not node.tag.endswith((":str", ":seq", ":map")):
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise _refused(node, f"tags such as {tag!r} are not allowed")
    if isinstance(node, SequenceNode):
        return [_tree(inner) for inner in node.value]
    if isinstance(node, MappingNode):
        tree: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            if key in tree:
                raise _refused(key_node, f"key {key!r} appears twice")
            tree[key] = _tree(value_node)
        return tree
    assert isinstance(node, ScalarNode)
    if node.style is not None:
        return _text(node)
    if node.value in _WORDS:
        word = _WORDS[node.value]
        return None if word is None else Written(node.value, word)
    if len(node.value) <= MAX_DIGITS and NUMBER.fullmatch(node.value):
        return Written(node.value, _number(node.value))
    return _text(node)


def _key(node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise _refused(node, "a key must be a string, not a list or mapping")
    if node.value == "<<":
        raise _refused(node, "merge keys (<<) are not allowed: write the keys out")
    if not node.value:
        raise _refused(node, "a key is empty")
    return _text(node)


def _text(node: ScalarNode) -> str:
    text: str = node.value
    if _SURROGATE.search(text):  # JSON writes characters beyond 16 bits as surrogates
        try:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _refused(node, "half of a surrogate pair is not a character") from None
    if control := _CONTROL.search(text):
        raise _refused(node, f"control character {control[0]!r} in a string is not allowed")
    return text


def _number(text: str) -> int | float:
    if text[:2] in {"0o", "0x"}:
        return int(text, 0)
    if text[-3:].lower() in {"inf", "nan"}:
        return float(text.replace(".", ""))
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _values(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _values(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_values(value) for value in tree]
    return tree.value if isinstance(tree, Written) else tree


def _refused(place: Node, reason: str) -> ConfigYamlError:
    line = place.start_mark.line + 1 if place.start_mark else 1
    return ConfigYamlError(f"line {line}: {reason}")
