"""Changes of a model by `polyad convert`: another kind of feed-forward."""

import re
from abc import ABC, abstractmethod
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
from polyad.parallel.weights import Weights
from polyad.train.config.run import ModelSection, RunConfig
from polyad.train.config.text import apply_override, describe
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
        text: as in `num_experts=8,top_k=2,placement=[1,3],seed=2`; values in YAML.

    Raises:
        ConfigError: it is not in this form, or a controlling key is invalid. Keys of the
            feed-forward are checked by `model_config`.
    """

    kind: str
    """The kind of the new feed-forward."""
    widths: tuple[str, ...] = ("hidden_size",)
    """Its keys for the inner width; by default the dense one's."""
    controls: type[Config]
    """The class of the controlling keys, with `section`, the feed-forward to change; None: a
    Mixer's channels, or the only one."""

    def __init__(self, text: str) -> None:
        self.text, self.keys = text, dict[str, Any]()
        for part in re.split(r",(?![^\[]*\])", text):  # not at commas inside a list
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in (*self.keys, "kind"):
                raise self.error(f"{key} is set already")
            try:
                apply_override(self.keys, f"{key}{equals}{value}")
            except ConfigError as error:
                raise self.error(str(error)) from None
        if "num_experts" not in self.keys:
            raise self.error("num_experts is missing, as in num_experts=8,top_k=2")
        names = self.controls.model_fields.keys() & self.keys.keys()
        try:
            self.start: Any = self.controls.model_validate({n: self.keys.pop(n) for n in names})
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
        ConfigError: the new model is too large.
    """

    def __init__(
        self, weights: Weights, change: Change, config: ModelSettings, seed: int = 0
    ) -> None:
        before = build_model(weights.model_config())
        self.folder = weights.folder
        self._weights, self._config, self._seed = weights, config, seed
        self._own_buffers = frozenset(name for name, _ in persistent_buffers(before))
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

    def made(self, name: str) -> torch.Tensor:
        """A weight that the first model lacks, fp32; by default as in a new run."""
        return self.begun(name)

    def made_buffer(self, name: str) -> torch.Tensor:
        """A buffer that the first model lacks; by default as in a new run."""
        return self.begun(name).to(self._model.get_buffer(name).dtype)

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
    sections = [key.removeprefix("model.") for key in model.feed_forwards()]
    if not sections:
        raise option.error(f"{folder}: model.kind: {model.kind} has no feed-forward")
    section = option.start.section or sections[-1]
    if section not in sections:
        raise option.error(
            f"section: {section!r} is not allowed: model.kind: {model.kind} has "
            f"{' and '.join(sections)}"
        )
    feed_forward = getattr(model, section)
    if not isinstance(feed_forward, DenseFeedForwardConfig):
        raise option.error(
            f"{folder}: model.{section}.kind: {feed_forward.kind!r} is not allowed: a dense model "
            f"is {option.done}"
        )
    layer = build_model(model).get_submodule(f"blocks.0.{section}")
    assert isinstance(layer, DenseFeedForward)
    return section, layer.up.out_features


def activation_of(model: ModelSettings) -> Activation | GatedActivation:
    """Returns the activation of a model's dense feed-forwards.

    Args:
        model: the model; GPT-2 has a fixed activation.
    """
    activation: Activation | GatedActivation = getattr(model, "activation", "gelu_tanh")
    return activation
