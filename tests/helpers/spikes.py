"""Runs with a bad batch: its loss or its gradient is many times that of others, wherever read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from polyad.model import heads
from polyad.train.start import find_start, open_plan
from polyad.train.tasks.distillation import cross_entropy


def with_bad_batches(
    train: Callable[..., Any], config: Path, what: str, bad: tuple[int, ...], *overrides: str
) -> Any:
    """Trains where some global batches are bad.

    Args:
        train: a function that trains, whose result this is.
        config: of the run.
        what: `loss`: 6 times as high, its gradient too; `gradient`: 400 times, at the same loss.
        bad: the batches.
        overrides: `key=value`.
    """
    with mock.patch.object(heads, "linear_cross_entropy", spoiling(config, what, bad)):
        return train(config, *overrides)


def spoiling(config: Path, what: str, bad: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """The loss as ever, but for the samples of bad batches, known by their targets."""
    plan = find_start(open_plan(config, ["run.folder=" + str(config.parent / "no-such-run")], 1))
    size, samples = plan.config.train.global_batch_size, plan.task.samples
    rows = torch.stack([samples[b * size + i].target_ids_BT for b in bad for i in range(size)])

    usual = heads.linear_cross_entropy

    def loss(
        x: torch.Tensor, weight: torch.Tensor, flat: torch.Tensor, part: object, bias: None = None
    ) -> torch.Tensor:
        targets = flat.view(-1, rows.shape[1])
        hit = (targets[:, None] == rows[None].to(targets.device)).all(-1).any(-1)[:, None]
        if not hit.any():
            return usual(x, weight, flat, part, bias)  # type: ignore[arg-type]
        plain = cross_entropy(x @ weight.t(), flat).view_as(targets)
        factor = torch.where(hit, 6.0 if what == "loss" else 400.0, 1.0)
        if what == "loss":
            return (plain * factor).mean()
        return (plain + (factor - 1) * (plain - plain.detach())).mean()

    return loss
