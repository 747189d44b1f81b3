"""A sparse mixture with fewer experts: some are left out, or those that are alike become one.

Every layer that routes keeps the same number, since configurations of other libraries have one for
all. A removed expert's row of the router goes with it, and the next best experts take its tokens.
Of a group of experts that are merged every weight, the router's too, is the mean of theirs, each
with its own share: an average over units that stand in different orders, as in the published
methods (Chen et al. 2024, HC-SMoE).

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
from polyad.train.exchange.change import Change, Changed, Tree

EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What other libraries call the number of experts in config.json."""


class Group(NamedTuple):
    """Experts that become one."""

    experts: Sequence[int]
    shares: Sequence[float]
    """The share of each in the mean; they sum to 1."""

    @classmethod
    def alone(cls, expert: int) -> "Group":
        """An expert that stays as it is."""
        return cls([expert], [1.0])


Groups = Mapping[str, Sequence[Group]]
"""By layer, as blocks.3.feed_forward: the experts of the other model, in their order."""


class Pruning(Change):
    """Makes a model of some of the experts.

    Args:
        groups: what the experts of each layer become; all layers have as many.
        text: how they were chosen.
    """

    name, done = "experts prune", "pruned"

    def __init__(self, groups: Groups, text: str) -> None:
        self.groups, self.text = groups, text
        self.num_experts = len(next(iter(groups.values())))

    def of(self, weights: Weights) -> "Pruned":
        """The smaller model's weights."""
        return Pruned(weights, self)

    def origin(self, origin: Origin) -> Origin:
        """The files of the folder that weights are from, with fewer experts."""
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
        """A whole weight, fp32, of the experts that stay."""
        value = self._weights.whole(name)
        return value if tuple(value.shape) == self._shapes[name] else self._kept(name, value)

    def buffer(self, name: str) -> Tensor:
        """A persistent buffer, of the experts that stay."""
        value = self._weights.buffer(name)
        shape = self._model.get_buffer(name).shape
        return value if value.shape == shape else self._kept(name, value).to(value.dtype)

    def made(self, name: str) -> Tensor:
        """None: the first model has all."""
        raise AssertionError(name)

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
        """Says what it computes."""
        if any(len(group.experts) > 1 for groups in self._groups.values() for group in groups):
            return ["merged experts are averages of weights and compute something new"]
        return ["tokens of removed experts go to their next best; the other experts are unchanged"]


def _smaller(config: ModelSettings, pruning: Pruning) -> ModelSettings:
    """The configuration with fewer experts."""
    tree = config.model_dump(mode="json")
    for key, section in config.feed_forwards().items():
        if not isinstance(section, SparseMoEConfig):
            continue
        # Its default is half of the experts, and keys that are there stay as wide as they are.
        width = {"score_width": section.score_size()} if section.score != "linear" else {}
        known = {"pool_least": section.pool_least, "pool_most": section.pool_most}
        bounds = {name: min(d, pruning.num_experts) for name, d in known.items() if d is not None}
        tree[key.removeprefix("model.")] |= {"num_experts": pruning.num_experts} | width | bounds
    try:
        return Tree.model_validate({"model": tree}).model
    except ValidationError as error:
        raise pruning.error(describe(error, RunConfig)) from None
