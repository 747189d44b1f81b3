"""Weights to convert, checked against their configuration, with notes about them."""

import math
from typing import Any

import torch
from tqdm import tqdm

from polyad.data.config import DataSettings
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.build import build_model
from polyad.parallel.adapted import AdaptedCheckpoint
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import Origin
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.tensor_folder import differing_shapes
from polyad.parallel.weights import Weights, origin_of
from polyad.train.config.run import parse_config
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed
from polyad.train.tasks.vocabulary import names_of, tokenizer_of


class Checked:
    """Weights to convert, with checks and notes about them.

    Args:
        weights: weights in any format.
        change: a change of the model; None: no change.
    """

    def __init__(self, weights: Weights, change: Change | None) -> None:
        self.tokenizer: Tokenizer | None = tokenizer_of(weights)
        self.notes: list[str] = []
        self.change = change
        self.adapted = weights if isinstance(weights, AdaptedCheckpoint) else None
        self._opened = weights
        self._weights: Weights | Changed = weights
        if change:
            self._weights = change.of(weights)
        self.folder = weights.folder
        self.config = self._weights.model_config()
        self.shapes = self._weights.shapes()
        self.bytes = 4 * sum(map(math.prod, self.shapes.values()))
        self.progress = tqdm(
            total=self.bytes, desc="converting", unit="B", unit_scale=True, disable=None
        )
        self._not_finite: list[str] = []
        note = getattr(weights, "note", None)
        if note is not None:
            self.notes.append(note)
        vocabulary = getattr(self.config, "vocab_size", None)
        if self.tokenizer and vocabulary and self.tokenizer.vocab_size > vocabulary:
            raise ConfigError(
                f"{self.folder}: its tokenizer has {self.tokenizer.vocab_size} tokens, its model "
                f"{vocabulary}"
            )

    @property
    def class_names(self) -> list[str] | None:
        """The class names; None if unknown.

        Raises:
            ConfigError: Their number differs from the model's number of classes.
        """
        names = names_of(self._opened)
        config: Any = self.config
        classes = getattr(config, "num_classes", None)
        classes = classes or getattr(getattr(config, "head", None), "num_classes", None)
        if names and classes and len(names) != classes:
            raise ConfigError(
                f"{self.folder}: names {len(names)} classes, but its model has {classes}"
            )
        return names

    @property
    def data(self) -> DataSettings | None:
        """The data settings of the run that trained them; None for other libraries' weights."""
        if not isinstance(self._opened, Checkpoint):
            return None
        origin = str(self._opened.folder / "config.yaml")
        return parse_config(self._opened.config_yaml, origin=origin).data

    @property
    def is_trained(self) -> bool:
        """Whether they were trained by a run, not just converted."""
        return isinstance(self._opened, Checkpoint) and self._opened.training_step > 0

    def origin(self) -> Origin | None:
        """Contents beside the weights of the other library's folder; None: they are not from such a
        folder of a decoder, or the kind of model has changed."""
        if (kept := origin_of(self._opened)) is None:
            return None
        origin = Origin.model_validate(kept)
        return origin if self.change is None else self.change.origin(origin)

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight."""
        value = self._weights.whole(name)
        if not all(end.isfinite() for end in value.aminmax()):  # both are NaN if any element is NaN
            self._not_finite.append(name)
        self.progress.update(value.nbytes)
        return value

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers of the model."""
        names = [name for name, _ in persistent_buffers(build_model(self.config))]
        return {name: self._weights.buffer(name) for name in names}

    def check_model(self) -> dict[str, tuple[int, ...]]:
        """Checks the weights against their configuration.

        Returns:
            Names and shapes in the model's order (a checkpoint has its shards' order).

        Raises:
            ConfigError: the first few differences.
        """
        model = build_model(self.config)
        ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if differing := differing_shapes(self.shapes, ours):
            raise ConfigError(f"{self.folder}: does not match its configuration: {differing}")
        return ours

    def note_what_was_made(self) -> None:
        """Adds the change's notes on its weights, and notes which are NaN or infinite."""
        if not isinstance(self._weights, Weights):
            self.notes += self._weights.notes()
        if names := self._not_finite:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(f"NaN or infinity in {names[0]}{more}: the written model is unusable")
