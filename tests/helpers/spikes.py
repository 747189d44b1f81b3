"""Runs with a bad batch: its loss or its gradient is many times that of others, wherever read."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from polyad.model.kernels import linear_cross_entropy as kernel
from polyad.train.start import find_start, open_plan
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.train import main
from tests.helpers.runs import run_and_listen, run_expecting_error


def run_with_bad_batches(config: Path, what: str, bad: tuple[int, ...], *overrides: str) -> int:
    """`polyad train` where some global batches are bad; gives steps done.

    Args:
        config: of the run.
        what: `loss`: 6 times as high, its gradient too; `gradient`: 400 times, at the same loss.
        bad: the batches.
        overrides: `key=value`.
    """
    with mock.patch.object(kernel, "linear_cross_entropy", spoiling(config, what, bad)):
        return main(config, overrides).step


def console_with_bad_batches(
    config: Path, what: str, bad: tuple[int, ...], *overrides: str
) -> tuple[int, str]:
    """As `run_with_bad_batches`; what it says beside it. Workers outlive a test's capture."""
    with mock.patch.object(kernel, "linear_cross_entropy", spoiling(config, what, bad)):
        return run_and_listen(config, *overrides)


def error_with_bad_batches(
    config: Path, what: str, bad: tuple[int, ...], *overrides: str
) -> tuple[str, str, int]:
    """As `run_with_bad_batches`; the error that it ends with: class, text, exit status."""
    with mock.patch.object(kernel, "linear_cross_entropy", spoiling(config, what, bad)):
        return run_expecting_error(config, *overrides)


def spoiling(config: Path, what: str, bad: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """The loss as ever, but for the samples of bad batches, known by their targets."""
    plan = find_start(open_plan(config, ["run.folder=" + str(config.parent / "no-such-run")], 1))
    size, samples = plan.config.train.global_batch_size, plan.task.samples
    rows = torch.stack([samples[b * size + i].target_ids_BT for b in bad for i in range(size)])

    usual = kernel.linear_cross_entropy

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
