"""Changes of a model by `polyad convert`: another kind of feed-forward."""

import re
from abc import ABC, abstractmethod
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

    def validated(self, tree: dict[str, Any]) -> ModelSettings:
        """Validates the configuration of a changed model.

        Raises:
            ConfigError: a key does not fit.
        """
        try:
            return _Tree.model_validate({"model": tree}).model
        except ValidationError as error:
            raise self.error(describe(error, RunConfig)) from None

    def origin(self, origin: Origin) -> Origin | None:
        """The parts of another library's folder to write with the changed model; None: nothing."""
        return None

    @abstractmethod
    def model_config(self, weights: Weights) -> ModelSettings:
        """Returns the complete configuration of the changed model.

        Args:
            weights: the first model's weights.

        Raises:
            ConfigError: it cannot be made from these.
        """

    @abstractmethod
    def made(self, model: "Changed", name: str) -> torch.Tensor:
        """A weight, fp32, or a persistent buffer that the first model lacks, or has in another
        shape."""

    @abstractmethod
    def notes(self, config: ModelSettings) -> list[str]:
        """Notes whether the outputs equal the first model's.

        Args:
            config: the changed model's configuration.
        """


class _Tree(Config):
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

    def section_of(self, model: ModelSettings) -> str:
        """Returns the name of the feed-forward to change, in the dense or in the changed model.

        Raises:
            ConfigError: there is none.
        """
        sections = [key.removeprefix("model.") for key in model.feed_forwards()]
        if not sections:
            raise self.error(f"model.kind: {model.kind} has no feed-forward")
        section: str = self.start.section or sections[-1]
        if section not in sections:
            raise self.error(
                f"section: {section!r} is not allowed: model.kind: {model.kind} has "
                f"{' and '.join(sections)}"
            )
        return section

    def model_config(self, weights: Weights) -> ModelSettings:
        """Returns the complete configuration of the changed model.

        Raises:
            ConfigError: its feed-forward is not dense, or the keys do not fit it.
        """
        dense, folder = weights.model_config(), weights.folder
        section = self.section_of(dense)
        feed_forward = getattr(dense, section)
        if not isinstance(feed_forward, DenseFeedForwardConfig):
            raise self.error(
                f"{folder}: model.{section}.kind: {feed_forward.kind!r} is not allowed: a dense "
                f"model is {self.done}"
            )
        layer = build_model(dense).get_submodule(f"blocks.0.{section}")
        assert isinstance(layer, DenseFeedForward)
        inner = layer.up.out_features
        keys = {"kind": self.kind} | self.keys_of(dense) | self.keys
        keys |= {key: inner for key in self.widths if self.keys.get(key) is None}
        config = self.validated(dense.model_dump(mode="json") | {section: keys})
        for key in self.widths:
            if (width := getattr(getattr(config, section), key)) != inner:
                raise self.error(
                    f"model.{section}.{key}: {width} does not fit: the dense weights of {folder} "
                    f"have {inner} inner units, and the experts made from them need the same number"
                )
        return config

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """Keys that the dense model determines, unless the option sets them."""
        return {}


class Changed:
    """A model's weights, after a change if there is one.

    Weights that both models have are kept, and the change makes the rest on demand, one at a time.

    Args:
        weights: the first model's weights, in any format.
        change: the change; None: no change.

    Attributes:
        before: the first model's weights.
        config: the changed model's complete configuration.
        shapes: shapes of its weights by name, in the model's order (a checkpoint has its shards'
            order).

    Raises:
        ConfigError: the new model cannot be made from these, or is too large.
    """

    def __init__(self, weights: Weights, change: Change | None) -> None:
        self.folder, self.before, self.change = weights.folder, weights, change
        first = weights.model_config()
        self.config = change.model_config(weights) if change else first
        try:
            self._model = build_model(self.config)
        except ModelSizeError as error:
            why = "asks for more elements than a tensor can have"
            raise change.error(why) if change else error from None
        before = build_model(first) if change else self._model
        self._own_buffers = {name: each.shape for name, each in persistent_buffers(before)}
        self.shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        self._buffers: dict[str, torch.Tensor] = {}

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight, fp32: the first model's, or a new one."""
        if self.change is None or self.before.shapes().get(name) == self.shapes[name]:
            return self.before.whole(name)
        return self.change.made(self, name)

    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer: the first model's (of a section changed earlier, for example), or a
        new one."""
        if name not in self._buffers:
            buffer = self._model.get_buffer(name)
            is_own = self._own_buffers.get(name) == buffer.shape
            if self.change is None or is_own:
                return self.before.buffer(name)
            self._buffers[name] = self.change.made(self, name).to(buffer.dtype)
        return self._buffers[name]

    def buffers(self) -> dict[str, torch.Tensor]:
        """All persistent buffers of the model."""
        return {name: self.buffer(name) for name, _ in persistent_buffers(self._model)}

    def begun(self, name: str, seed: int) -> torch.Tensor:
        """The initial value of a parameter or buffer in a new run with a seed."""
        return initial_value(self._model, name, seed)


def activation_of(model: ModelSettings) -> Activation | GatedActivation:
    """Returns the activation of a model's dense feed-forwards.

    Args:
        model: the model; GPT-2 has a fixed activation.
    """
    activation: Activation | GatedActivation = getattr(model, "activation", "gelu_tanh")
    return activation
