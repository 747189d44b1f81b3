"""Sums over images that all scores follow from: of all images, and of those of each domain.

Shapes: B images of a micro-batch, K classes, S bins of confidence, N images that are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.parallel import comm
from polyad.train.tasks.benchmark_metrics import class_scores

BINS = 15
"""Bins of equal width that the calibration error is taken over (Guo et al. 2017)."""


class Counted(Protocol):
    """Sums over images that all scores follow from."""

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor) -> None:
        """Counts images; none may be filling."""

    def result(self, world: comm.World, names: Sequence[str]) -> dict[str, Any]:
        """The scores over all processes, with `images_scored`.

        Args:
            world: This process.
            names: Of the classes.
        """


class CountedClasses:
    """Sums over images that have one class each.

    Args:
        classes: K.
        device: Of the logits.
        probabilities: From logits to the probability of each class, [B, K]; the highest is the
            confidence.
    """

    def __init__(
        self, classes: int, device: torch.device, probabilities: Callable[[Tensor], Tensor]
    ) -> None:
        self._probabilities = probabilities
        self._totals_4 = torch.zeros(4, dtype=torch.float64, device=device)
        self._bins_S3 = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        self._classes_3K = torch.zeros(3, classes, dtype=torch.float64, device=device)

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor) -> None:
        """Counts images; none may be filling."""
        highest_B5 = logits_BK.topk(min(5, logits_BK.shape[-1]), dim=-1).indices
        hits_B5 = highest_B5 == labels_B.unsqueeze(-1)
        right_B = hits_B5[:, 0].double()
        ones_B = torch.ones_like(right_B)
        sums = (losses_B.double(), right_B, hits_B5.any(-1).double(), ones_B)
        self._totals_4 += torch.stack([each_B.sum() for each_B in sums])
        confidence_B = self._probabilities(logits_BK).amax(-1).double()
        bin_B = (confidence_B * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        self._bins_S3.index_add_(0, bin_B, torch.stack([confidence_B, right_B, ones_B], dim=-1))
        held_K, predicted_K, right_K = self._classes_3K
        held_K.index_add_(0, labels_B, ones_B)
        predicted_K.index_add_(0, highest_B5[:, 0], ones_B)
        right_K.index_add_(0, labels_B, right_B)

    def result(self, world: comm.World, names: Sequence[str]) -> dict[str, Any]:
        """The scores over all processes.

        Args:
            world: This process.
            names: Of the classes.
        """
        parts = [self._totals_4, self._bins_S3.flatten(), self._classes_3K.flatten()]
        summed = comm.sum_over_samples(torch.cat(parts), world).cpu()
        totals_4, bins, classes = torch.split(summed, [len(part) for part in parts])
        loss, right, among_five, count = totals_4.tolist()
        bins_S3 = bins.view(BINS, 3)
        gap_S = (bins_S3[:, 0] - bins_S3[:, 1]).abs()
        held_K, predicted_K, right_K = classes.view(3, -1).numpy()
        found = class_scores(names, held_K, predicted_K, right_K)
        per_class = {
            name: {"accuracy": found[name].recall, "images": int(held)} | found[name]._asdict()
            for name, held in zip(names, held_K, strict=True)
        }
        return {
            "top1": right / count,
            "top5": among_five / count,
            "loss": loss / count,
            "calibration_error": float(gap_S.sum()) / count,
            "images_scored": int(count),
            "per_class": per_class,
        }


class CountedDomains:
    """Sums over the images of each domain.

    Args:
        domains_N: The number of each image's domain; None: there are none.
        counting: Makes the sums of one.
    """

    def __init__(
        self, domains_N: npt.NDArray[np.integer] | None, counting: Callable[[], Counted]
    ) -> None:
        numbers = [] if domains_N is None else np.unique(domains_N).tolist()
        self._domains_N = None if domains_N is None else torch.from_numpy(domains_N)
        self._counted: dict[int, Counted] = {number: counting() for number in numbers}

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor, numbers_B: Tensor) -> None:
        """Counts images; none may be filling.

        Args:
            logits_BK: Of the model.
            labels_B: The classes, or attributes [B, K].
            losses_B: Of each image.
            numbers_B: Which of the N images they are, on the CPU.
        """
        if self._domains_N is None:
            return
        domains_B = self._domains_N[numbers_B]
        for domain, counted in self._counted.items():
            inside = (domains_B == domain).nonzero().flatten().to(logits_BK.device)
            if len(inside):
                counted.add(logits_BK[inside], labels_B[inside], losses_B[inside])

    def results(
        self, world: comm.World, names: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The scores over all processes, which have the same domains.

        Args:
            world: This process.
            names: Of the classes.

        Yields:
            The number of a domain, and its scores.
        """
        for domain, counted in self._counted.items():
            yield domain, counted.result(world, names)
