"""`polyad compare`: which tokens are routed differently by two checkpoints of a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import Weights, load_model, open_weights
from polyad.train.config.text import flatten
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import (
    Differences,
    Fluctuation,
    encode,
    mean,
)
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.measures.measure import Measure, Result, Subject
from polyad.train.reading import Evaluated, Reading
from polyad.train.results import aligned
from polyad.train.tasks.samples import probe_of

PROBE_UNITS = 65_536
"""Default for the approximate number of tokens or images to compare."""
FREE_KEYS = (
    "compile", "recompute", "dropout", "initializer_range", "feed_forward.experts",
    "feed_forward.pool", "feed_forward.pool_least", "feed_forward.pool_most",
    "end_of_text_id",
)  # fmt: skip
"""Keys of a model that do not affect its outputs in evaluation."""


@dataclass(frozen=True, kw_only=True)
class Compared(Result):
    """How the routing of two checkpoints differs."""

    first: ClassVar[tuple[str, ...]] = (
        *("checkpoint", "step", "compared_with", "compared_step"),
        *("data", "split", "data_kind"),
    )
    last: ClassVar[tuple[str, ...]] = ("precision", "processes", "seconds")

    compared_with: str
    compared_step: int
    unit: str
    """The unit read: tokens or images."""
    units: int
    about: Mapping[str, int]
    """Named numbers that describe the samples."""
    layers: Mapping[str, Fluctuation]
    """Layers by name."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "compared_with": self.compared_with,
            "compared_step": self.compared_step,
            f"probe_{self.unit}": self.units,
            **self.about,
            "layers": self.layers,
            "mean": mean(self.layers),
        }

    def source(self, data: str) -> list[tuple[str, str]]:
        """The other checkpoint, and what both read."""
        windows = self.about.get("probe_windows")
        among = "" if windows is None else f", in {windows:,} windows"
        read = f"{self.units:,} {self.unit} of {data}{among}, spread evenly over it"
        other = f"{self.compared_with} (step {self.compared_step:,})"
        return [("compared with", other), ("probe set", read)]

    def rows(self) -> list[str]:
        """A table of the layers."""
        table: list[tuple[str, ...]] = [
            ("", "different first expert", "different experts", "entropy ratio")
        ]
        measured = {name: layer.to_json() for name, layer in self.layers.items()}
        for name, layer in (measured | {"mean": mean(self.layers)}).items():
            shares = (f"{100 * layer[share]:.2f}%" for share in ("top1", "set"))
            table.append((name, *shares, f"{layer['entropy_ratio']:.4f}"))
        return ["", *aligned(table)]


class Comparison(Measure):
    """Accumulates the differences in routing between two models on the same samples.

    Both models and one batch of data are in memory.

    Args:
        subject: the model that reads, and the samples for both.
        opened: its weights, and the data.
        other: the other weights.
        before: the model of the other weights.
    """

    name = "compare"
    doing = "comparing routing"
    needs_whole = "two models read each batch together"
    told = "compare"

    def __init__(
        self, subject: Subject, opened: Evaluated, other: Weights, before: nn.Module
    ) -> None:
        super().__init__(subject)
        device = next(before.parameters()).device
        self._opened, self._other, self._before = opened, other, before
        self._differences = Differences(subject.layers, device)
        self._units = torch.zeros(1, dtype=torch.float64, device=device)

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> tuple[Weights, int]:
        """Opens the weights `other`, and takes `units` from the options: the minimum number of
        tokens (in whole windows) or images to compare, spread evenly over the split."""
        other = open_weights(options["other"])
        _check_pair(opened, opened.weights, other)
        return other, options.get("units", PROBE_UNITS)

    @classmethod
    def of(
        cls, opened: Evaluated, split: str, asked: tuple[Weights, int], model: nn.Module
    ) -> Self:
        """The measure of `polyad compare`, with the result of `checked`."""
        other, units = asked
        device = next(model.parameters()).device
        before = load_model(other, device, opened.config.train.precision)
        samples = probe_of(opened.task, units, split)
        subject = Subject(model, routed_layers(model), samples, opened.batch_size)
        return cls(subject, opened, other, before)

    def add(self, reading: Reading) -> None:
        """Adds a batch, which the other model reads, too."""
        layers, samples = self.subject.layers, self.subject.samples
        with deciding(self._before, layers) as decisions:
            samples.forward(self._before, reading.batch, {})
        before = reading.counted(decisions)
        for number, layer in enumerate(layers):
            both = (encode(each[layer.name]) for each in (reading.decisions, before))
            self._differences.add(number, *both)
        counted_M = reading.counted_M
        self._units += len(reading.number_R if counted_M is None else counted_M)

    def result(self, summed: Summed = lambda values: values) -> Compared:
        """The result."""
        layers = self._differences.result(summed)
        for name, layer in layers.items():
            if not math.isfinite(layer.entropy + layer.entropy_before):
                raise ConfigError(
                    f"compare: the scores of {name} are not finite in "
                    f"{self._opened.weights.folder} or in what it is compared with: the weights "
                    f"hold NaN or inf, or are too large"
                )
        samples = self.subject.samples
        return Compared(
            compared_with=str(self._other.folder),
            compared_step=self._other.training_step if isinstance(self._other, Checkpoint) else 0,
            unit=f"{self._opened.task.unit.name}s",
            units=int(summed(self._units)),
            about=samples.about(),
            layers=layers,
        )


def _check_pair(opened: Evaluated, own: Weights, other: Weights) -> None:
    """Checks that both belong to one model with experts, and fit the tokens of the probe set."""
    ours, theirs = (
        flatten(each.model_config().filled().model_dump(mode="json")) for each in (own, other)
    )
    # Rotary positions are not limited.
    free = FREE_KEYS if ours.get("rotary.theta") is None else (*FREE_KEYS, "sequence_length")
    changed = [
        f"model.{key}: {theirs.get(key)!r} there, {ours.get(key)!r} in {own.folder}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and key not in free
    ]
    if changed:
        more = f"; and {len(changed) - 2} more" if len(changed) > 2 else ""
        raise ConfigError(
            f"compare: {other.folder}: is a different model: {'; '.join(changed[:2])}{more}"
        )
    if not opened.config.model.has_experts():
        raise ConfigError(
            f"compare: {own.folder} has model.feed_forward.kind: dense, and no "
            f"experts whose choice could be compared"
        )
    opened.task.check_weights(other, f"checkpoint of --with {other.folder}")
    known = [c.state.data_fingerprint for c in (own, other) if isinstance(c, Checkpoint)]
    if len({*known}) > 1 and not opened.data_is_named:
        raise ConfigError(
            f"compare: {other.folder}: was trained on other data than {own.folder}; use --data to "
            "name the text that both are to read"
        )
