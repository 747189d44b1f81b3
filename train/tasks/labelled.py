"""Base of tasks on labelled images and sequences: one source with splits, optionally domains.

Their scores are for a split and for single classes; benchmark metrics are computed by scikit-learn
and scipy.

Shapes: B samples of a batch, N scored samples of a split, F numbers about each, S bins of
confidence.
"""

import json
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.sequences.config import Metric, SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.parallel import comm
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.results import aligned
from polyad.train.tasks.distillation import Teacher
from polyad.train.tasks.task import Batch, Predictor, Scoring, Task
from polyad.train.tasks.vocabulary import differing, names_of

Numbers = npt.NDArray[np.generic]
Outcomes = npt.NDArray[np.float64]
"""What scores are computed from, a row for each sample [N, F]."""


class LabelledTask(Task[Batch]):
    """A task on the samples of one source, each with a label."""

    higher_is_better: ClassVar[bool] = True
    data: ImageData | SequenceData
    settings: ImageDataConfig | SequenceDataConfig
    teacher: Teacher | None = None
    """None: the task learns from the labels alone."""
    _most: int | None
    """Samples that a validation during training reads; None: all."""

    @property
    def place(self) -> str:
        """`data.path` with its value."""
        return f"data.path: {self.settings.path}"

    @property
    def name(self) -> str:
        """The source as written in the configuration."""
        return self.settings.path

    @property
    def fingerprint(self) -> str:
        """A digest of the training samples and their labels."""
        return self.contents("train")

    def contents(self, split: str) -> str:
        """A digest of the samples of a split and their labels."""
        return self.data.contents(split)

    @property
    def samples_per_epoch(self) -> int:
        """The number of training samples."""
        return self.units_of("train")

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return "validation" in self.data.splits

    @property
    @abstractmethod
    def validated(self) -> Sequence[str]:
        """Names of the validation scores that training reports."""

    @property
    def notes(self) -> Sequence[str]:
        """What was left out or damaged in listing the samples."""
        return self.data.notes

    @abstractmethod
    def spread(self, split: str, most: int | None = None) -> tuple[Any, Sequence[str]]:
        """The samples of a split without augmentation, at most `most`, spread evenly over it; and
        the domain of each, empty without domains."""

    @abstractmethod
    def outcomes(self, model: Predictor, batch: Batch) -> Tensor:
        """What the scores of each sample are computed from [B, F], fp64."""

    @abstractmethod
    def scores_of(self, outcomes_NF: Outcomes) -> dict[str, float]:
        """The scores of some samples by name, among them `loss`."""

    @abstractmethod
    def about_split(self, split: str, outcomes_NF: Outcomes) -> dict[str, Any]:
        """Further JSON values about a scored split, such as the scores of each class."""

    @torch.no_grad()
    def score(self, scoring: Scoring, split: str, most: int | None = None) -> dict[str, Any]:
        """Scores a split, or at most `most` samples spread evenly over it, and each domain."""
        (samples, domains), units = self.spread(split, most), f"{self.unit.name}s"
        world = scoring.world
        # Each sample has a row of its own. Every process fills those of its samples, so the sum
        # over processes is exact.
        outcomes_NF: Tensor | None = None
        for batch, own_B, number_B in scoring.batches(samples, self.settings.num_workers):
            outcomes_BF = self.outcomes(scoring.model, batch)
            if outcomes_NF is None:
                outcomes_NF = outcomes_BF.new_zeros(len(samples), outcomes_BF.shape[1])
            outcomes_NF[number_B.to(world.device)] = outcomes_BF[own_B]
        assert outcomes_NF is not None
        rows_NF = comm.sum_over_samples(outcomes_NF, world).cpu().numpy()
        domains_N = np.array(domains)
        per_domain = {}
        for domain in dict.fromkeys(sorted(domains_N)):
            rows = rows_NF[domains_N == domain]
            per_domain[str(domain)] = {units: len(rows), **self.scores_of(rows)}
        return {
            **self.scores_of(rows_NF),
            f"{units}_scored": len(samples),
            f"{units}_in_split": self.units_of(split),
            **self.about_split(split, rows_NF),
            "per_domain": per_domain,
            "left_out": self.data.left_out,
        }

    def validate(self, scoring: Scoring) -> dict[str, float]:
        """Scores the validation split, or a part of it, and each domain."""
        scores = self.score(scoring, "validation", self._most)
        whole = {f"validation_{name}": scores[name] for name in self.validated}
        of_domains = {
            f"validation_{name}/{domain}": own[name]
            for domain, own in scores["per_domain"].items()
            for name in self.validated
        }
        return whole | of_domains

    def check_classes(self, weights: Weights, owner: str) -> None:
        """Checks that weights were trained with these classes in this order, if they record that.

        Args:
            weights: A labelled task's.
            owner: Name of the weights in the error.

        Raises:
            ConfigError: They were trained with other classes.
        """
        names, ours = names_of(weights), list(self.data.class_names)
        if names not in (None, ours):
            raise ConfigError(f"{self.place} has {differing(ours, names, owner)}")

    def domain_rows(
        self, scores: Mapping[str, Any], titles: Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """Returns a table of domains as names and values, then which domains training leaves out.

        Args:
            scores: What `score` returned.
            titles: Column titles by score name.
        """
        units, per_domain = f"{self.unit.name}s", scores["per_domain"]
        rows = []
        if per_domain:
            table = [
                [units, *titles.values()],
                *(
                    [f"{own[units]:,}", *(f"{own[name]:.4f}" for name in titles)]
                    for own in per_domain.values()
                ),
            ]
            names = ["by domain", *(f"  {name}" for name in per_domain)]
            rows = list(zip(names, aligned(table, ">"), strict=True))
        if scores["left_out"]:
            rows.append(("left out", f"{', '.join(scores['left_out'])} (the test split)"))
        return rows


def file_of_classes(names: Sequence[str]) -> bytes:
    """The contents of `CLASSES_FILE`."""
    return json.dumps(list(names), ensure_ascii=False, indent=0).encode()


def metric_of(metric: Metric, labels_N: Numbers, predictions_N: Numbers) -> float:
    """Computes a metric as the benchmarks of GLUE do, by scikit-learn and scipy.

    Args:
        metric: `accuracy`, also of choices; `f1`, that of the second class (MRPC and QQP), 0
            without true positives; `macro_f1`, the mean over the classes that occur; `matthews`,
            0 where all predictions are one class (CoLA); `pearson` and `spearman`, 0 where they are
            undefined, as for constant predictions.
        labels_N: Number of each sample's class, or a number.
        predictions_N: The predicted ones.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if metric in ("pearson", "spearman"):
        correlate = pearsonr if metric == "pearson" else spearmanr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant numbers have no correlation
            value = correlate(labels_N, predictions_N)[0] if len(labels_N) > 1 else 0.0
        return 0.0 if np.isnan(value) else float(value)
    if metric == "accuracy":
        return float(accuracy_score(labels_N, predictions_N))
    if metric == "matthews":
        return float(matthews_corrcoef(labels_N, predictions_N))
    if metric == "f1":
        return float(f1_score(labels_N == 1, predictions_N == 1, zero_division=0))
    return float(f1_score(labels_N, predictions_N, average="macro", zero_division=0))


TITLES: Mapping[Metric, str] = {
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


def class_scores(
    names: Sequence[str], labels_N: Numbers, predictions_N: Numbers
) -> dict[str, dict[str, Any]]:
    """Computes scores of each class against the others.

    Args:
        names: Names of the classes.
        labels_N: Number of each sample's class.
        predictions_N: Number of its predicted class.

    Returns:
        By class name `precision`, `recall` and `f1`, None where one is 0 / 0, and the number of
        `samples` of the class.
    """
    from sklearn.metrics import precision_recall_fscore_support

    *shares, samples_K = precision_recall_fscore_support(
        labels_N, predictions_N, labels=range(len(names)), zero_division=np.nan
    )
    scores = {}
    for name, samples, *own in zip(names, samples_K, *shares, strict=True):
        numbers = [None if np.isnan(share) else float(share) for share in own]
        scores[name] = {
            "samples": int(samples),
            **dict(zip(("precision", "recall", "f1"), numbers, strict=True)),
        }
    return scores


BINS = 15
"""Number of equal-width bins of the calibration error (Guo et al. 2017)."""


def calibration_error(confidence_N: Numbers, right_N: Numbers) -> float:
    """The expected calibration error: the mean gap of a bin's confidence and its accuracy.

    Args:
        confidence_N: The highest probability of each sample, fp64.
        right_N: Whether its prediction is right.
    """
    bin_N = (np.ceil(confidence_N * BINS).astype(int) - 1).clip(0, BINS - 1)
    gap_S = np.bincount(bin_N, weights=confidence_N - right_N.astype(float), minlength=BINS)
    return float(np.abs(gap_S).sum()) / len(confidence_N)
