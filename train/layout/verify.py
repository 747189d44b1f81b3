"""Comparison of a layout with one process, number by number, and the result."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyad.model.build import has_experts
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.config import ParallelConfig
from polyad.train.config.adaptation import model_of
from polyad.train.config.run import RunConfig
from polyad.train.layout.small import norms_over_batch
from polyad.train.layout.trial import GRADIENT, Trial, run_trial

ALLOWED = 1e-5
"""Maximum relative difference from the summation order in fp32; a wrong scale exceeds it."""
SENSITIVE = 100
"""Multiple of the effect of one rounding of each weight that is allowed, because a gate after a
BatchNorm amplifies rounding."""
SMALL = 1e-6
"""Gradients below this share of the largest are zero up to rounding, such as a bias before a
softmax."""


class Difference(NamedTuple):
    """A difference from the results of one process."""

    kind: str
    """`loss`, `gradient norm`, `gradient`, `weight` or `checkpoint`."""
    name: str
    """Name of the step, the parameter, or the tensor and its field."""
    relative: float
    """Largest difference, as a share of the largest number."""
    place: str = ""
    """Position of the largest difference."""
    allowed: float = 0.0
    """Difference that rounding can explain."""

    @property
    def is_wrong(self) -> bool:
        """Whether it is larger than rounding explains."""
        # Not `>`, since NaN is wrong, too.
        return not self.relative <= self.allowed


def differences(
    config: RunConfig, ours: Trial, theirs: Trial, nudged: Trial, again: Checkpoint
) -> Iterator[Difference]:
    """Compares all numbers of two trials.

    Args:
        config: configuration of both.
        ours: trial of a layout.
        theirs: trial of one process.
        nudged: trial of one process with weights changed by one rounding.
        again: their trained checkpoint after loading and saving by the layout.
    """
    for kind, *numbers in (
        ("loss", ours.losses, theirs.losses, nudged.losses),
        ("gradient norm", ours.grad_norms, theirs.grad_norms, nudged.grad_norms),
    ):
        for step, (mine, wanted, moved) in enumerate(zip(*numbers, strict=True), start=1):
            scale = max(abs(wanted), 1e-12)
            allowed = _allowed(abs(moved - wanted) / scale)
            yield Difference(kind, f"step {step}", abs(mine - wanted) / scale, allowed=allowed)
    trials = (Checkpoint(trial.gradients) for trial in (ours, theirs, nudged))
    yield from _gradients(config, *trials)
    for optimizer in ("descended", "trained"):
        after = (Checkpoint(getattr(trial, optimizer)) for trial in (ours, theirs, nudged))
        name = "sgd" if optimizer == "descended" else config.optimizer.kind
        yield from _weights(name, Checkpoint(theirs.gradients), *after)
    yield from _tensors(again, Checkpoint(theirs.trained))


def _allowed(sensitivity: float) -> float:
    return max(ALLOWED, SENSITIVE * sensitivity)


def _gradients(
    config: RunConfig, ours: Checkpoint, theirs: Checkpoint, nudged: Checkpoint
) -> Iterator[Difference]:
    names = [name for name, fields in theirs.tensors.items() if GRADIENT in fields]
    whole = {name: theirs.whole(name, GRADIENT) for name in names}
    least = SMALL * max(gradient.abs().max().item() for gradient in whole.values())
    model = model_of(config)
    for name in names:
        mine, wanted = ours.whole(name, GRADIENT), whole[name]
        scale = max(wanted.abs().max().item(), least)
        apart = (mine - wanted).abs() / scale
        rounding = ((nudged.whole(name, GRADIENT) - wanted).abs().max() / scale).item()
        place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
        where = f"expert {place[0]}, {place[1:]}" if has_experts(model, name) else f"{place}"
        yield Difference("gradient", name, apart.max().item(), where, _allowed(rounding))


def _weights(
    optimizer: str, before: Checkpoint, ours: Checkpoint, theirs: Checkpoint, nudged: Checkpoint
) -> Iterator[Difference]:
    """Differences in trained weights, as shares of how far they have moved."""
    for name, fields in theirs.tensors.items():
        if MASTER not in fields:
            continue
        wanted = theirs.whole(name, MASTER)
        least = torch.finfo(wanted.dtype).eps * wanted.norm().item()  # one rounding
        scale = max((wanted - before.whole(name, MASTER)).norm().item(), least, SMALL)
        apart, moved = ((each.whole(name, MASTER) - wanted).norm() for each in (ours, nudged))
        rounding = _allowed((moved / scale).item())
        yield Difference("weight", f"{name} ({optimizer})", (apart / scale).item(), "", rounding)


def _tensors(ours: Checkpoint, theirs: Checkpoint) -> Iterator[Difference]:
    """Differences in loaded and saved weights, moments and buffers, which must match bit for
    bit."""
    for name, fields in theirs.tensors.items():
        for field in fields:
            if field == "random":  # generator states, one per process
                continue
            same = field in ours.tensors.get(name, {}) and torch.equal(
                ours.whole(name, field), theirs.whole(name, field)
            )
            yield Difference("checkpoint", f"{name} ({field})", 0.0 if same else math.inf)


def worst(found: Sequence[Difference], kind: str) -> Difference:
    """The largest difference of a kind."""
    return max(
        (each for each in found if each.kind == kind),
        key=lambda each: math.inf if math.isnan(each.relative) else each.relative,
    )


KINDS = ("loss", "gradient norm", "gradient", "weight", "checkpoint")
NAMED = 10
"""Maximum number of differences named in the result."""


def alone(config: RunConfig, data_parallel_size: int) -> RunConfig:
    """The same small configuration for one process, without sharding."""
    simple = ParallelConfig(timeout_minutes=config.parallel.timeout_minutes)
    train = config.train
    if norms_over_batch(config.model):
        # Its means are over the samples of all processes, so one process takes as many at once.
        micro = train.micro_batch_size * data_parallel_size
        train = train.model_copy(update={"micro_batch_size": micro})
    return config.model_copy(update={"parallel": simple, "train": train})


class Reference(NamedTuple):
    """Results of one process."""

    trial: Trial
    nudged: Trial
    """The same with weights changed by one rounding."""


def run_alone(config: RunConfig, folder: Path) -> Reference:
    """Computes the reference in this process alone."""
    world = comm.initialize()
    trials = [run_trial(config, world, folder / str(n), nudged=bool(n)) for n in range(2)]
    return Reference(*trials)


def result_of(small: RunConfig, world: comm.World, found: list[Difference]) -> dict[str, Any]:
    """The result as JSON values."""
    wrong = [each for each in found if each.is_wrong]
    largest = {
        kind: {
            "compared": sum(each.kind == kind for each in found),
            "largest_difference": worst(found, kind).relative,
            "of": worst(found, kind).name,
        }
        for kind in KINDS
    }
    return {
        "processes": world.size,
        "data_parallel_size": world.data_parallel_size,
        "tensor_parallel_size": world.tensor_parallel_size,
        "expert_parallel_size": world.expert_parallel_size,
        "sequence_parallel": small.parallel.sequence_parallel,
        "zero_stage": small.parallel.zero_stage,
        "device": world.device.type,
        "equal": not wrong,
        "differences": largest,
        "wrong": [each._asdict() for each in wrong[:NAMED]],
        "wrong_in_all": len(wrong),
    }
