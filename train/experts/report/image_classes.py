"""Classes in the pass over held-out images: see `class_pass.py`, which says what is found.

Shapes: B images, K classes, A all images that are read, N tokens of a batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.experts.report.class_pass import ClassPass, Described, Outcomes
from polyad.train.experts.routing_measures import RoutingMeasures
from polyad.train.tasks.benchmark_metrics import accuracy
from polyad.train.tasks.images import ImageClassification


class ImageClasses:
    """Adds up what the pass finds of classes.

    Args:
        task: of the images.
        split: of the data.
        numbers: of the images that are read.
        layers: whose experts are counted by class.
        device: of the model.
    """

    def __init__(
        self,
        task: ImageClassification,
        split: str,
        numbers: Sequence[int],
        layers: Sequence[RoutedLayer],
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._task, self._split, self._numbers = task, split, torch.tensor(numbers)
        self._names = list(task.data.manifest.class_names)
        class_A = torch.as_tensor(np.asarray(task.data.split(split).labels)[numbers]).long()
        self._experts = RoutingMeasures(layers, len(class_A), device)
        self._experts.by_class(self._names, class_A)
        self._experts.by_output(batch_size)
        self._outcomes = Outcomes()

    def add(
        self, logits_BK: Tensor, labels_B: Tensor, decisions: Mapping[str, Decision], first: int
    ) -> None:
        """Adds a batch.

        Args:
            logits_BK: of the model.
            labels_B: classes.
            decisions: of its layers, by name.
            first: the number of the first image among those that are read.
        """
        size = len(labels_B)
        number_B = torch.arange(first, first + size, device=labels_B.device)
        losses_B, probabilities_BK = self._task.examined(logits_BK.float(), labels_B)
        self._outcomes.add(
            self._numbers[first : first + size], labels_B, probabilities_BK, losses_B
        )
        self._experts.add(decisions, None, number_B)

    def result(self, examples: int) -> ClassPass:
        """What was found.

        Args:
            examples: images with the largest loss that are kept.

        Raises:
            ConfigError: outputs or coefficients are not finite.
        """
        found = self._outcomes.result(
            names=self._names,
            numbers=False,
            examples=examples,
            describe=lambda number: Described([], self._names),
            measure=lambda labels, predicted: {"accuracy": accuracy(labels, predicted)},
        )
        division = self._experts.result()
        return ClassPass(
            task="classification",
            data=self._task.name,
            split=self._split,
            unit=self._task.unit.name,
            of_samples=self._task.units_of(self._split),
            groups=self._names,
            layers=division.by_label["class"],
            division=division,
            **found,
        )
