"""Expert rewriting: one output is moved by the experts that a subpopulation uses.

    y_o + lambda abar^T a        abar: the mean coefficients of the subpopulation

Where the model is wrong about a subpopulation, its experts are told, and no weight is trained.

Source: Oldfield et al. 2024, section 4.2 (equation 5); the measures: appendix J, and the rewrite
score section 4.2.1 of the earlier version.

Shapes: B images, S experts of all levels side by side, G = 4 subpopulations: the output's value, 0
or 1, times the sensitive attribute's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def moved(output_B: Tensor, a_BS: Tensor, mean_S: Tensor, strength: float) -> Tensor:
    """The rewritten output of one class [B].

    Args:
        output_B: Its logit.
        a_BS: Coefficients of the head's experts.
        mean_S: Those of the subpopulation, abar.
        strength: lambda.
    """
    return output_B + strength * (a_BS @ mean_S)


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How right an output is about each of four subpopulations.

    The target is the subpopulation that a rewrite is made for.
    """

    accuracy_G: Tensor
    """Share of right images; NaN without any."""
    images_G: Tensor
    target: int
    """Which of the four."""

    def measures(self) -> dict[str, Any]:
        """The measures by name; None where a subpopulation is empty."""
        known_G = self.accuracy_G[self.images_G > 0]
        target = self.accuracy_G[self.target]
        counterpart = self.accuracy_G[self.target ^ 1]  # the other value of the sensitive attribute
        right = float((self.accuracy_G.nan_to_num() * self.images_G).sum())
        return {
            "accuracy": right / float(self.images_G.sum()),
            "target_accuracy": _number(target),
            "equality_of_opportunity": _number((target - counterpart).abs()),
            "standard_deviation": _number(known_G.std(correction=0)),
            "lowest_accuracy": _number(known_G.min()),
        }

    def rewrite_score(self, before: "Fairness") -> float | None:
        """What the target gained, without what changed elsewhere; 1 - its accuracy is the best.

        Args:
            before: The same of the model as it was.
        """
        change_G = (self.accuracy_G - before.accuracy_G).nan_to_num()
        others = float(change_G.abs().sum() - change_G[self.target].abs())
        return float(change_G[self.target]) - others if self.images_G[self.target] > 0 else None


def subpopulations(value_B: Tensor, sensitive_B: Tensor) -> Tensor:
    """The number of each image's subpopulation, 2 value + sensitive."""
    return 2 * value_B.long() + sensitive_B.long()


def fairness_of(right_G: Tensor, images_G: Tensor, target: int) -> Fairness:
    """The measures from counts; images of a subpopulation, and those that are right."""
    accuracy_G = torch.where(images_G > 0, right_G / images_G.clamp_min(1), torch.nan)
    return Fairness(accuracy_G=accuracy_G, images_G=images_G, target=target)


def _number(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None
