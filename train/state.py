"""The state of a run that a checkpoint stores beside weights and optimizer state."""

import math
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

PACKAGES = ("torch", "deepspeed", "megatron-core", "tokenizers", "numpy", "pydantic")


@dataclass
class TrainState:
    """Progress of a run. The data position follows from `step` and the batch size."""

    step: int = 0
    """Optimizer steps done, including skipped ones, each of which has consumed its global batch."""
    samples: int = 0
    """Samples consumed."""
    skipped_steps: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last applied steps, against which spikes are judged."""
    recent_grad_norms: list[float] = field(default_factory=list)
    spikes: int = 0
    """Number of spikes in loss or gradient, whatever the reaction."""
    spikes_in_a_row: int = 0
    """Steps skipped for a spike since the last applied step."""
    unfinished: dict[str, Any] | None = None
    """The record of the last step if a signal interrupted its validation; otherwise None."""
    best_score: float | None = None
    """The best validation so far; None before there is one."""
    best_step: int = 0
    """The step of that validation."""
    validations_since_best: int = 0
    """Number of validations since then, none of them better."""
    first_loss: float | None = None
    """Training loss of the run's first step, in nats."""
    seconds: float = 0.0
    """Time spent in training steps, over all starts of the run."""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str | None = ""
    """None if the checkpoint was converted from a model without a tokenizer."""
    end_of_text: str | None = None
    """The token that ends each document of the data."""
    base_digest: str | None = None
    """A digest of the frozen weights in a run with LoRA."""
    teacher_step: int | None = None
    """The step of the teacher's checkpoint, if there is one."""
    vocab_size: int = 0
    huggingface: dict[str, Any] | None = None
    """Contents beside the weights of the other library's folder from which the run started: see
    `polyad.parallel.families.Origin`."""
    world_size: int = 1
    """Number of processes that wrote this."""
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `state.json`."""
        return asdict(self) | {"versions": package_versions(), "saved_at": time.time()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """Restores the state from `to_json`; keys of other versions are ignored."""
        fields: dict[str, Any] = {
            name: list(values[name]) if isinstance(values[name], tuple) else values[name]
            for name in cls.__dataclass_fields__
            if name in values
        }
        return cls(**fields)

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
