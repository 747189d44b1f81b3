"""`polyad convert --upcycle`: a dense model's weights as those of a sparse mixture of experts.

The weights are made one parameter at a time, when they are asked for. What is copied and what noise
is: `model/smoe/upcycling.py`. A router starts as in a new run of the same seed.
"""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError

from model.build import ModelSizeError, build_model, initial_value
from model.config import Config
from model.dense import DenseFeedForwardConfig
from model.gpt2 import GPT2Config
from model.smoe.config import SparseMoEConfig
from model.smoe.upcycling import copies, dense_tensor
from parallel.checkpoint.tensor_folder import differing_shapes
from parallel.fragments import persistent_buffers
from parallel.weights import Weights
from train.config.faults import describe
from train.config.run import RunConfig
from train.config.text import apply_override, settle
from train.errors import ConfigError
from train.tasks.language import language_model

_WIDTHS = ("expert_hidden_size", "dense_hidden_size")


class _Start(Config):
    """Keys of `--upcycle` that are not in `model.feed_forward`."""

    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of what is added to each expert's weights, as a share of theirs."""
    seed: Annotated[int, Field(ge=0)] = RunConfig.model_fields["seed"].default
    """Of routers and noise."""


class _Tree(Config):
    """The place of `model` in a configuration, for errors that name whole keys."""

    model: GPT2Config


class Upcycling:
    """The value of `--upcycle`: keys of `model.feed_forward`, noise and seed.

    Args:
        text: as in `num_experts=8,top_k=2,placement=[1,3],noise=0.01`; values in YAML.

    Raises:
        ConfigError: it names no number of experts, a key that is unknown or twice there, or noise
            or a seed that is none. What the dense model decides is checked by `model_config`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        start, self._feed_forward = dict[str, Any](), dict[str, Any]()
        known = [*_Start.model_fields, *(k for k in SparseMoEConfig.model_fields if k != "kind")]
        for part in re.split(r",(?![^\[]*\])", text):  # not at the commas of a list
            key, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign:
                raise self.error(f"{part.strip()!r} is not key=value, as in num_experts=8,top_k=2")
            if key not in known:
                near = get_close_matches(key, known, 1)
                end = f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"
                raise self.error(f"unknown key {key!r}; {end}")
            section = start if key in _Start.model_fields else self._feed_forward
            if key in section:
                raise self.error(f"{key} stands twice")
            try:
                apply_override(section, f"{key}={value}")
                section[key] = settle(section[key], None)
            except ConfigError as error:
                raise self.error(str(error)) from None
        if "num_experts" not in self._feed_forward:
            raise self.error("num_experts is missing, as in num_experts=8,top_k=2")
        try:
            self.start = _Start.model_validate(start)
        except ValidationError as error:
            raise self.error(describe(error, RunConfig)) from None

    def error(self, message: str) -> ConfigError:
        """An error about this value of `--upcycle`."""
        return ConfigError(f"--upcycle {self.text}: {message}")

    def model_config(self, dense: GPT2Config, folder: Path) -> GPT2Config:
        """The configuration of the sparse model.

        Args:
            dense: that of the dense one, complete.
            folder: where its weights are, for errors.

        Raises:
            ConfigError: that model is not dense, or experts like these do not fit it.
        """
        feed_forward = dense.feed_forward
        if not isinstance(feed_forward, DenseFeedForwardConfig):
            raise self.error(
                f"{folder}: model.feed_forward.kind: {feed_forward.kind!r} is not allowed: a dense "
                f"model is upcycled"
            )
        inner = feed_forward.inner_size(dense.hidden_size)
        section = {"kind": "smoe"} | self._feed_forward
        for key in _WIDTHS:
            if section.get(key) is None:
                section[key] = inner
        try:
            tree = dense.model_dump(mode="json") | {"feed_forward": section}
            config = _Tree.model_validate({"model": tree}).model
        except ValidationError as error:
            raise self.error(describe(error, RunConfig)) from None
        assert isinstance(config.feed_forward, SparseMoEConfig)
        for key in _WIDTHS:
            if (width := getattr(config.feed_forward, key)) != inner:
                raise self.error(
                    f"model.feed_forward.{key}: {width} does not fit: the dense weights of "
                    f"{folder} have {inner} inner units, and every copy has as many"
                )
        return config


class Upcycled:
    """A dense model's weights with its feed-forwards as experts.

    Args:
        weights: the dense model's, of any format.
        upcycling: what becomes of them.

    Raises:
        ConfigError: they are not dense, or do not fit.
    """

    def __init__(self, weights: Weights, upcycling: Upcycling) -> None:
        self.folder = weights.folder
        self._weights, self._start = weights, upcycling.start
        dense = language_model(weights)
        self._config = upcycling.model_config(dense, self.folder)
        expected = {name: tuple(p.shape) for name, p in build_model(dense).named_parameters()}
        if differing := differing_shapes(weights.shapes(), expected):
            raise ConfigError(f"{self.folder}: is not of its configuration: {differing}")
        try:
            self._model = build_model(self._config)
        except ModelSizeError:
            raise upcycling.error("asks for more numbers than a tensor can have") from None
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def model_config(self) -> GPT2Config:
        """The configuration of the sparse model, complete."""
        return self._config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the sparse model's weights by name."""
        return self._shapes

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight, fp32: the dense model's own, copies of one, or a router's first value."""
        if name in self._weights.shapes():
            return self._weights.whole(name)
        source, start = dense_tensor(name), self._start
        if source is None:
            return initial_value(self._model, name, start.seed)
        value = self._weights.whole(source.name)
        num_experts = self._shapes[name][0]
        if not source.is_weight:
            return copies(value, num_experts, 0.0, start.seed, name)
        return copies(value.T, num_experts, start.noise, start.seed, name)

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer of a router, as it starts: a dense model has none."""
        dtypes = {known: buffer.dtype for known, buffer in persistent_buffers(self._model)}
        return initial_value(self._model, name, self._start.seed).to(dtypes[name])

    def note(self) -> str:
        """Says whether the sparse model starts with the dense model's outputs."""
        feed_forward = self._config.feed_forward
        assert isinstance(feed_forward, SparseMoEConfig)
        reasons = []
        if feed_forward.top_k == 1:
            reasons.append("with top_k 1 an expert's output is multiplied by its score")
        if feed_forward.capacity_factor is not None:
            reasons.append("capacity_factor drops tokens")
        if self._start.noise:
            reasons.append(f"noise is {self._start.noise:g}")
        if reasons:
            return f"at first its logits are not the dense model's: {'; '.join(reasons)}"
        return "at first its logits are the dense model's, but for rounding"
