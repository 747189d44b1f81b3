"""Configurations as text: files, overrides, known keys, their schema and reference, and one-line
errors.

An error names the key, its value and what is allowed.
"""

import difflib
import functools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from polyad.model.config import Config, ConfigYamlError, SectionError, load_yaml
from polyad.train.errors import ConfigError, one_line, shortened, shown, some_of

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
        return load_yaml(text)
    except ConfigYamlError as error:
        raise ConfigError(f"{origin}: {one_line(error)}") from None


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


MOST = 450
"""Maximum length of one error about a configuration, without the file name."""
SHOWN = 3
"""Number of errors of a file that are shown."""
NEAR, NEAR_ELSEWHERE = 0.75, 0.8
"""Minimum similarity of two names in one section, or in several, to suggest one for the other (as
in `difflib`); `lr` and `tf32` do not reach it."""

GONE: dict[str, str] = {
    "data.max_damaged": "replacing damaged images; delete the file that the error names",
    "data.verify": "the background check of data; use `polyad data verify`",
    "monitor.stall_minutes": "the watchdog; parallel.timeout_minutes ends a run that stalls",
    "monitor.stragglers": "the search for slow processes",
    "monitor.max_rewinds": "rewinding; use `monitor.spike_action: skip`",
    "parallel.expert_overlap": "the overlap of experts with their exchange; leave it out",
    "expert_keys": "attentive scores of sparse experts; use `score: linear`",
    "softmax_share": "gates that begin as softmax; gate: softmax or entmax15 is for the whole run",
    **dict.fromkeys(
        ("model.expert.kind", "model.gate_network.kind"),
        "ViTs and Mixers as experts of a mixture; leave it out, each expert is a small network",
    ),
    **dict.fromkeys(
        ("allow_leak", "causal_graph"),
        "runs that see later tokens; language models are causal, and other models were never asked",
    ),
    "model.output": "mixtures of logits; leave it out, probabilities are mixed",
    "model.feed_forward.experts": "other ways to compute experts; leave it out",
    "capacity_order": "priority; a capacity keeps the first tokens",
    "graph_from": "graphs that start late; a graph is on from the first step",
    "input_jitter": "noise on experts' inputs; use `router_noise`",
    "lower_entropy_only": "graphs of decided tokens alone; a graph has all tokens up to this one",
    **dict.fromkeys(
        ("loss.erc", "loss.erc_alpha", "loss.erc_noise", "loss.orthogonality", "loss.variance"),
        "the losses on what experts compute; use loss.load_balance, importance or router_z",
    ),
    "study.question": "the page of a study; write a comment",
    "study.not_shown": "the page of a study; write a comment",
    "study.data": "preparing by a study; set data.path under common and run `polyad prepare`",
    "study.from_runs": "its names; write FOLDER/runs/VARIANT/seed-{seed} as the variant's value",
    "study.attack": "measures of a study; use `polyad evaluate RUN --attack`",
    "study.leak": "measures of a study",
    "study.knockout": "measures of a study; use `polyad experts atlas RUN`",
    "study.specialization": "measures of a study; use `polyad experts specialize RUN`",
    "study.measures": "measures of a study; use `polyad experts splice RUN`",
}
"""By dotted key or its last part: what it went with, and what to use instead, as in "rewinding; use
`skip`". Keys of a study's file begin with `study.`"""


def describe(error: ValidationError, tree: type[Config]) -> str:
    """Describes all errors in one line, the first few in full.

    Args:
        error: the error from pydantic.
        tree: the configuration class with the known keys.
    """
    known = keys(tree)
    faults = error.errors(include_url=False)
    lines = [*dict.fromkeys(shortened(_fault(fault, known), MOST) for fault in faults)]
    return some_of(lines, SHOWN, "; ")


def _fault(fault: Any, known: set[str]) -> str:
    # Unions add the kind of the member to the location: data.text.path.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    # Messages of validators may contain values.
    message = one_line(fault["msg"].removeprefix("Value error, "))
    if not parts:
        return message  # validators of the whole tree name keys themselves
    broken = fault.get("ctx", {}).get("error")
    if isinstance(broken, SectionError):  # a validator of several keys in a section
        return one_line(broken.within(".".join(_without_kind(parts, known))))
    *sections, last = parts
    key = ".".join([*_without_kind(sections, known), last])
    if kind == "extra_forbidden":
        if key in known and len(parts) > 1:
            return f"{key}: is a key of another kind than {parts[-2]}"
        return _unknown(key, known)
    key = shortened(key)
    if kind == "union_tag_invalid":
        tag, allowed = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.kind: {shown(tag)} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the validator names its keys itself
    allowed = f"{message[0].lower()}{message[1:]}"
    return f"{key}: {shown(fault['input'])} is not allowed: {allowed}"


def _without_kind(sections: list[str], known: set[str]) -> list[str]:
    """The sections of a location, without the kinds that unions add."""
    kept: list[str] = []
    for section in sections:
        above = _without_index(kept)
        is_leaf = above in known and not any(key.startswith(f"{above}.") for key in known)
        # Below a leaf are names from the file, such as a study's variants.
        if is_leaf or section.isdigit() or _without_index([*kept, section]) in known:
            kept.append(section)
    return kept


def _unknown(key: str, known: set[str]) -> str:
    """The line about an unknown key."""
    *sections, last = key.split(".")
    section = _without_index(sections)
    name = f"{section}.{last}" if section else last
    gone = GONE.get(f"study.{name}") if "variants" in known else GONE.get(name) or GONE.get(last)
    if gone:
        return f"{key}: went with {gone}; see CHANGELOG"
    # Of equal names in several sections the outermost is meant.
    outermost = sorted(known, key=lambda key: -key.count("."))
    everywhere = {key.rpartition(".")[2]: key for key in outermost}
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    for names, cutoff in ((siblings, NEAR), (everywhere, NEAR_ELSEWHERE)):
        if close := difflib.get_close_matches(last.lower()[:100], names, n=1, cutoff=cutoff):
            return f"unknown key {shortened(key)}; the nearest is {names[close[0]]}"
    return f"unknown key {shortened(key)}; there are {shortened(', '.join(sorted(siblings)))}"


def _without_index(sections: list[str]) -> str:
    """The dotted key without a list index: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())


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


@functools.cache
def keys(kind: type[Config]) -> set[str]:
    """All dotted keys of a file, sections included."""
    dotted = set[str]()
    for section in sections(kind):
        for place in section.places:
            dotted |= {place, *(f"{place}.{key.name}".removeprefix(".") for key in section.keys)}
    return {key.replace("[]", "") for key in dotted if key}


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
