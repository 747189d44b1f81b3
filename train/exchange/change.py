"""Changes of a model by `polyad convert`: a dense model as one with experts, `--upcycle` and
`--split`; and `--merge`, back.

`--upcycle` copies feed-forwards. Weights are made on demand, one parameter at a time; for copies
and noise see `model/smoe/experts.py`. Routers are initialized as in a new run with the same seed.

`--split` groups the units of feed-forwards. It only permutes weights and stores the permutation in
a buffer, so that `--merge` restores them bit for bit. For the grouping see
`model/emoe.py`.
"""

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from polyad.data.errors import prefixed
from polyad.model.build import ModelSizeError, build_model, initial_value
from polyad.model.config import Config
from polyad.model.decoder import DecoderConfig
from polyad.model.emoe import (
    EmergentMoEConfig,
    balanced_kmeans,
    dense_names,
    merge,
    random_groups,
    split,
)
from polyad.model.feedforward import (
    GATED,
    Activation,
    DenseFeedForward,
    DenseFeedForwardConfig,
    GatedActivation,
)
from polyad.model.initialization import seeded_generator
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import copies, dense_tensor
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
            with prefixed(f"{self.name} {text}", ConfigError):
                apply_override(self.keys, f"{key}{equals}{value}")
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
    return getattr(model, "activation", "gelu_tanh")


class _Start(Config):
    """Keys that are not in the feed-forward's section."""

    seed: Annotated[int, Field(ge=0)] = RunConfig.model_fields["seed"].default
    """The seed of routers, of noise, and of the clustering or of chance."""
    section: str | None = None
    """Which of a Mixer's feed-forwards; None: channel_feed_forward."""


class _Copying(_Start):
    """Keys of `--upcycle` that are not in the feed-forward's section."""

    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of what is added to each expert's weights, as a share of theirs."""


class Upcycling(Option):
    """The value of `--upcycle`: keys of `model.feed_forward`, noise and seed, as in
    `num_experts=8,top_k=2,placement=[1,3],noise=0.01`."""

    name, done = "--upcycle", "upcycled"
    kind, widths = "smoe", ("expert_hidden_size", "dense_hidden_size")
    controls = _Copying

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """The activation of the dense layers; for a decoder also a router like Qwen3-MoE's, so that
        transformers has such a model."""
        keys: dict[str, Any] = {"activation": activation_of(dense)}
        if isinstance(dense, DecoderConfig):
            if self.keys.get("score", "linear") in ("linear", "random"):
                keys["router_dtype"] = "model"
            if self.keys.get("top_k") != 1:  # or its weight would be constantly 1
                keys["combine"] = "sum_to_one"
        return keys

    def made(self, model: Changed, name: str) -> torch.Tensor:
        """Copies of a weight, or a router's initial value."""
        source, start = dense_tensor(name), self.start
        if source is None:
            return model.begun(name, start.seed)
        value = model.before.whole(source)
        num_experts = model.shapes[name][0]
        if source.endswith(".bias"):
            return copies(value, num_experts, 0.0, start.seed, name)
        return copies(value.T, num_experts, start.noise, start.seed, name)

    def notes(self, config: ModelSettings) -> list[str]:
        """Says whether the sparse model starts with the dense model's outputs."""
        experts: SparseMoEConfig = getattr(config, self.section_of(config))
        is_equal = (
            experts.top_k > 1
            and experts.combine != "scores"
            and experts.capacity_factor is None
            and not self.start.noise
            and experts.activation == activation_of(config)
        )
        if is_equal:
            return ["its initial logits equal the dense model's, up to rounding"]
        return ["its initial logits differ from the dense model's"]


UNIT = "unit"
"""Name of the buffer with the units' original places."""


class _Grouping(_Start):
    """Keys of `--split` that are not in the feed-forward's section."""

    by: Literal["clustering", "random"] = "clustering"
    """How units are grouped: by balanced k-means of their keys, or by chance."""


class Splitting(Option):
    """The value of `--split`: keys of `model.feed_forward`, how units are grouped, and a seed, as
    in `num_experts=64,top_k=16,blocks=[8,10],by=clustering`."""

    name, done, kind = "--split", "split", "emoe"
    controls = _Grouping

    def made(self, model: Changed, name: str) -> torch.Tensor:
        """The dense model's units in groups, their places, or the initial value of a learned
        score."""
        layer, own = _layer_of(name)
        names = dense_names(gated=activation_of(model.config) in GATED)
        groups = getattr(model.config, self.section_of(model.config)).num_experts
        if own == UNIT:
            return self._grouped(model, f"{layer}.{names['experts.keys']}", groups)
        if own not in names:
            return model.begun(name, self.start.seed)
        dense = model.before.whole(f"{layer}.{names[own]}")
        return split(names[own], dense, model.buffer(f"{layer}.{UNIT}"), groups)

    def _grouped(self, model: Changed, name: str, groups: int) -> torch.Tensor:
        """The number of the dense unit at each place of a layer, grouped by its keys' name."""
        seed = seeded_generator(self.start.seed, name).initial_seed()
        keys = model.before.whole(name)
        if self.start.by == "random":
            group_U = random_groups(len(keys), groups, seed)
        elif keys.isfinite().all():
            group_U = balanced_kmeans(keys.double().numpy(), groups, seed)
        else:
            raise self.error(
                f"{model.folder}: NaN or infinity in {name}, whose rows cannot be clustered; "
                "by=random does not need them"
            )
        return torch.from_numpy(group_U).argsort(stable=True)

    def notes(self, config: ModelSettings) -> list[str]:
        """Notes whether the split model's outputs equal the dense one's."""
        experts: EmergentMoEConfig = getattr(config, self.section_of(config))
        is_equal = (
            experts.used_experts() == experts.num_experts
            and experts.score == "avg_k"
            and experts.capacity_factor is None
        )
        if is_equal:
            return ["its outputs equal the dense model's, up to rounding"]
        return ["its outputs differ from the dense model's"]


def is_split(model: ModelSettings) -> bool:
    """Whether a model has feed-forwards in groups of units."""
    return any(isinstance(each, EmergentMoEConfig) for each in model.feed_forwards().values())


class Merging(Change):
    """`--merge`: makes a model with groups of units dense again."""

    name, done = "--merge", "merged"

    def model_config(self, weights: Weights) -> ModelSettings:
        """The dense model's configuration."""
        config = weights.model_config()
        dense: dict[str, Any] = {
            key.removeprefix("model."): each.dense()
            for key, each in config.feed_forwards().items()
            if isinstance(each, EmergentMoEConfig)
        }
        return config.model_copy(update=dense)

    def made(self, model: Changed, name: str) -> torch.Tensor:
        """The units of a layer in their original order."""
        layer, dense_name = _layer_of(name)
        names = dense_names(gated=activation_of(model.config) in GATED)
        (stacked,) = (theirs for theirs, ours in names.items() if ours == dense_name)
        unit_U = model.before.buffer(f"{layer}.{UNIT}")
        return merge(dense_name, model.before.whole(f"{layer}.{stacked}"), unit_U)

    def notes(self, config: ModelSettings) -> list[str]:
        """Notes what is left out."""
        return ["every token uses all units again, as in the dense model"]


def _layer_of(name: str) -> tuple[str, str]:
    """The name of a tensor's feed-forward, such as blocks.3.feed_forward, and its name in it."""
    *layer, own = name.split(".", 3)
    return ".".join(layer), own
