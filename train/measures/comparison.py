"""`polyad compare`: which tokens are routed differently by two checkpoints of a model."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.source import differing_shapes
from polyad.parallel.weights import device_of, load_model, open_weights
from polyad.train.errors import ConfigError
from polyad.train.experts.fluctuation import Differences, encode, mean
from polyad.train.experts.information import Summed, not_finite
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.measures.measure import Measure
from polyad.train.reading import TOKENS, EvaluationContext, ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.samples import probe_of


@dataclass(kw_only=True)
class Comparison(Measure):
    """Accumulates the differences in routing between two models on the same samples.

    Both models and one batch of data are in memory.
    """

    name = "compare"
    doing = "comparing routing"
    needs_whole = "two models read each batch together"

    other: Path
    """The other weights."""
    tokens: int = TOKENS
    """Minimum number of tokens (in whole windows) or images to compare, spread evenly over the
    split."""

    def check(self, opened: EvaluationContext) -> None:
        """Opens both, which must belong to one model with experts."""
        self._opened, self._other = opened, open_weights(self.other)
        own, other = opened.weights, self._other
        if differing := differing_shapes(other.shapes(), own.shapes()):
            raise ConfigError(
                f"compare: {other.folder}: is a different model than {own.folder}: {differing}"
            )
        if not opened.config.model.has_experts():
            raise ConfigError(
                f"compare: {own.folder} has model.feed_forward.kind: dense, and no "
                f"experts whose choice could be compared"
            )
        opened.task.check_weights(other, f"checkpoint of --with {other.folder}")

    def subject_of(self, opened: EvaluationContext, model: nn.Module) -> Subject:
        """The probe set, and all layers in blocks; loads the other model."""
        device, layers = device_of(model), routed_layers(model)
        self._before = load_model(self._other, device, opened.config.train.precision)
        self._differences = Differences(layers, device)
        self._units = torch.zeros(1, dtype=torch.float64, device=device)
        samples = probe_of(opened.task, self.tokens, opened.split)
        return Subject(model, layers, samples, opened.batch_size)

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch, which the other model reads, too."""
        layers, samples = self.subject.layers, self.subject.samples
        with deciding(self._before, layers) as decisions:
            samples.forward(self._before, forward_pass.batch, {})
        before = forward_pass.counted(decisions)
        for number, layer in enumerate(layers):
            now = encode(forward_pass.decisions[layer.name])
            self._differences.add(number, now, encode(before[layer.name]))
        counted_M = forward_pass.counted_M
        self._units += len(forward_pass.number_R if counted_M is None else counted_M)

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        layers = self._differences.result(summed)
        for row in layers.to_dict("records"):
            if not math.isfinite(row["entropy"] + row["compared_entropy"]):
                both = f"{self._opened.weights.folder} or {self._other.folder}"
                raise ConfigError(not_finite(f"compare: {both}: scores of {row['module']}"))
        other = self._other
        facts = {
            "compared_with": str(other.folder),
            "compared_step": other.training_step if isinstance(other, Checkpoint) else 0,
            f"probe_{self._opened.task.unit.name}s": int(summed(self._units)),
            **{f"mean_{name}": value for name, value in mean(layers).items()},
        }
        title = "top1, set: share of the tokens whose first expert, or whose set of experts differs"
        return Tables(facts=facts, frames={"layers": layers}, titles={"layers": title})
