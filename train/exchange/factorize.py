"""`polyad convert --factorize`: initializes factorized experts from a dense model's weights.

Every expert starts as the dense matrix, or its best approximation of the factors' rank. For the
method see `model/mumoe/fitting.py`. Gates are initialized as in a new run.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from polyad.model.config import Config
from polyad.model.feedforward import GATED
from polyad.model.initialization import seeded_generator
from polyad.model.mumoe.base import Factorized
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.fitting import FITTED, Fit, components, equal_experts, fit
from polyad.model.settings import ModelSettings
from polyad.parallel.weights import Weights
from polyad.train.config.run import RunConfig
from polyad.train.exchange.change import Changed, Option, activation_of


class _Start(Config):
    """Keys of `--factorize` that are not in the feed-forward's section."""

    noise: Annotated[float, Field(ge=0)] = 0.1
    """Standard deviation of what is added to each expert's factor, which is one, or the identity; 1
    is that of a new run. Its mean over the experts is taken off."""
    seed: Annotated[int, Field(ge=0)] = RunConfig.model_fields["seed"].default
    """The seed of the noise, and of components that the dense matrix has no use for."""
    section: str | None = None
    """Which of a Mixer's feed-forwards; None: channel_feed_forward."""


class Factorizing(Option):
    """The value of `--factorize`: keys of `model.feed_forward`, noise and seed.

    Args:
        text: as in `factorization=tr,num_experts=[64],rank=38`; values in YAML.

    Raises:
        ConfigError: the number of experts is missing, a key is unknown or given twice, or noise or
            seed is invalid. Keys that depend on the dense model are checked by `model_config`.
    """

    done, kind = "factorized", "mumoe"
    start: _Start

    def __init__(self, text: str) -> None:
        example = "factorization=cp,num_experts=[64]"
        super().__init__("--factorize", text, _Start, MuMoEConfig, example)
        if isinstance(levels := self.keys["num_experts"], int):
            self.keys["num_experts"] = [levels]
        if (kind := self.keys.get("factorization", "cp")) not in FITTED:
            raise self.error(
                f"factorization: {kind!r} is not allowed: only {' and '.join(FITTED)} can start "
                "from a dense matrix"
            )

    def of(self, weights: Weights) -> "Factored":
        """The weights of the model with factorized experts."""
        return Factored(weights, self)

    def model_config(self, dense: ModelSettings, folder: Path) -> tuple[str, ModelSettings]:
        """Completes `Option.model_config` with the rank."""
        section, config = super().model_config(dense, folder)
        found, activation = getattr(config, section).activation, activation_of(dense)
        if (found in GATED) != (activation in GATED):
            raise self.error(
                f"activation: {found!r} does not fit: the dense layers of {folder} have "
                f"{activation}"
            )
        return section, config.filled()

    def keys_of(self, dense: ModelSettings) -> dict[str, Any]:
        """The dense activation, if it has a gate."""
        activation = activation_of(dense)
        return {"activation": activation} if activation in GATED else {}


class Factored(Changed):
    """A dense model's weights with its feed-forwards factorized into experts.

    Raises:
        ConfigError: they are not dense, or do not fit.
    """

    def __init__(self, weights: Weights, factorizing: Factorizing) -> None:
        section, config = factorizing.model_config(weights.model_config(), weights.folder)
        super().__init__(weights, factorizing, config, factorizing.start.seed)
        self._factorizing = factorizing
        self._section = re.compile(rf"blocks\.\d+\.{section}\.")
        self._pattern = re.compile(rf"blocks\.\d+\.{section}\.(up_gate|up|down)")
        found = getattr(config, section)
        assert isinstance(found, MuMoEConfig)
        self._feed_forward = found
        if not found.bias and f"blocks.0.{section}.up.bias" in weights.shapes():
            raise factorizing.error(
                f"bias: false does not fit: the dense layers of {self.folder} have biases"
            )
        self._sizes = {
            name: layer.sizes
            for name, layer in self._model.named_modules()
            if isinstance(layer, Factorized) and name.startswith("blocks.")
        }
        self._last: tuple[str, Fit] | None = None
        self._errors: dict[str, float] = {}

    def whole(self, name: str) -> torch.Tensor:
        """A weight like `Changed.whole`, except that a dense gate has the same name as the experts'
        gate."""
        return self.made(name) if self._section.match(name) else super().whole(name)

    def made(self, name: str) -> torch.Tensor:
        """A factor, or a gate's initial value."""
        start, (layer, _, kind) = self._factorizing.start, name.rpartition(".")
        if self._pattern.fullmatch(layer) is None:
            return self.begun(name)
        if kind == "input_factor":
            return self._fit(layer).input_factor
        if kind == "output_factor":
            return self._fit(layer).output_factor
        generator = seeded_generator(start.seed, f"{name}/noise")
        factorization = self._feed_forward.factorization
        return equal_experts(factorization, self._shapes[name], start.noise, generator)

    def _fit(self, layer: str) -> Fit:
        """The factors of a layer; those of the last layer are cached, since two are needed in
        turn."""
        if self._last is None or self._last[0] != layer:
            dense_CO, sizes = self._dense(layer), self._sizes[layer]
            first = self.begun(f"{layer}.input_factor")
            found = fit(self._feed_forward.factorization, sizes, dense_CO, first)
            self._last, self._errors[layer] = (layer, found), found.error
        return self._last[1]

    def _dense(self, layer: str) -> torch.Tensor:
        """A dense layer's matrix by which tokens are multiplied, with the bias as an extra row."""
        dense = re.sub(r"\.up_gate$", ".gate", layer)
        name, bias = f"{dense}.weight", f"{dense}.bias"
        dense_CO = self._weights.whole(name).T
        if self._sizes[layer].bias:
            has_one = bias in self._weights.shapes()
            bias_O = self._weights.whole(bias) if has_one else torch.zeros(dense_CO.shape[1])
            dense_CO = torch.cat([dense_CO, bias_O.unsqueeze(0)])
        if not dense_CO.isfinite().all():
            raise self._factorizing.error(
                f"{self.folder}: NaN or infinity in {name} or its bias, which cannot be factorized"
            )
        return dense_CO

    def notes(self) -> list[str]:
        """Notes whether outputs equal the dense model's, and each layer's approximation error."""
        reasons = []
        made = {n.rpartition(".")[2]: x for n, x in self._sizes.items() if n in self._errors}
        for which, sizes in made.items():
            rank = components(self._feed_forward.factorization, sizes)
            if rank < (full := min(sizes.input_rows, sizes.outputs)):
                reasons.append(f"the matrices of {which} have rank {rank} of {full}")
        found, dense = self._feed_forward.activation, activation_of(self._config)
        if found != dense:
            named = "exact GELU" if found == "gelu" else found
            reasons.append(f"experts use {named}, the dense layers {dense}")
        if self._feed_forward.gate_std and self._factorizing.start.noise:
            reasons.append(f"the gate starts uneven (gate_std {self._feed_forward.gate_std:g})")
        said = ["its initial outputs equal the dense model's, up to rounding"]
        if reasons:
            said = [f"its initial outputs differ from the dense model's: {'; '.join(reasons)}"]
        for layer, error in self._errors.items():
            said.append(f"{layer}: the factors lose {error:.2%} of the matrix (Frobenius norm)")
        if self._factorizing.start.noise == 0:
            said.append("noise is 0: all experts start equal and stay equal in training")
        return said
