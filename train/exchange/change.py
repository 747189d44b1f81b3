"""What `polyad convert` can make of a model on its way: another kind of feed-forward."""

import re
from abc import ABC, abstractmethod
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from polyad.model.build import ModelSizeError, build_model, initial_value
from polyad.model.config import Config
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import (
    Activation,
    DenseFeedForward,
    DenseFeedForwardConfig,
    GatedActivation,
)
from polyad.model.settings import ModelSettings
from polyad.parallel.families import Origin
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.tensor_folder import differing_shapes
from polyad.parallel.weights import Weights
from polyad.train.config.faults import describe
from polyad.train.config.run import ModelSection, RunConfig
from polyad.train.config.text import apply_override, settle
from polyad.train.errors import ConfigError


class Change(ABC):
    """An option of `polyad convert` that makes another model."""

    name: str
    """The option, with dashes."""
    done: str
    """What is done, as the state of a checkpoint names it."""
    text: str = "true"
    """The value of the option."""

    def error(self, message: str) -> ConfigError:
        """An error about this option."""
        return ConfigError(f"{self.name}: {message}")

    def origin(self, origin: Origin) -> Origin | None:
        """What of another library's folder is written again with the other model; None: nothing."""
        return None

    @abstractmethod
    def of(self, weights: Weights) -> "Changed":
        """The weights of the other model.

        Raises:
            ConfigError: It cannot be made of these.
        """


class Tree(Config):
    """The place of `model` in a configuration, for errors that name whole keys."""

    model: ModelSection


class Option(Change):
    """An option whose value is keys: those of the new feed-forward, and some that say how.

    Args:
        name: of the option, with dashes.
        text: as in `num_experts=8,top_k=2,placement=[1,3],seed=2`; values in YAML.
        start: the class of the keys that say how, with `section`.
        feed_forward: the class of the feed-forward's.
        example: what an error proposes.

    Raises:
        ConfigError: it names no number of experts, or a key that is unknown or twice there. What
            the dense model decides is checked by `model_config`.
    """

    kind: str
    """The kind of the new feed-forward."""
    widths: tuple[str, ...] = ("hidden_size",)
    """Its keys that say the inner width; those that are not given get the dense one's."""
    start: Any
    """Keys that say how, with the section that is changed; None: a Mixer's channels, or the only
    one."""

    def __init__(
        self,
        name: str,
        text: str,
        start: type[Config],
        feed_forward: type[Config],
        example: str = "num_experts=8,top_k=2",
    ) -> None:
        self.name, self.text = name, text
        given, self.keys = dict[str, Any](), dict[str, Any]()
        known = [*start.model_fields, *(k for k in feed_forward.model_fields if k != "kind")]
        for part in re.split(r",(?![^\[]*\])", text):  # not at the commas of a list
            key, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign:
                raise self.error(f"{part.strip()!r} is not key=value, as in {example}")
            if key not in known:
                near = get_close_matches(key, known, 1)
                end = f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"
                raise self.error(f"unknown key {key!r}; {end}")
            section = given if key in start.model_fields else self.keys
            if key in section:
                raise self.error(f"{key} is given twice")
            try:
                apply_override(section, f"{key}={value}")
                section[key] = settle(section[key], None)
            except ConfigError as error:
                raise self.error(str(error)) from None
        if "num_experts" not in self.keys:
            raise self.error(f"num_experts is missing, as in {example}")
        try:
            self.start = start.model_validate(given)
        except ValidationError as error:
            raise self.error(describe(error, RunConfig)) from None

    def error(self, message: str) -> ConfigError:
        """An error about this value of the option."""
        return ConfigError(f"{self.name} {self.text}: {message}")

    def model_config(self, dense: ModelSettings, folder: Path) -> tuple[str, ModelSettings]:
        """The configuration of the other model.

        Args:
            dense: that of the dense one, complete.
            folder: where its weights are, for errors.

        Returns:
            The name of the feed-forward that is changed, and the configuration.

        Raises:
            ConfigError: that feed-forward is not dense, or the keys do not fit it.
        """
        section, inner = dense_section(self, dense, folder)
        keys = {"kind": self.kind} | self.keys_of(dense) | self.keys
        return section, with_inner_width(self, dense, section, keys, inner, folder)

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """Keys that the dense model decides, unless the option has them."""
        return {}


