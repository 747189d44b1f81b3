"""`polyad compare`: which tokens are routed differently by two checkpoints of a model."""

import math
from typing import Any, Self

import torch
from torch import nn

from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import Weights, load_model, open_weights
from polyad.train.config.text import flatten
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import (
    Differences,
    encode,
    mean,
)
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.measures.measure import Measure, Subject
from polyad.train.reading import Evaluated, Reading
from polyad.train.results import Tables
from polyad.train.tasks.samples import probe_of

PROBE_UNITS = 65_536
"""Default for the approximate number of tokens or images to compare."""
FREE_KEYS = (
    "compile", "recompute", "dropout", "initializer_range", "feed_forward.experts",
    "feed_forward.pool", "feed_forward.pool_least", "feed_forward.pool_most",
    "end_of_text_id",
)  # fmt: skip
"""Keys of a model that do not affect its outputs in evaluation."""


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
    label = "compare"

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
        cls, opened: Evaluated, split: str, settings: tuple[Weights, int], model: nn.Module
    ) -> Self:
        """The measure of `polyad compare`, with the result of `checked`."""
        other, units = settings
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

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        layers = self._differences.result(summed)
        for row in layers.to_dict("records"):
            if not math.isfinite(row["entropy"] + row["compared_entropy"]):
                raise ConfigError(
                    f"compare: the scores of {row['module']} are not finite in "
                    f"{self._opened.weights.folder} or in what it is compared with: the weights "
                    f"hold NaN or inf, or are too large"
                )
        other = self._other
        facts = {
            "compared_with": str(other.folder),
            "compared_step": other.training_step if isinstance(other, Checkpoint) else 0,
            f"probe_{self._opened.task.unit.name}s": int(summed(self._units)),
            **self.subject.samples.about(),
            **{f"mean_{name}": value for name, value in mean(layers).items()},
        }
        title = "top1, set: share of the tokens whose first expert, or whose set of experts differs"
        return Tables(facts=facts, frames={"layers": layers}, titles={"layers": title})


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
