"""The definition of a family of another library's models: the form of the tables in this folder.

"Ours" are names and values of Polyad, "theirs" those of the other library."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.config import flatten
from polyad.model.decoder import DecoderConfig, DecoderSettings
from polyad.model.families.keys import (
    Key,
    Tree,
    WeightsError,
    as_the_library_reads,
    implied,
    nested,
)
from polyad.model.families.tensors import Piece, Rule, Shape
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.vision import ImageModelSettings

CONFIG_FILE = "config.json"
OUR_NAMES = "use `--to safetensors` to write the weights under Polyad's names"
"""The end of errors about models that other libraries have not."""
FREE = frozenset({
    "head", "dropout", "recompute", "compile", "initializer_range", "end_of_text_id",
})  # fmt: skip
"""Our keys that may differ from a folder's in every family."""
FREE_OF_EXPERTS = frozenset({
    "graph", "similarity", "tau", "sigma", "attention_head", "head_mean",
    "balancing_rate", "capacity_factor", "evaluation_capacity_factor", "expert_dropout",
    "router_noise", "scale_residual_init", "final_top_k", "pool",
    "pool_least", "pool_most",
})  # fmt: skip
"""Keys of sparse experts that may differ: they affect routing, but no weights."""

ROUTING = frozenset({
    "graph", "attention_head", "capacity_factor", "evaluation_capacity_factor", "final_top_k",
})  # fmt: skip
"""The keys among these that also affect the output of a trained model."""
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_NONE = re.compile(r"(?!)")
"""Matches nothing."""
FP32_TEXT = {"dtype": "float32", "use_cache": True}
"""The last keys of every text model that is written."""
_ALWAYS = implied(pruned_heads={})
"""Options of every transformers family of which only one value is supported."""

ShapeOf: TypeAlias = Callable[[str], Shape | None]
"""The shape of a folder's tensor by its plain name; None if it does not exist."""
Rules: TypeAlias = Mapping[str, str | Rule]
"""Rules by our names of modules and single parameters; a string is the library's module name."""


