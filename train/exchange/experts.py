"""A dense model as one with experts: `polyad convert --upcycle` and `--split`; and `--merge`, back.

`--upcycle` copies feed-forwards. Weights are made on demand, one parameter at a time; for copies
and noise see `model/smoe/experts.py`. Routers are initialized as in a new run with the same seed.

`--split` groups the units of feed-forwards. It only permutes weights and stores the permutation in
a buffer, so that `--merge` restores them bit for bit. For the grouping see
`model/emoe.py`.
"""

import re
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from polyad.model.config import Config
from polyad.model.decoder_config import DecoderConfig
from polyad.model.emoe import (
    EmergentMoEConfig,
    balanced_kmeans,
    dense_names,
    merge,
    random_groups,
    split,
)
from polyad.model.feedforward import GATED
from polyad.model.initialization import seeded_generator
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.experts import copies, dense_tensor
from polyad.parallel.weights import Weights
from polyad.train.config.run import RunConfig
from polyad.train.exchange.change import Change, Changed, Option, activation_of


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

    def of(self, weights: Weights) -> "Upcycled":
        """The sparse model's weights."""
        return Upcycled(weights, self)

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


class Upcycled(Changed):
    """A dense model's weights with its feed-forwards copied to experts.

    Raises:
        ConfigError: they are not dense, or do not fit.
    """

    def __init__(self, weights: Weights, upcycling: Upcycling) -> None:
        self._section, config = upcycling.model_config(weights.model_config(), weights.folder)
        super().__init__(weights, upcycling, config, upcycling.start.seed)
        self._start = upcycling.start

    def made(self, name: str) -> torch.Tensor:
        """Copies of a weight, or a router's initial value."""
        source, start = dense_tensor(name), self._start
        if source is None:
            return self.begun(name)
        value = self._weights.whole(source)
        num_experts = self._shapes[name][0]
        if source.endswith(".bias"):
            return copies(value, num_experts, 0.0, start.seed, name)
        return copies(value.T, num_experts, start.noise, start.seed, name)

    def notes(self) -> list[str]:
        """Says whether the sparse model starts with the dense model's outputs."""
        experts: SparseMoEConfig = getattr(self._config, self._section)
        is_equal = (
            experts.top_k > 1
            and experts.combine != "scores"
            and experts.capacity_factor is None
            and not self._start.noise
            and experts.activation == activation_of(self._config)
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

    def of(self, weights: Weights) -> "Split":
        """The split model's weights."""
        return Split(weights, self)


class Split(Changed):
    """A dense model's weights with the units of its feed-forwards in groups.

    Args:
        weights: the dense model's weights, in any format.
        splitting: how to group units.

    Raises:
        ConfigError: they are not dense, or cannot be grouped in this way.
    """

    def __init__(self, weights: Weights, splitting: Splitting) -> None:
        section, config = splitting.model_config(weights.model_config(), weights.folder)
        super().__init__(weights, splitting, config, splitting.start.seed)
        self._splitting = splitting
        self._pattern = re.compile(rf"(blocks\.\d+\.{section})\.(.+)")
        self._feed_forward: EmergentMoEConfig = getattr(config, section)
        self._is_gated = activation_of(config) in GATED
        self._names = dense_names(gated=self._is_gated)
        self._units: dict[str, torch.Tensor] = {}

    def made(self, name: str) -> torch.Tensor:
        """The dense model's units in groups, or the initial value of a learned score."""
        parts = self._pattern.fullmatch(name)
        assert parts is not None
        layer, own = parts[1], parts[2]
        if (dense_name := self._names.get(own)) is None:
            return self.begun(name)
        dense = self._weights.whole(f"{layer}.{dense_name}")
        return split(dense_name, dense, self._unit(layer), self._feed_forward.num_experts)

    def made_buffer(self, name: str) -> torch.Tensor:
        """The places of units."""
        parts = self._pattern.fullmatch(name)
        assert parts is not None
        assert parts[2] == UNIT
        return self._unit(parts[1])

    def _unit(self, layer: str) -> torch.Tensor:
        """The number of the dense unit at each place of a layer."""
        if layer not in self._units:
            self._units[layer] = self._grouped(layer)
        return self._units[layer]

    def _grouped(self, layer: str) -> torch.Tensor:
        start, groups = self._splitting.start, self._feed_forward.num_experts
        name = f"{layer}.{self._names['experts.keys']}"
        seed = seeded_generator(start.seed, name).initial_seed()
        keys = self._weights.whole(name)
        if start.by == "random":
            group_U = random_groups(len(keys), groups, seed)
        elif keys.isfinite().all():
            group_U = balanced_kmeans(keys.double().numpy(), groups, seed)
        else:
            raise self._splitting.error(
                f"{self.folder}: NaN or infinity in {name}, whose rows cannot be clustered; "
                "by=random does not need them"
            )
        return torch.from_numpy(group_U).argsort(stable=True)

    def notes(self) -> list[str]:
        """Notes whether the split model's outputs equal the dense one's."""
        experts = self._feed_forward
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

    def of(self, weights: Weights) -> "Merged":
        """The dense model's weights."""
        return Merged(weights, self)


class Merged(Changed):
    """A split model's weights, as those of a dense one.

    Raises:
        ConfigError: they are not split.
    """

    def __init__(self, weights: Weights, merging: Merging) -> None:
        split_config = weights.model_config()
        sections = {
            key.removeprefix("model."): each
            for key, each in split_config.feed_forwards().items()
            if isinstance(each, EmergentMoEConfig)
        }
        self._names = dense_names(gated=activation_of(split_config) in GATED)
        dense: dict[str, Any] = {name: each.dense() for name, each in sections.items()}
        super().__init__(weights, merging, split_config.model_copy(update=dense))

    def made(self, name: str) -> torch.Tensor:
        """The units of a layer in their original order."""
        layer, *ends = name.rsplit(".", 2)
        dense_name = ".".join(ends)
        (stacked,) = (theirs for theirs, ours in self._names.items() if ours == dense_name)
        unit_U = self._weights.buffer(f"{layer}.{UNIT}")
        return merge(dense_name, self._weights.whole(f"{layer}.{stacked}"), unit_U)

    def notes(self) -> list[str]:
        """Notes what is left out."""
        return ["every token uses all units again, as in the dense model"]
