"""Image classification, and which of several attributes each image has, as in CelebA.

Shapes: B images of a micro-batch, N of a split, C channels, H x W pixels, K classes or attributes,
F numbers about each image.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Subset

from polyad.data.images.augmentation import GaussianNoise
from polyad.data.images.config import AttributeDataConfig, ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import EvaluationImages, ImageBatch, ImageSamples
from polyad.model.heads import HEAD
from polyad.model.output import RoutingStats
from polyad.model.vision import ImageSettings
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.tasks.labelled import (
    LabelledTask,
    Outcomes,
    calibration_error,
    class_scores,
    file_of_classes,
)
from polyad.train.tasks.pixels import mix_images, normalize, soft_targets
from polyad.train.tasks.task import CheckpointExtras, Predictor, Score, Sections, Unit
from polyad.train.tasks.vocabulary import CLASSES_FILE


class ImageClassification(LabelledTask[ImageBatch]):
    """Predicts the class of each image.

    Args:
        sections: Sections of the configuration.
    """

    data_settings: ClassVar[type[ImageDataConfig]] = ImageDataConfig
    unit = Unit("image", "img")
    attack = "gaussian-noise"
    scores: ClassVar[tuple[Score, ...]] = (
        Score("top1", "top-1", 4),
        Score("top5", "top-5", 4),
        Score("loss", "loss", 4, "nats per image"),
        Score("calibration_error", "calibration error", 4),
    )
    loss_unit = "nats per image"
    validation_score: ClassVar[str] = "validation_top1"
    model: ImageSettings
    data: ImageData
    settings: ImageDataConfig
    validated: Sequence[str] = ("top1", "top5", "loss")
    per_class: ClassVar[str] = "per_class"
    """The key of their scores."""
    has_attributes: ClassVar[bool] = False
    """Whether an image may have any number of the classes, which are then attributes."""

    def __init__(self, sections: Sections) -> None:
        settings, model = sections.data, sections.model
        assert isinstance(settings, ImageDataConfig)
        if not isinstance(model, ImageSettings):
            raise ConfigError(
                f"data.kind: images is not allowed with model.kind: {model.kind}, which does not "
                "read images; allowed with: mixer, vit, mixture"
            )
        if settings.loss == "sigmoid" and model.gives_log_probabilities():
            raise ConfigError(
                f"data.loss: sigmoid is not allowed with model.kind: {model.kind}, which mixes "
                "probabilities that sum to 1: it learns one class of each image"
            )
        self.data, self.settings = ImageData.open(settings), settings
        self._noise: GaussianNoise | None = None
        self._seed, self._most = sections.seed, sections.evaluation.max_windows
        classes = len(self.data.class_names)
        if model.num_classes not in (None, classes):
            raise ConfigError(
                f"model.num_classes: {model.num_classes} is not the number of classes of "
                f"{self.place}, which is {classes}; null takes it from the data"
            )
        if model.channels != 3:
            raise ConfigError(
                f"model.channels: {model.channels} is not allowed with {self.place}, whose images "
                "have 3 channels: red, green and blue"
            )
        self.model = model.model_copy(update={"num_classes": classes}).filled()
        if self.data.has_attributes != self.has_attributes:
            holds, allowed = ("one class", "images") if self.has_attributes else ("attributes",) * 2
            raise ConfigError(
                f"data.kind: {settings.kind} is not allowed with {self.place}, whose images have "
                f"{holds}; allowed: {allowed}"
            )

    @classmethod
    def open(cls, sections: Sections) -> "ImageClassification":
        """Lists the images."""
        return cls(sections)

    @functools.cached_property
    def samples(self) -> ImageSamples:
        """Images after augmentation, by their global number."""
        return ImageSamples(
            self.data.split("train"), self.settings, self.model.image_size, self._seed
        )

    def inputs(self, images_BCHW: Tensor) -> Tensor:
        """The input of a model, fp32.

        Args:
            images_BCHW: Pixels from 0 to 255, uint8 or fp32.
        """
        return normalize(images_BCHW, self.settings.mean, self.settings.std)

    def losses(
        self, model: Predictor, batch: ImageBatch
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """The loss of each image [B], against the mixed labels if images are mixed."""
        images_BCHW, mixes = batch.images_BCHW, self.settings.mixes
        if mixes:
            images_BCHW = mix_images(images_BCHW, batch.mix_B, batch.box_B4)
        inputs_BCHW = self.inputs(images_BCHW)
        logits_BK, routing = model(inputs_BCHW)
        targets_BK = soft_targets(
            batch.labels_B,
            batch.mix_B if mixes else None,
            logits_BK.shape[-1],
            self.settings.label_smoothing,
        )
        losses_B = self._loss(logits_BK.float(), targets_BK)
        if self.teacher is not None:
            losses_B = self.teacher.mix_in(losses_B, logits_BK.float(), inputs_BCHW)
        return losses_B, routing

    def _loss(self, logits_BK: Tensor, targets_BK: Tensor) -> Tensor:
        if self.settings.loss == "sigmoid":
            each_BK = binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none")
            return each_BK.sum(-1)
        return -(targets_BK * logits_BK.log_softmax(-1)).sum(-1)

    def probabilities(self, logits_BK: Tensor) -> Tensor:
        """The probability of each class, [B, K]; independent of each other with the sigmoid
        loss."""
        return logits_BK.sigmoid() if self.settings.loss == "sigmoid" else logits_BK.softmax(-1)

    def logits(self, model: Predictor, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Logits [B, K] and losses [B] of held-out images."""
        logits_BK = model(self.inputs(batch.images_BCHW)).logits.float()
        targets_BK = soft_targets(batch.labels_B, None, logits_BK.shape[-1], 0.0)
        return logits_BK, self._loss(logits_BK, targets_BK)

    def outcomes(self, model: Predictor, batch: ImageBatch) -> Tensor:
        """Class, predicted class, whether it is among the five highest, loss, and the probability
        of the predicted one."""
        logits_BK, losses_B = self.logits(model, batch)
        highest_B5 = logits_BK.topk(min(5, logits_BK.shape[-1]), dim=-1).indices
        among_B = (highest_B5 == batch.labels_B.unsqueeze(-1)).any(-1)
        confidence_B = self.probabilities(logits_BK).amax(-1)
        parts = (batch.labels_B, highest_B5[:, 0], among_B, losses_B, confidence_B)
        return torch.stack([part.double() for part in parts], dim=-1)

    def scores_of(self, outcomes_NF: Outcomes) -> dict[str, float]:
        """Accuracies, loss, and the expected calibration error over 15 bins of confidence (Guo et
        al. 2017) of `probabilities`."""
        labels_N, predictions_N, among_N, losses_N, confidence_N = outcomes_NF.T
        right_N = labels_N == predictions_N
        return {
            "top1": float(right_N.mean()),
            "top5": float(among_N.mean()),
            "loss": float(losses_N.mean()),
            "calibration_error": calibration_error(confidence_N, right_N),
        }

    def by_class(self, outcomes_NF: Outcomes) -> dict[str, dict[str, Any]]:
        """Scores of each class; its accuracy is its recall."""
        labels_N, predictions_N = outcomes_NF.T[:2].astype(int)
        scores = class_scores(self.data.class_names, labels_N, predictions_N)
        return {
            name: {"accuracy": own["recall"], "images": own.pop("samples")} | own
            for name, own in scores.items()
        }

    def about_split(self, split: str, outcomes_NF: Outcomes) -> dict[str, Any]:
        """The scores of each class, how large images are read, and what was held out."""
        return {
            self.per_class: self.by_class(outcomes_NF),
            "image_size": self.model.image_size,
            "held_out": self.data.held_out,
        }

    def rows(self, scores: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Rows of scores, scores per domain, and how the split was held out."""
        titles = {score.name: score.title for score in self.scores}
        rows = [*super().rows(scores), *self.domain_rows(scores, titles)]
        return rows + ([("held out", scores["held_out"])] if scores["held_out"] else [])

    def units_of(self, split: str) -> int:
        """The number of images in a split."""
        return len(self.data.split(split))

    def label_of(self, split: str, number: int) -> str:
        """The class or the attributes of an image of a split, in words."""
        label, names = self.data.split(split).labels[number], self.data.class_names
        if not self.has_attributes:
            return names[int(label)]
        has = [name for name, value in zip(names, label, strict=True) if value]
        return ", ".join(has) or "none"

    def held_out(self, split: str) -> EvaluationImages:
        """The images of a split without augmentation, in their order."""
        images, size = self.data.split(split), self.model.image_size
        return EvaluationImages(images, self.settings, size, self._noise)

    def spread(self, split: str, most: int | None = None) -> tuple[Subset[ImageBatch], list[str]]:
        """The images of a split without augmentation; at most `most`, spread evenly over it."""
        images, domains_N = self.held_out(split), self.data.split(split).domains
        total = len(images) if most is None else min(len(images), most)
        chosen = [number * len(images) // total for number in range(total)]
        names = [] if domains_N is None else [self.data.domain_names[domains_N[n]] for n in chosen]
        return Subset(images, chosen), names

    def with_noise(self, noise: GaussianNoise) -> Self:
        """A copy of this task whose held-out images have noise."""
        task = copy.copy(self)
        task._noise = noise
        return task

    def kept(self) -> CheckpointExtras:
        """The names of the classes, and the fingerprint of the data."""
        classes = file_of_classes(self.data.class_names)
        return CheckpointExtras(super().kept().state, {CLASSES_FILE: classes})

    def reinitialized_prefixes(self, weights: Weights) -> tuple[str, ...]:
        """The parameters that the model cannot take from these weights, such as a head for other
        classes. A folder of another library decides that itself."""
        if isinstance(weights, FamilyWeights):
            return ()
        return self.model.begins_anew_from(weights.model_config())

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that the weights were trained with these classes in this order, unless the head
        starts anew."""
        # A folder of another library decides itself whether its head is used.
        if isinstance(weights, FamilyWeights):
            is_new = weights.is_new(f"{HEAD}weight")
        else:
            is_new = HEAD in self.reinitialized_prefixes(weights)
        if not is_new:
            self.check_classes(weights, owner)

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """Numbers of the images in the training split."""
        return {self.name: sorted({self.samples.number_of(sample) for sample in samples})}


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
        """Returns each attribute's accuracy, how many images have it, and which share of these is
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
