"""The YAML of configurations: the core schema of YAML 1.2.

    null      ~  null, or nothing
    boolean   true  false
    number    7  -3  0x1F  0o17  .5  6e-4  1.0e-3  .inf  .nan
    string    anything else, such as 12e4b9  2001-01-01  12:30  yes  1_000, and quoted text

Keys are strings, exactly as written, and appear once. Not allowed are merge keys (`<<`), several
documents per file, and characters that control a terminal or end a path.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

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


def load(text: str) -> Any:
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


def dump(tree: Any) -> str:
    """Writes values so that `load`, and readers of YAML 1.1, read back the same values.

    Args:
        tree: A value as returned by `load`.
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
