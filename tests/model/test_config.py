"""The YAML of configurations: what is read as what, and what is refused in one line."""

import json
import math

import pytest
import yaml

from polyad.model.config import ConfigYamlError, dump_yaml, load_yaml
from tests.helpers.refusals import line_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("# nothing", None),
        ("true", True), ("False", False), ("TRUE", True),
        ("7", 7), ("-3", -3), ("+3", 3), ("0012", 12), ("0x1F", 31), ("0o17", 15),
        ("6e-4", 6e-4), ("1.0e-3", 1e-3), (".5", 0.5), ("5.", 5.0), ("-1E+3", -1000.0),
        (".inf", math.inf), ("-.Inf", -math.inf),
        # Text, though YAML 1.1 or a resolver without ends takes it for something else.
        *((text, text) for text in (
            "12e4b9", "2e4data", "1e-3; rm", "2001-99-99", "2001-01-01", "0x_", "0o8", "1_000",
            "yes", "no", "on", "Off", "y", "12:30:45", "190:20", "=", "<<", "1e", "e5", ".", "-x",
            "+", "1.2.3", "٣", "0b11", "nan", "inf", "~x", "nulls",
        )),
        ('"7"', "7"), ("'true'", "true"), ('""', ""),
        ("[1, a, null]", [1, "a", None]), ("{a: 1}", {"a": 1}),
        ("1: x", {"1": "x"}), ("null: x", {"null": "x"}), ("012: x", {"012": "x"}),
        ("\ufeffa: 1", {"a": 1}),
        ("a: &x [1, 2]\nb: *x", {"a": [1, 2], "b": [1, 2]}),
        ('"\\ud83d\\ude42"', "🙂"),  # as JSON writes it
    ],
)  # fmt: skip
def test_what_is_read(text, value):
    found = load_yaml(text)
    assert found == value
    assert type(found) is type(value)


def test_aliases_are_copies():
    tree = load_yaml("a: &x {k: [1]}\nb: *x")
    tree["a"]["k"].append(2)
    assert tree["b"] == {"k": [1]}


REFUSED = {
    "!!python/object/apply:os.system [true]": "could not determine a constructor",
    "a: 1\nb: !x 1": "line 2: is not YAML: could not determine a constructor",
    "a: 1\n---\nb: 2": "another document",
    "a: 1\na: 2": "line 2: key 'a' appears twice",
    "? [a]\n: b": "a key must be a string",
    ": x": "not YAML",
    "a: {<<: {b: 1}}": "a key must be a string",
    "a: &x [*x]": "recursive node",
    "\ta: 1": "cannot start any token",
    "a: \0": "#x0000",
    "a: 1\nb: \ud800": "#xd800",
    'a: "b\\0"': "control character '\\x00'",
    "a: |\n  b\n": "control character '\\n'",
    '"\\ud800"': "unexpected end of data",
    "%YAML 3.0\n--- a": "not YAML",
    "9" * 5000: "digits",
    "a: [": "not YAML",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:20]))
def test_what_is_refused_is_refused_in_one_line(text):
    line = line_of(ConfigYamlError, load_yaml, text)
    assert REFUSED[text] in line
    assert len(line) < 300


TEXTS = ["1e5", "12e4b9", "0012", "0o17", "0x1F", "yes", "null", "2001-01-01", "12:30", "", " a ",
         "#", "a: b", "🙂", "9" * 200, "~", "1_000", "-", "é\u2028", "true"]  # fmt: skip


def test_what_is_written_reads_as_the_same_here_and_in_yaml_1_1():
    tree = {"texts": TEXTS, "numbers": [1, -2, 6e-4, 1e-5, 1e30, 0.1, 1.0], "others": [None, True]}
    assert load_yaml(dump_yaml(tree)) == tree
    assert yaml.safe_load(dump_yaml(tree)) == tree


def test_json_is_read():
    tree = {"a": [1, 2.5, None, True, "x\u00e9🙂", {"b": {}}], "c": 1e-7}
    assert load_yaml(json.dumps(tree)) == tree
