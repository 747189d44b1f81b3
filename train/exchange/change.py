"""Changes of a model by `polyad convert`: another kind of feed-forward."""

import re
from abc import ABC, abstractmethod
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from polyad.model.build import ModelSizeError, build_model, initial_value
from polyad.model.config import Config
from polyad.model.feedforward import (
    Activation,
    DenseFeedForward,
    DenseFeedForwardConfig,
    GatedActivation,
)
from polyad.model.settings import ModelSettings
from polyad.parallel.families import Origin
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.source import differing_shapes
from polyad.parallel.weights import Weights
from polyad.train.config.faults import describe
from polyad.train.config.run import ModelSection, RunConfig
from polyad.train.config.text import apply_override
from polyad.train.errors import ConfigError


class Change(ABC):
    """An option of `polyad convert` that makes another model."""

    name: str
    """The option, with dashes."""
    done: str
    """Name of the change in a checkpoint's state."""
    text: str = "true"
    """The value of the option."""

    def error(self, message: str) -> ConfigError:
        """An error about this option."""
        return ConfigError(f"{self.name}: {message}")

    def origin(self, origin: Origin) -> Origin | None:
        """The parts of another library's folder to write with the changed model; None: nothing."""
        return None

    @abstractmethod
    def of(self, weights: Weights) -> "Changed":
        """Returns the weights of the changed model.

        Raises:
            ConfigError: It cannot be made from these.
        """


class Tree(Config):
    """The place of `model` in a configuration, for errors that name whole keys."""

    model: ModelSection


class Option(Change):
    """An option with keys of the new feed-forward, and keys that control the change.

    Args:
        name: name of the option, with dashes.
        text: as in `num_experts=8,top_k=2,placement=[1,3],seed=2`; values in YAML.
        start: the class of the controlling keys, with `section`.
        feed_forward: the class of the feed-forward's keys.
        example: the example in errors.

    Raises:
        ConfigError: the number of experts is missing, or a key is unknown or given twice. Keys that
            depend on the dense model are checked by `model_config`.
    """

    kind: str
    """The kind of the new feed-forward."""
    widths: tuple[str, ...] = ("hidden_size",)
    """Its keys for the inner width; by default the dense one's."""
    start: Any
    """Controlling keys, with the section to change; None: a Mixer's channels, or the only one."""

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
        for part in re.split(r",(?![^\[]*\])", text):  # not at commas inside a list
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
        """Returns the configuration of the changed model.

        Args:
            dense: the dense model's complete configuration.
            folder: folder of its weights, for errors.

        Returns:
            The name of the changed feed-forward, and the configuration.

        Raises:
            ConfigError: that feed-forward is not dense, or the keys do not fit it.
        """
        section, inner = dense_section(self, dense, folder)
        keys = {"kind": self.kind} | self.keys_of(dense) | self.keys
        keys |= {key: inner for key in self.widths if self.keys.get(key) is None}
        try:
            tree = dense.model_dump(mode="json") | {section: keys}
            config = Tree.model_validate({"model": tree}).model
        except ValidationError as error:
            raise self.error(describe(error, RunConfig)) from None
        for key in self.widths:
            if (width := getattr(getattr(config, section), key)) != inner:
                raise self.error(
                    f"model.{section}.{key}: {width} does not fit: the dense weights of {folder} "
                    f"have {inner} inner units, and the experts made from them need the same number"
                )
        return section, config

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """Keys that the dense model determines, unless the option sets them."""
        return {}


class Changed(ABC):
    """A model's weights with other feed-forwards.

    Weights of both models are kept, and a subclass makes the rest on demand, one at a time.

    Args:
        weights: the first model's weights, in any format.
        change: the change.
        config: the changed model's configuration.
        seed: seed of weights that are initialized as in a new run.

    Raises:
        ConfigError: the weights do not match their configuration, or the new model is too large.
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
        """The changed model's complete configuration."""
        return self._config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name."""
        return self._shapes

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight, fp32: the first model's, or a new one."""
        return self._weights.whole(name) if name in self._weights.shapes() else self.made(name)

    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer: the first model's (of a section changed earlier, for example), or a
        new one."""
        own = name in self._own_buffers
        return self._weights.buffer(name) if own else self.made_buffer(name)

    @abstractmethod
    def made(self, name: str) -> torch.Tensor:
        """A weight that the first model lacks, fp32."""

    def made_buffer(self, name: str) -> torch.Tensor:
        """A buffer that the first model lacks, initialized as in a new run."""
        dtypes = {known: buffer.dtype for known, buffer in persistent_buffers(self._model)}
        return self.begun(name).to(dtypes[name])

    def begun(self, name: str) -> torch.Tensor:
        """The initial value of a parameter or buffer in a new run with the seed."""
        return initial_value(self._model, name, self._seed)

    @abstractmethod
    def notes(self) -> list[str]:
        """Notes whether the outputs equal the first model's; called after all weights have been
        made."""


def dense_section(option: Option, model: ModelSettings, folder: Path) -> tuple[str, int]:
    """Finds the feed-forward to change, which must be dense.

    Returns:
        Its name, and its inner width.

    Raises:
        ConfigError: there is none, or it is not dense.
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
    """Returns the activation of a model's dense feed-forwards.

    Args:
        model: the model; GPT-2 has a fixed activation.
    """
    found: Activation | GatedActivation = getattr(model, "activation", "gelu_tanh")
    return found
