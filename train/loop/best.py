"""The best validation of a run, and whether the run ends because validation stopped improving."""

import math
from collections.abc import Mapping

from polyad.train.state import TrainState


def not_finite(scores: Mapping[str, float], validation_score: str) -> str | None:
    """What makes a validation a bad one: its first score that is NaN or infinite; None: none.

    An accuracy is finite whatever the logits are, so the loss counts beside it.

    Args:
        scores: of the validation.
        validation_score: the most important key of them.
    """
    for key in (validation_score, "validation_loss"):
        if key in scores and not math.isfinite(scores[key]):
            return f"{key} is {scores[key]}"
    return None


def judge(state: TrainState, score: float, *, higher_is_better: bool) -> bool:
    """Counts a validation.

    Args:
        state: of the run; changed in place.
        score: of the newest validation; one that is not finite is no better than any.
        higher_is_better: or lower, as of a loss.

    Returns:
        Whether it is better than all before.
    """
    best = state.best_score
    better = best is None or (score > best if higher_is_better else score < best)
    if better and math.isfinite(score):
        state.best_score, state.best_step, state.validations_since_best = score, state.step, 0
        return True
    state.validations_since_best += 1
    return False


def is_over(state: TrainState, patience: int | None) -> bool:
    """Whether a run ends: as many validations in a row as `patience` were no better than the best.

    Args:
        state: of the run.
        patience: `evaluation.patience`; None: never.
    """
    return patience is not None and state.validations_since_best >= patience


def why_it_is_over(state: TrainState, patience: int | None) -> str:
    """The reason, for people."""
    best = "none" if state.best_score is None else f"{state.best_score:.4f}, at step "
    best += "" if state.best_score is None else f"{state.best_step:,}"
    return (
        f"the run ends early after step {state.step:,}: {state.validations_since_best} validations "
        f"in a row were no better (evaluation.patience: {patience}); the best: {best}"
    )
