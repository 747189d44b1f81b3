"""Attribute classification: which of several attributes each image has, as in CelebA.

Shapes: B images of a micro-batch, K attributes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polyad.data.images.config import AttributeDataConfig
from polyad.parallel import comm
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.scores import Counted
from polyad.train.tasks.task import Score


class AttributeClassification(ImageClassification):
    """Predicts the attributes of each image, with one logit per attribute."""

    data_settings = AttributeDataConfig
    scores = (
        Score("accuracy", "accuracy", 4, "of attributes"),
        Score("all_right", "all correct", 4, "of images"),
        Score("loss", "loss", 4, "nats per image"),
    )
    validation_score: ClassVar[str] = "validation_accuracy"
    validated = ("accuracy", "all_right", "loss")
    classes_are = "attributes"
    has_attributes = True

    def counting(self, device: torch.device) -> Counted:
        """Sums for the scores of a split."""
        return CountedAttributes(len(self.data.class_names), device)


class AttributeScore(NamedTuple):
    """How well one attribute is predicted."""

    accuracy: float
    images: int
    """Number of images that have the attribute."""
    true_positive_rate: float | None
    """Recall: the share of those images that the model finds."""


@dataclass(frozen=True, kw_only=True)
class AttributeTotals:
    """The scores of images that have attributes."""

    accuracy: float
    all_right: float
    loss: float
    images_scored: int
    per_attribute: Mapping[str, AttributeScore]

    @property
    def accuracies(self) -> Mapping[str, float | None]:
        """The accuracy of each attribute."""
        return {name: each.accuracy for name, each in self.per_attribute.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dict(vars(self))


class CountedAttributes:
    """Sums over images that have attributes; a logit above 0 counts as yes."""

    def __init__(self, attributes: int, device: torch.device) -> None:
        self._totals_3 = torch.zeros(3, dtype=torch.float64, device=device)
        self._sums_K3 = torch.zeros(attributes, 3, dtype=torch.float64, device=device)

    def add(self, logits_BK: Tensor, labels_BK: Tensor, losses_B: Tensor) -> None:
        """Counts images; none may be padding of the batch."""
        has_BK = labels_BK > 0
        right_BK = (logits_BK > 0) == has_BK
        ones_B = torch.ones_like(losses_B, dtype=torch.float64)
        sums = (losses_B.double(), right_BK.all(-1).double(), ones_B)
        self._totals_3 += torch.stack([each_B.sum() for each_B in sums])
        of_each = (right_BK, has_BK, right_BK & has_BK)
        self._sums_K3 += torch.stack([each_BK.double().sum(0) for each_BK in of_each], dim=-1)

    def result(self, world: comm.World, names: Sequence[str]) -> AttributeTotals:
        """The scores over all processes."""
        parts = torch.cat([self._totals_3, self._sums_K3.flatten()])
        summed = comm.sum_over_samples(parts, world).cpu()
        loss, all_right, count = summed[:3].tolist()
        sums = summed[3:].view(-1, 3).tolist()
        return AttributeTotals(
            accuracy=sum(right for right, _, _ in sums) / (count * len(sums)),
            all_right=all_right / count,
            loss=loss / count,
            images_scored=int(count),
            per_attribute={
                name: AttributeScore(right / count, int(images), found / images if images else None)
                for name, (right, images, found) in zip(names, sums, strict=True)
            },
        )