class Changed(ABC):
    """A model's weights with other feed-forwards: what both models have stays, and a subclass makes
    the rest, one at a time, when it is asked for.

    Args:
        weights: the first model's, of any format.
        change: makes the other model.
        config: of the other model.
        seed: of what begins as in a new run.

    Raises:
        ConfigError: the weights are not of their configuration, or the other model is too large.
    """

    def __init__(
        self, weights: Weights, change: Change, config: ModelSettings, seed: int = 0
    ) -> None:
        self._before = build_model(weights.model_config())
        expected = {name: tuple(p.shape) for name, p in self._before.named_parameters()}
        if differing := differing_shapes(weights.shapes(), expected):
            raise ConfigError(f"{weights.folder}: does not match its configuration: {differing}")
        self.folder = weights.folder
        self._weights, self._config, self._seed = weights, config, seed
        self._own_buffers = frozenset(name for name, _ in persistent_buffers(self._before))
        try:
            self._model = build_model(config)
        except ModelSizeError:
            raise change.error("asks for more elements than a tensor can have") from None
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def model_config(self) -> ModelSettings:
        """The configuration of the other model, complete."""
        return self._config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name."""
        return self._shapes

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight, fp32: the first model's own, or one that is made of its."""
        return self._weights.whole(name) if name in self._weights.shapes() else self.made(name)

    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer: the first model's own, as of a section that was changed earlier, or
        one that is made."""
        own = name in self._own_buffers
        return self._weights.buffer(name) if own else self.made_buffer(name)

    @abstractmethod
    def made(self, name: str) -> torch.Tensor:
        """A weight that the first model has not, fp32."""

    def made_buffer(self, name: str) -> torch.Tensor:
        """A buffer that the first model has not; as in a new run."""
        dtypes = {known: buffer.dtype for known, buffer in persistent_buffers(self._model)}
        return self.begun(name).to(dtypes[name])

    def begun(self, name: str) -> torch.Tensor:
        """The value of a parameter or buffer in a new run of the seed."""
        return initial_value(self._model, name, self._seed)

    @abstractmethod
    def notes(self) -> list[str]:
        """Whether it computes what the first model computed; asked for once all weights have been
        made."""


def refuse_replaced(weights: Weights, change: Change) -> None:
    """Refuses a model whose blocks have feed-forwards of several kinds by `model.replaced`.

    Raises:
        ConfigError: it is one.
    """
    config = weights.model_config()
    if isinstance(config, DecoderSettings) and config.replaced is not None:
        raise change.error(
            f"{weights.folder}: has model.replaced, which gives the blocks "
            f"{config.replaced_blocks()} another feed-forward; a model without it is needed"
        )


def dense_section(option: Option, model: ModelSettings, folder: Path) -> tuple[str, int]:
    """The feed-forward that is changed, which has to be dense.

    Returns:
        Its name, and its inner width.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    known = [key.removeprefix("model.") for key in model.feed_forwards()]
    if not known:
        raise option.error(f"{folder}: model.kind: {model.kind} has no feed-forward")
    given = option.start.section
    section = known[-1] if given is None else given
    if section not in known:
        raise option.error(
            f"section: {given!r} is not allowed: model.kind: {model.kind} has {' and '.join(known)}"
        )
    found = getattr(model, section)
    if not isinstance(found, DenseFeedForwardConfig):
        raise option.error(
            f"{folder}: model.{section}.kind: {found.kind!r} is not allowed: a dense model is "
            f"{option.done}"
        )
    layer = build_model(model).get_submodule(f"blocks.0.{section}")
    assert isinstance(layer, DenseFeedForward)
    return section, layer.up.out_features


def activation_of(model: ModelSettings) -> Activation | GatedActivation:
    """The activation of a model's dense feed-forwards.

    Args:
        model: of which GPT-2 has no choice.
    """
    found: Activation | GatedActivation = getattr(model, "activation", "gelu_tanh")
    return found


def with_feed_forward(
    option: Option, model: ModelSettings, section: str, keys: dict[str, Any]
) -> ModelSettings:
    """The configuration with another feed-forward.

    Raises:
        ConfigError: the keys are wrong, or do not fit the model.
    """
    tree = model.model_dump(mode="json") | {section: keys}
    try:
        return Tree.model_validate({"model": tree}).model
    except ValidationError as error:
        raise option.error(describe(error, RunConfig)) from None


def with_inner_width(
    option: Option,
    model: ModelSettings,
    section: str,
    keys: dict[str, Any],
    inner: int,
    folder: Path,
) -> ModelSettings:
    """The configuration with another feed-forward that is as wide inside as the dense one.

    Raises:
        ConfigError: the keys are wrong, do not fit the model, or say another width.
    """
    widths = option.widths
    given = {key: keys[key] for key in widths if keys.get(key) is not None}
    config = with_feed_forward(option, model, section, keys | dict.fromkeys(widths, inner) | given)
    for key in widths:
        if (found := getattr(getattr(config, section), key)) != inner:
            raise option.error(
                f"model.{section}.{key}: {found} does not fit: the dense weights of {folder} have "
                f"{inner} inner units, and the experts made from them need the same number"
            )
    return config
