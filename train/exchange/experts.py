"""A dense model as one with experts: `polyad convert --upcycle` and `--split`; and `--merge`, back.

`--upcycle` copies feed-forwards. Weights are made on demand, one parameter at a time; for copies
and noise see `model/smoe/experts.py`. Routers are initialized as in a new run with the same seed.

`--split` groups the units of feed-forwards. It only permutes weights and stores the permutation in
a buffer, so that `--merge` restores them bit for bit. For the grouping see
`model/emoe.py`.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

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
