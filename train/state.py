"""Where a run stands: what a checkpoint holds beside weights and optimizer state."""

import math
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

PACKAGES = ("torch", "deepspeed", "megatron-core", "tokenizers", "numpy", "pydantic")


@dataclass
class TrainState:
    """Progress of a run. The data position follows from `step`, the batch size and `left_out`."""

    step: int = 0
    """Optimizer steps done, skipped ones among them: each has consumed its global batch."""
    samples: int = 0
    """Samples consumed."""
    skipped_steps: int = 0
    """Steps left out because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps that were applied, which tell what a spike is."""
    recent_grad_norms: list[float] = field(default_factory=list)
    spikes: int = 0
    """Steps whose loss or gradient stood out, whatever was done about it."""
    spikes_in_a_row: int = 0
    """Steps skipped for a spike since the last step that was applied."""
    left_out: list[int] = field(default_factory=list)
    """Global batches that the run went back to a checkpoint without; see `polyad.data.sampler`."""
    unfinished: dict[str, Any] | None = None
    """The record of the last step, where a signal came while it was validated; otherwise None."""
    best_score: float | None = None
    """The best validation so far; None before there is one."""
    best_step: int = 0
    """The step after which that validation was."""
    validations_since_best: int = 0
    """Validations since then, none of them better."""
    first_loss: float | None = None
    """Training loss of the run's first step, in nats."""
    seconds: float = 0.0
    """Time spent in training steps, over all processes' lives."""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str | None = ""
    """None in a checkpoint that was converted from a model without a tokenizer."""
    end_of_text: str | None = None
    """The token that ends each document of the data."""
    base_digest: str | None = None
    """A digest of the frozen weights, in a run with LoRA."""
    teacher_step: int | None = None
    """The step of the checkpoint that the run learns from, if it learns from one."""
    vocab_size: int = 0
    huggingface: dict[str, Any] | None = None
    """What another library's folder, which the run began with, has beside its weights: see
    `polyad.parallel.families.Origin`."""
    world_size: int = 1
    """Processes that wrote this."""
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `state.json`."""
        return asdict(self) | {"versions": package_versions(), "saved_at": time.time()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """The state that `to_json` wrote; keys that other versions wrote are ignored."""
        known: dict[str, Any] = {
            name: list(values[name]) if isinstance(values[name], tuple) else values[name]
            for name in cls.__dataclass_fields__
            if name in values
        }
        return cls(**known)

    def judge(self, score: float, *, higher_is_better: bool) -> bool:
        """Counts a validation.

        Args:
            score: of the newest validation; one that is not finite is no better than any.
            higher_is_better: or lower, as of a loss.

        Returns:
            Whether it is better than all before.
        """
        best = self.best_score
        better = best is None or (score > best if higher_is_better else score < best)
        if better and math.isfinite(score):
            self.best_score, self.best_step, self.validations_since_best = score, self.step, 0
            return True
        self.validations_since_best += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """Whether the run ends: so many validations in a row were no better than the best.

        Args:
            patience: `evaluation.patience`; None: never.
        """
        return patience is not None and self.validations_since_best >= patience

    def why_it_is_over(self, patience: int | None) -> str:
        """The reason that `is_over` has, for people."""
        best = "none" if self.best_score is None else f"{self.best_score:.4f}, at step "
        best += "" if self.best_score is None else f"{self.best_step:,}"
        return (
            f"early stopping after step {self.step:,}: {self.validations_since_best} validations "
            f"in a row were not better (evaluation.patience: {patience}); best score: {best}"
        )


def package_versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
