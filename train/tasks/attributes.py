"""Attribute classification: which of several attributes each image has, as in CelebA.

Shapes: B images of a micro-batch, N of a split, K attributes, F numbers about each image.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polyad.data.images.config import AttributeDataConfig
from polyad.data.images.samples import ImageBatch
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.labelled import Outcomes
from polyad.train.tasks.task import Predictor, Score


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
    per_class = "per_attribute"
    has_attributes = True

    def outcomes(self, model: Predictor, batch: ImageBatch) -> Tensor:
        """Loss, then the attributes, then those predicted: a logit above 0 counts as yes."""
        logits_BK, losses_B = self.logits(model, batch)
        parts = (losses_B.unsqueeze(1), batch.labels_B > 0, logits_BK > 0)
        return torch.cat([part.double() for part in parts], dim=1)

    def scores_of(self, outcomes_NF: Outcomes) -> dict[str, float]:
        """Accuracy over attributes and over whole images, and the loss."""
        losses_N, has_NK, predicted_NK = _parts(outcomes_NF)
        right_NK = has_NK == predicted_NK
        return {
            "accuracy": float(right_NK.mean()),
            "all_right": float(right_NK.all(1).mean()),
            "loss": float(losses_N.mean()),
        }

    def by_class(self, outcomes_NF: Outcomes) -> dict[str, dict[str, Any]]:
        """Of each attribute the accuracy, how many images have it, and which share of these is
        found; None without such images."""
        _, has_NK, predicted_NK = _parts(outcomes_NF)
        scores = {}
        for name, has_N, predicted_N in zip(
            self.data.class_names, has_NK.T, predicted_NK.T, strict=True
        ):
            rate = float(predicted_N[has_N].mean()) if has_N.any() else None
            accuracy, images = float((has_N == predicted_N).mean()), int(has_N.sum())
            scores[name] = {"accuracy": accuracy, "images": images, "true_positive_rate": rate}
        return scores


def _parts(outcomes_NF: Outcomes) -> tuple[Any, Any, Any]:
    """Losses [N], and attributes and those predicted [N, K]."""
    has_NK, predicted_NK = np.split(outcomes_NF[:, 1:] > 0, 2, axis=1)
    return outcomes_NF[:, 0], has_NK, predicted_NK
