"""`polyad convert --upcycle`: a dense model's weights as those of a sparse mixture of experts.

The weights are made one parameter at a time, when they are asked for. What is copied and what noise
is: `model/smoe/upcycling.py`. A router starts as in a new run of the same seed.
"""

from typing import Annotated, Any

import torch
from pydantic import Field

from polyad.model.config import Config
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.upcycling import copies, dense_tensor
from polyad.parallel.weights import Weights
from polyad.train.config.run import RunConfig
from polyad.train.exchange.change import Changed, Option, activation_of


class _Start(Config):
    """Keys of `--upcycle` that are not in the feed-forward's section."""

    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of what is added to each expert's weights, as a share of theirs."""
    seed: Annotated[int, Field(ge=0)] = RunConfig.model_fields["seed"].default
    """Of routers and noise."""
    section: str | None = None
    """Which of a Mixer's feed-forwards; None: channel_feed_forward."""


class Upcycling(Option):
    """The value of `--upcycle`: keys of `model.feed_forward`, noise and seed.

    Args:
        text: as in `num_experts=8,top_k=2,placement=[1,3],noise=0.01`; values in YAML.

    Raises:
        ConfigError: it names no number of experts, a key that is unknown or twice there, or noise
            or a seed that is none. What the dense model decides is checked by `model_config`.
    """

    done, kind, widths = "upcycled", "smoe", ("expert_hidden_size", "dense_hidden_size")
    start: _Start

    def __init__(self, text: str) -> None:
        super().__init__("--upcycle", text, _Start, SparseMoEConfig)

    def of(self, weights: Weights) -> "Upcycled":
        """The sparse model's weights."""
        return Upcycled(weights, self)

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """The activation of the dense layers."""
        return {"activation": activation_of(dense)}


class Upcycled(Changed):
    """A dense model's weights with its feed-forwards as experts.

    Args:
        weights: the dense model's, of any format.
        upcycling: what becomes of them.

    Raises:
        ConfigError: they are not dense, or do not fit.
    """

    def __init__(self, weights: Weights, upcycling: Upcycling) -> None:
        self._section, config = upcycling.model_config(weights.model_config(), weights.folder)
        super().__init__(weights, upcycling, config, upcycling.start.seed)
        self._start = upcycling.start

    def made(self, name: str) -> torch.Tensor:
        """Copies of a weight, or a router's first value."""
        source, start = dense_tensor(name), self._start
        if source is None:
            return self.begun(name)
        value = self._weights.whole(source.name)
        num_experts = self._shapes[name][0]
        if not source.is_weight:
            return copies(value, num_experts, 0.0, start.seed, name)
        return copies(value.T, num_experts, start.noise, start.seed, name)

    def notes(self) -> list[str]:
        """Says whether the sparse model starts with the dense model's outputs."""
        feed_forward = getattr(self._config, self._section)
        assert isinstance(feed_forward, SparseMoEConfig)
        reasons = []
        if feed_forward.top_k == 1:
            reasons.append("with top_k 1 an expert's output is multiplied by its score")
        elif feed_forward.combine == "softmax":
            reasons.append("with combine softmax a token's weights sum to less than 1")
        if feed_forward.capacity_factor is not None:
            reasons.append("capacity_factor drops tokens")
        if self._start.noise:
            reasons.append(f"noise is {self._start.noise:g}")
        dense, experts = activation_of(self._config), feed_forward.activation
        if dense != experts:
            reasons.append(f"experts have the activation {experts}, and the dense layers {dense}")
        if reasons:
            return [f"at first its logits are not the dense model's: {'; '.join(reasons)}"]
        return ["at first its logits are the dense model's, but for rounding"]