class Known(NamedTuple):
    """What their config.json contains beyond our configuration."""

    class_names: list[str] | None = None
    """The class names; None if unknown."""
    end_of_text_id: int | None = None
    """The token that ends a document; None if there is none, or no tokenizer is known."""
    pad_id: int | None = None
    """The padding token; None if there is none or it is unknown."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of another library: its names and its configuration.

    Plain names are written without the prefix, in the form of newer versions.
    """

    title: str
    """A name for error messages."""
    config: type[ModelSettings]
    """The configuration class of our model."""
    model_types: tuple[str, ...]
    """The values of `model_type` in config.json that belong to this family."""

    outside: Rules
    """Rules for parameters outside of blocks."""
    block: str
    """Prefix of the names in a block, with {} for its number."""
    inside: Rules
    """Rules for parameters in a block."""
    prefix: str = ""
    """Prefix of the names in the files of some of its classes."""
    without_prefix: re.Pattern[str] = _NONE
    """Plain names that have no prefix in any class."""
    has_prefix: Callable[[Any], bool] = lambda config: True
    """Returns whether the class that a model is written as has the prefix."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Maps ends of names in older files to the newer ones."""
    ignored: re.Pattern[str] = _NONE
    """Plain names of tensors that files may contain and no model here has."""
    mentioned: tuple[str, ...] = ()
    """Prefixes of ignored names that are reported to the user."""
    copies: Callable[[Any], dict[str, str]] = lambda config: {}
    """Additional tensors that files may contain, each with the one that it must equal."""
    always_has_bias: bool = False
    """Whether their model has biases even if ours has none."""
    may_lack_head: bool = False
    """Whether files may come from a model without a head; a new head then starts from the seed."""

    keys: tuple[Key, ...] = ()
    """The keys, in the order in which they are written."""
    known_keys: frozenset[str] | None = None
    """Keys without effect: a folder with a key that is neither here nor in `keys` is refused,
    unless the key is null, false or empty. None: other keys are ignored."""
    other_form: Rules = field(default_factory=dict)
    """Alternative rules for parameters in a block, which replace those of the same names; see
    `for_names`."""
    quantized: str | None = None
    """The `quant_method` that its files may have; None if they may have none."""
    extra_blocks: bool = False
    """Whether files may have blocks after the last one, for predicting further tokens."""
    section: Callable[[Tree], Tree] = lambda tree: tree
    """Returns the part of config.json that contains the keys."""
    further: Callable[[Tree, ShapeOf], dict[str, Any]] = lambda tree, shape_of: {}
    """Returns values of ours that follow from tensors, or from no single key."""
    free: Callable[[Any], frozenset[str]] = lambda config: FREE
    """Returns our keys that only matter in training, or select the head, which may be new."""
    architecture: Callable[[Any], str | None] = lambda config: None
    """Returns the class that a model is written as; None if none is written."""
    written: Callable[[Any, Known], dict[str, Any]] = lambda config, known: {}
    """Returns the keys that are written after `keys`."""

    def is_of(self, tree: Tree) -> bool:
        """Returns whether a config.json belongs to this family."""
        return tree.get("model_type") in self.model_types

    def plain_name(self, stored: str) -> str:
        """Returns the plain name of a tensor in a file."""
        name = stored.removeprefix(self.prefix)
        for older, newer in self.older.items():
            if name.endswith(older):
                return name.removesuffix(older) + newer
        return name

    def stored_name(self, plain: str, config: ModelSettings) -> str:
        """Returns the name to write to a file.

        Args:
            plain: The plain name.
            config: The configuration of our model.
        """
        bare = self.without_prefix.fullmatch(plain) or not self.has_prefix(config)
        return plain if bare else self.prefix + plain

    def find(self, name: str) -> Rule | None:
        """Returns the rule for our parameter, by full name; None if they have no such parameter."""
        rules, before = self.outside, ""
        if inside := _BLOCK.fullmatch(name):
            rules, before, name = self.inside, self.block.format(inside[1]), inside[2]
        owner, _, kind = name.rpartition(".")
        rule, after = _rule(rules, name), ""
        if rule is None:
            rule, after = _rule(rules, owner), f".{kind}"
        if rule is None:
            return None
        return replace(rule, names=tuple(f"{before}{each}{after}" for each in rule.names))

    def pieces(self, name: str, shape: Shape) -> Iterator[Piece]:
        """Yields the places of our parameter in the files.

        Args:
            name: Our name.
            shape: Our shape.

        Raises:
            WeightsError: They have no such parameter.
        """
        rule = self.find(name)
        if rule is None:
            raise WeightsError(f"{name}: {self.title} has no such parameter")
        return rule.pieces(shape)

    def parameter_shapes(self, config: ModelSettings) -> dict[str, Shape]:
        """Returns our names and shapes of the parameters that their model has, in our order."""
        if self.always_has_bias:
            config = config.model_copy(update={"bias": True})
        model = build_model(config)
        buffers = ((name, each) for name, each in model.named_buffers() if self.find(name))
        named = [*model.named_parameters(), *buffers]
        return {name: tuple(each.shape) for name, each in named}

    def read_config(self, tree: Tree, shape_of: ShapeOf, origin: str) -> ModelSettings:
        """Reads the configuration of a folder.

        Args:
            tree: The content of config.json.
            shape_of: The shapes of its tensors, by name.
            origin: How to refer to config.json in errors.

        Returns:
            Our configuration, complete.

        Raises:
            WeightsError: It needs something that is not supported here.
        """
        try:
            section = self.section(tree)
            self._refuse_quantized(section)
            self._refuse_unknown(section)
            section = as_the_library_reads(section, self.model_types[-1])
            values: dict[str, Any] = {}
            for key in (*self.keys, _ALWAYS):
                values |= key.read(section)
            return self.config.model_validate(nested(values | self.further(tree, shape_of)))
        except ValidationError as error:
            raise WeightsError(f"{origin}: {self._in_their_names(error)}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            raise WeightsError(f"{origin}: {error}") from None

    def write_config(self, config: ModelSettings, known: Known) -> dict[str, Any]:
        """Writes a configuration.

        Args:
            config: Our configuration, complete.
            known: Further information on the model.

        Returns:
            The content of config.json; every key that affects the computation is written.

        Raises:
            WeightsError: They have no equivalent of the model.
        """
        assert config.left_to_data() is None
        if isinstance(config, DecoderConfig):
            config = config.filled()
        tree = {"architectures": [self.architecture(config)], "model_type": self.model_types[0]}
        try:
            for key in self.keys:
                tree |= key.write(config)
        except AttributeError:  # a section of another kind
            kind = config.known_feed_forward().kind
            raise WeightsError(f"{self.title} has no model.feed_forward.kind: {kind!r}") from None
        return tree | self.written(config, known)

    def differences(self, config: ModelSettings) -> list[str]:
        """Returns what the model would be that is written, where it is not ours.

        Raises:
            WeightsError: It cannot be written at all.
        """
        again = self.read_config(self.write_config(config, Known()), lambda name: None, CONFIG_FILE)
        free = self.free(config) | ({"bias"} if self.always_has_bias else set())
        if isinstance(config, DecoderSettings | ImageModelSettings):
            free -= {"head"}
        ours, theirs = (comparable(each, free, is_written=True) for each in (config, again))
        return [
            f"{self.title} has {key}: {theirs.get(key)!r} in place of {ours.get(key)!r}"
            for key in ours | theirs
            if theirs.get(key) != ours.get(key)
        ]

    def for_names(self, names: Collection[str]) -> "Family":
        """Returns the family in the form used by a folder.

        Args:
            names: Plain names of all tensors.
        """
        rule = self.other_form.get("feed_forward.experts.gate")
        if isinstance(rule, Rule) and any(name.endswith(rule.names[0]) for name in names):
            return self.in_memory()
        return self

    def in_memory(self) -> "Family":
        """Returns the family with the names of the model in memory, where experts are stacked."""
        return replace(self, inside={**self.inside, **self.other_form})

    def _refuse_quantized(self, section: Tree) -> None:
        about = section.get("quantization_config")
        method = about.get("quant_method") if isinstance(about, dict) else about
        if about and (method is None or method != self.quantized):
            allowed = "it has to be absent" if self.quantized is None else f"{self.quantized!r} is"
            value = about if method is None else method
            raise WeightsError(f"quantization_config: {value!r:.60} is not supported; {allowed}")

    def _refuse_unknown(self, section: Tree) -> None:
        if self.known_keys is None:
            return
        names = set(self.known_keys)
        for key in self.keys:
            names |= {*key.names.values(), *key.reads}
        for name, value in section.items():
            if name not in names and value not in (None, False, [], {}):
                raise WeightsError(
                    f"{name}: {value!r:.60} is not supported, and might change what the model "
                    "computes"
                )

    def _in_their_names(self, error: ValidationError) -> str:
        """Describes the first error in a configuration that was read from their keys."""
        first = error.errors()[0]
        names = {ours: theirs for key in self.keys for ours, theirs in key.names.items()}
        reason = first["msg"].removeprefix("Value error, ")
        reason = re.sub(r"\bmodel\.(\w+)", lambda key: names.get(key[1], key[0]), reason)
        ours = ".".join(map(str, first["loc"]))
        return f"{names.get(ours, ours)}: {first['input']!r:.60}: {reason}" if ours else reason


def _rule(rules: Rules, name: str) -> Rule | None:
    rule = rules.get(name)
    return Rule((rule,), of_module=True) if isinstance(rule, str) else rule


def comparable(
    config: ModelSettings, free: Collection[str] = FREE, *, is_written: bool = False
) -> dict[str, Any]:
    """Returns the keys that determine a model's weights and what they compute, by full name.

    Args:
        config: Any configuration.
        free: Keys to leave out.
        is_written: Whether to include everything that affects a token's experts.
    """
    config, free = config.filled(), set(free)
    if isinstance(config, DecoderConfig) and config.rotary is not None:
        free.add("sequence_length")  # positions are unbounded: it only matters in training
    values = flatten({"model": config.model_dump(exclude=free)})
    for key, each in config.feed_forwards().items():
        if isinstance(each, DenseFeedForwardConfig):  # null means four times the width
            values[f"{key}.hidden_size"] = each.inner_size(config.hidden_size)
        if isinstance(each, SparseMoEConfig):
            values[f"{key}.selection_bias"] = bool(each.balancing_rate or each.selection_bias)
            for unused in FREE_OF_EXPERTS - (ROUTING if is_written else frozenset()):
                del values[f"{key}.{unused}"]
    return values


def computes_the_same(config: DecoderConfig, other: DecoderConfig) -> bool:
    """Returns whether two configurations with the same weights are the same language model."""
    one, two = (comparable(each, FREE - {"head"}, is_written=True) for each in (config, other))
    return one == two and config.head is None


def label_keys(names: list[str] | None, count: int) -> dict[str, Any]:
    """Returns the class names in transformers' form; without names they are numbered."""
    names = names or [f"LABEL_{number}" for number in range(count)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
