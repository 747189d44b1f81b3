"""Configurations as text: files, overrides, known keys, their schema, and one-line errors.

An error names the key, its value and what is allowed.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from polyad.model.config import Config, ConfigYamlError, SectionError, SectionIn, load_yaml
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
        return load_yaml(text)
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


def describe(error: ValidationError, tree: type[BaseModel]) -> str:
    """Describes all errors in one line, the first few in full.

    Args:
        error: the error from pydantic.
        tree: the configuration class with the known keys.
    """
    known = set(keys(tree))
    faults = error.errors(include_url=False)
    lines = [*dict.fromkeys(shortened(_fault(fault, known), MOST) for fault in faults)]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


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
