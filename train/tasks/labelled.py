"""What tasks on labelled images and sequences share: one source with splits, perhaps domains."""

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
from polyad.train.tasks.losses import Learner
from polyad.train.tasks.task import Batch, Predictor, Scores, Share, Task

PerDomain = Mapping[str, Mapping[str, float]]
"""How many samples of each domain were scored, and its scores, by their names."""


def domain_records(per_domain: PerDomain, names: Sequence[str]) -> dict[str, float]:
    """The keys of a record of validation, as `validation_loss/sketch`."""
    return {
        f"validation_{name}/{domain}": scores[name]
        for domain, scores in per_domain.items()
        for name in names
    }


@dataclass(frozen=True, kw_only=True)
class LabelledScores(Scores):
    """How well a model does on labelled samples, and on those of each domain."""

    per_domain: PerDomain
    left_out: Sequence[str]
    """Domains that are left out of training."""

    def domain_rows(self, counted: str, titles: Mapping[str, str]) -> list[tuple[str, str]]:
        """A table of the domains, as names and values, below which domains are left out.

        Args:
            counted: What samples are called, and the key of their number.
            titles: Of the scores, by their names.
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
    """A task on the samples of one source, each with what is to be said of it."""

    higher_is_better: ClassVar[bool] = True
    data: ImageData | SequenceData
    settings: ImageDataConfig | SequenceDataConfig
    _most: int | None
    """Samples that a validation in training reads; None: all."""

    @property
    def place(self) -> str:
        """`data.path` with its value."""
        return f"data.path: {self.settings.path}"

    @property
    def name(self) -> str:
        """The source as the configuration has it."""
        return self.settings.path

    @property
    def fingerprint(self) -> str:
        """A digest of the training samples and of what is said of them."""
        return self.data.fingerprint

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return "validation" in self.data.splits

    @property
    @abstractmethod
    def validated(self) -> Sequence[str]:
        """Names of the scores of the validation split that training tells."""

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
        """Scores a split, or at most so many samples evenly over it; see `Task.score`."""

    def validate(
        self, model: Predictor, *, batch_size: int, world: comm.World, report: Share
    ) -> dict[str, float]:
        """Scores of the validation split, or of some of it, and of each domain."""
        found = self.score(
            model, "validation", batch_size=batch_size, world=world, report=report, most=self._most
        )
        numbers = found.to_json()
        whole = {f"validation_{name}": numbers[name] for name in self.validated}
        return whole | domain_records(found.per_domain, self.validated)


def file_of_classes(names: Sequence[str]) -> bytes:
    """The contents of `CLASSES_FILE`."""
    return json.dumps(list(names), ensure_ascii=False, indent=0).encode()
