"""Reduces the number of experts of a sparse mixture, by removing some or merging similar ones.

All layers that route keep the same number, since other libraries have one number for all layers. A
removed expert's row of the router is removed with it, and the next best experts take its tokens.
Every weight of merged experts, including the router's, is a weighted mean, although their units are
not aligned, as in the published methods (Chen et al. 2024, HC-SMoE).

Shapes: E experts of the first model.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.parallel.families import Origin
from polyad.parallel.weights import Weights
from polyad.train.config.faults import describe
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed, Tree

EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Other libraries' names for the number of experts in config.json."""


class Group(NamedTuple):
    """Experts that are merged into one."""

    experts: Sequence[int]
    shares: Sequence[float]
    """The weight of each in the mean; they sum to 1."""

    @classmethod
    def alone(cls, expert: int) -> "Group":
        """A group of a single, unchanged expert."""
        return cls([expert], [1.0])


Groups = Mapping[str, Sequence[Group]]
"""The experts of the smaller model in order, by layer such as blocks.3.feed_forward."""


class Pruning(Change):
    """Reduces the experts of a model.

    Args:
        groups: the groups of experts in each layer; all layers have equally many.
        text: how they were chosen.
    """

    name, done = "experts prune", "pruned"

    def __init__(self, groups: Groups, text: str) -> None:
        self.groups, self.text = groups, text
        self.num_experts = len(next(iter(groups.values())))

    def error(self, message: str) -> ConfigError:
        """An error about the options."""
        return ConfigError(f"{self.text}: {message}")

    def of(self, weights: Weights) -> "Pruned":
        """The smaller model's weights."""
        return Pruned(weights, self)

    def origin(self, origin: Origin) -> Origin:
        """The files of the weights' folder, with fewer experts."""
        config = dict(origin.config)
        for key in EXPERTS_KEYS:
            if key in config:
                config[key] = self.num_experts
        return origin.model_copy(update={"config": config})


class Pruned(Changed):
    """The weights of a model with fewer experts.

    Raises:
        ConfigError: a model cannot have so few.
    """

    def __init__(self, weights: Weights, pruning: Pruning) -> None:
        self._groups = pruning.groups
        super().__init__(weights, pruning, _smaller(weights.model_config(), pruning))

    def whole(self, name: str) -> Tensor:
        """A whole weight, fp32, of the remaining experts."""
        value = self._weights.whole(name)
        return value if tuple(value.shape) == self._shapes[name] else self._kept(name, value)

    def buffer(self, name: str) -> Tensor:
        """A persistent buffer, of the remaining experts."""
        value = self._weights.buffer(name)
        shape = self._model.get_buffer(name).shape
        return value if value.shape == shape else self._kept(name, value).to(value.dtype)

    def _kept(self, name: str, value: Tensor) -> Tensor:
        layer = next(layer for layer in self._groups if name.startswith(f"{layer}."))
        rows = []
        for experts, shares in self._groups[layer]:
            if len(experts) == 1:
                rows.append(value[experts[0]])
            else:
                share_E = torch.tensor(list(shares), dtype=torch.float64)
                rows.append(torch.tensordot(share_E, value[list(experts)].double(), 1).float())
        return torch.stack(rows)

    def notes(self) -> list[str]:
        """Notes how outputs compare with the first model's."""
        if any(len(group.experts) > 1 for groups in self._groups.values() for group in groups):
            return ["merged experts are averages of weights and compute something new"]
        return ["tokens of removed experts go to their next best; the other experts are unchanged"]


def _smaller(config: ModelSettings, pruning: Pruning) -> ModelSettings:
    """The configuration with fewer experts."""
    tree = config.model_dump(mode="json")
    for key, section in config.feed_forwards().items():
        if not isinstance(section, SparseMoEConfig):
            continue
        # The default is half of the experts, but existing keys keep their width.
        width = {"score_width": section.score_size()} if section.score != "linear" else {}
        pool = {"pool_least": section.pool_least, "pool_most": section.pool_most}
        bounds = {name: min(d, pruning.num_experts) for name, d in pool.items() if d is not None}
        tree[key.removeprefix("model.")] |= {"num_experts": pruning.num_experts} | width | bounds
    try:
        return Tree.model_validate({"model": tree}).model
    except ValidationError as error:
        raise pruning.error(describe(error, RunConfig)) from None
