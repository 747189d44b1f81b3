"""The state of a run that a checkpoint stores beside weights and optimizer state."""

import math
import platform
import time
from importlib.metadata import version
from typing import Any

from pydantic import ConfigDict, Field

from polyad.parallel.checkpoint.format import State

PACKAGES = ("torch", "deepspeed", "megatron-core", "tokenizers", "numpy", "pydantic")


class TrainState(State):
    """Progress of a run. The data position follows from `step` and the batch size.

    `step` counts optimizer steps including skipped ones, each of which has consumed its global
    batch. `unfinished` is set if a signal interrupted the validation of the last step.
    """

    model_config = ConfigDict(frozen=False, extra="ignore")

    samples: int = 0
    """Samples consumed."""
    skipped_steps: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    recent_losses: list[float] = Field(default_factory=list)
    """Losses of the last applied steps, against which spikes are judged."""
    recent_grad_norms: list[float] = Field(default_factory=list)
    spikes_in_a_row: int = 0
    """Steps skipped for a spike since the last applied step."""
    best_score: float | None = None
    """The best validation so far; None before there is one."""
    best_step: int = 0
    """The step of that validation."""
    validations_since_best: int = 0
    """Number of validations since then, none of them better."""
    tokenizer_fingerprint: str | None = ""
    """None if the checkpoint was converted from a model without a tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `state.json`."""
        return self.model_dump() | {"versions": package_versions(), "saved_at": time.time()}

    def judge(self, score: float, *, higher_is_better: bool) -> bool:
        """Records a validation.

        Args:
            score: score of the newest validation; never better than others if not finite.
            higher_is_better: false for a loss.

        Returns:
            Whether it is the best so far.
        """
        best = self.best_score
        better = best is None or (score > best if higher_is_better else score < best)
        if better and math.isfinite(score):
            self.best_score, self.best_step, self.validations_since_best = score, self.step, 0
            return True
        self.validations_since_best += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """Whether the run ends early because `patience` validations in a row brought no
        improvement.

        Args:
            patience: `evaluation.patience`; None: never.
        """
        return patience is not None and self.validations_since_best >= patience

    def why_it_is_over(self, patience: int | None) -> str:
        """The reason for `is_over` in words."""
        best = "none" if self.best_score is None else f"{self.best_score:.4f}, at step "
        best += "" if self.best_score is None else f"{self.best_step:,}"
        return (
            f"early stopping after step {self.step:,}: {self.validations_since_best} validations "
            f"in a row were not better (evaluation.patience: {patience}); best score: {best}"
        )


def package_versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
