"""Base of tasks on labelled images and sequences: one source with splits, optionally domains."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.parallel import comm
from polyad.train.results import aligned
from polyad.train.tasks.distillation import Learner
from polyad.train.tasks.task import Batch, Predictor, Scores, Share, Task

PerDomain = Mapping[str, Mapping[str, float]]
"""Per domain, the number of scored samples, and its scores by name."""


def domain_records(per_domain: PerDomain, names: Sequence[str]) -> dict[str, float]:
    """Returns validation scores by key of the record, such as `validation_loss/sketch`."""
    return {
        f"validation_{name}/{domain}": scores[name]
        for domain, scores in per_domain.items()
        for name in names
    }


@dataclass(frozen=True, kw_only=True)
class LabelledScores(Scores):
    """Scores of a model on labelled samples, overall and per domain."""

    per_domain: PerDomain
    left_out: Sequence[str]
    """Domains left out of training."""

    def domain_rows(self, counted: str, titles: Mapping[str, str]) -> list[tuple[str, str]]:
        """Returns a table of domains as names and values, then which domains training leaves out.

        Args:
            counted: Plural name of the samples, and the key of their number.
            titles: Column titles by score name.
        """
        rows = []
        if self.per_domain:
            table = [
                [counted, *titles.values()],
                *(
                    [f"{scores[counted]:,}", *(f"{scores[name]:.4f}" for name in titles)]
                    for scores in self.per_domain.values()
                ),
            ]
            names = ["by domain", *(f"  {name}" for name in self.per_domain)]
            rows = list(zip(names, aligned(table, ">"), strict=True))
        if self.left_out:
            rows.append(("left out", f"{', '.join(self.left_out)} (the test split)"))
        return rows


class LabelledTask(Learner, Task[Batch]):
    """A task on the samples of one source, each with a label."""

    higher_is_better: ClassVar[bool] = True
    data: ImageData | SequenceData
    settings: ImageDataConfig | SequenceDataConfig
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
        return self.data.fingerprint

    def contents(self, split: str) -> str:
        """A digest of the samples of a split and their labels."""
        return self.data.contents(split)

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return "validation" in self.data.splits

    @property
    @abstractmethod
    def validated(self) -> Sequence[str]:
        """Names of the validation scores that training reports."""

    @abstractmethod
    def score(
        self,
        model: Predictor,
        split: str,
        *,
        batch_size: int,
        world: comm.World,
        report: Share | None = None,
        most: int | None = None,
    ) -> LabelledScores:
        """Scores a split, or at most `most` samples spread evenly over it; see `Task.score`."""

    def validate(
        self, model: Predictor, *, batch_size: int, world: comm.World, report: Share
    ) -> dict[str, float]:
        """Scores the validation split, or a part of it, and each domain."""
        found = self.score(
            model, "validation", batch_size=batch_size, world=world, report=report, most=self._most
        )
        numbers = found.to_json()
        whole = {f"validation_{name}": numbers[name] for name in self.validated}
        return whole | domain_records(found.per_domain, self.validated)


def file_of_classes(names: Sequence[str]) -> bytes:
    """The contents of `CLASSES_FILE`."""
    return json.dumps(list(names), ensure_ascii=False, indent=0).encode()
