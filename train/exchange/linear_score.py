"""`polyad convert --linear-score`: replaces attentive scores by linear ones with the same logits.

The keys are the same for all tokens, so that an attentive score is linear in the token once they
are fixed: the weight is `AttentiveScore.columns`. Nothing is trained, unlike in the paper's
distillation, whose keys depend on the input.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel.weights import Weights
from polyad.train.exchange.change import Change, Changed

LINEAR = ".router.score.weight"
"""Name suffix of the new weights."""


class LinearScores(Change):
    """The option."""

    name, done = "--linear-score", "linear_score"

    def of(self, weights: Weights) -> "Linearized":
        """The other model's weights."""
        return Linearized(weights, self)


class Linearized(Changed):
    """A model's weights with its attentive scores replaced by linear ones.

    Raises:
        ConfigError: no layer has an attentive score.
    """

    def __init__(self, weights: Weights, option: LinearScores) -> None:
        config = weights.model_config()
        sections = {
            key.removeprefix("model."): each for key, each in config.feed_forwards().items()
        }
        attentive = {
            name: each
            for name, each in sections.items()
            if isinstance(each, SparseMoEConfig) and each.score == "attentive"
        }
        if not attentive:
            scores = [
                f"model.{name}.score: {found}"
                for name, each in sections.items()
                if (found := getattr(each, "score", None)) is not None
            ]
            raise option.error(
                f"{weights.folder}: has {' and '.join(scores) or 'no sparse experts'}; only score: "
                f"attentive has a linear score that gives the same logits"
            )
        # Its logits have no bias; the other keys belong to the attentive score.
        keys = {"score": "linear", "expert_keys": "learned", "router_bias": False}
        linear: dict[str, Any] = {
            name: each.model_copy(update=keys) for name, each in attentive.items()
        }
        super().__init__(weights, option, config.model_copy(update=linear))

    def made(self, name: str) -> torch.Tensor:
        """The weight of a linear score, fp32."""
        path = name.removesuffix(LINEAR)
        layer = deepcopy(self._before.get_submodule(path))  # freed after use, with its weights
        assert isinstance(layer, SparseMoE)
        self._fill(layer.router.score, f"{path}.router.score")
        if layer.router.score.mean_inputs() is not None:
            self._fill(layer.experts, f"{path}.experts", ("up", "up_bias"))
        (columns_ED,) = layer.gate_columns()
        return columns_ED.detach().float()

    def _fill(self, module: nn.Module, path: str, only: tuple[str, ...] | None = None) -> None:
        """Fills parameters and buffers of a module on the meta device with their values, in
        float64."""
        for name, _ in module.named_parameters():
            if only is None or name in only:
                value = self._weights.whole(f"{path}.{name}").double()
                setattr(module, name, nn.Parameter(value, requires_grad=False))
        for name, _ in module.named_buffers():
            setattr(module, name, self._weights.buffer(f"{path}.{name}").double())

    def notes(self) -> list[str]:
        """Notes how outputs compare with the first model's."""
        return [
            "its outputs equal the attentive model's, up to rounding; in further training the keys "
            "no longer follow what the experts compute"
        ]
