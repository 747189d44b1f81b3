"""Changes of the loss by class of token, accumulated over groups of windows, with intervals.

Shapes: B windows, P predicted tokens of a window, J labelings of tokens, C columns (the classes of
all labelings side by side), E rows (experts, or steerings), G groups of windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyad.train.experts.information import GroupedSums, Matrix, Summed, intervals
from polyad.train.experts.token_classes import slices_of


class Change(NamedTuple):
    """A mean change in nats per token, or of a share."""

    value: float
    low: float
    """Ends of a 95% interval over windows; NaN where there are too few."""
    high: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def columns(self, name: str) -> dict[str, float]:
        """Columns of a table: the value, and the ends of its interval.

        Args:
            name: the column of the value.
        """
        return dict(zip((name, f"{name}_low", f"{name}_high"), self, strict=True))


@dataclass(frozen=True, kw_only=True)
class ClassChanges:
    """The changes per class, for one labeling of tokens."""

    classes: Sequence[str]
    tokens_C: Matrix
    """Number of predicted tokens of each class."""
    loss_C: Matrix
    """Mean loss of the unchanged model; NaN for a class without tokens."""
    own_EC: Matrix
    """Number of tokens that use the expert."""
    change_3EC: Matrix
    """Mean change over all tokens of the class, and the ends of its interval."""
    own_change_3EC: Matrix
    """The same over the tokens that use the expert."""

    def change(self, row: int, column: int) -> Change:
        """The change for an expert and a class."""
        return Change(*self.change_3EC[:, row, column].tolist())

    def own_change(self, row: int, column: int) -> Change:
        """The same over the tokens that use the expert."""
        return Change(*self.own_change_3EC[:, row, column].tolist())

    def rows(self, row: int, *, own: bool = True) -> list[dict[str, Any]]:
        """Rows of a table, one for each class that has tokens.

        Args:
            row: the expert.
            own: whether to include changes over the tokens that use the expert.
        """
        rows = []
        for column in self.tokens_C.nonzero()[0].tolist():
            found = {
                "class": self.classes[column],
                "tokens": int(self.tokens_C[column]),
                "loss": float(self.loss_C[column]),
                **self.change(row, column).columns("change"),
            }
            if own:
                found["own_tokens"] = int(self.own_EC[row, column])
                found |= self.own_change(row, column).columns("own_change")
            rows.append(found)
        return rows


class ChangeSums:
    """Accumulates changes by class.

    An extra row holds the loss of the unchanged model, and counts tokens.

    Args:
        rows: E.
        classes: class names of each labeling.
        windows: number of windows that all processes read together.
        device: the losses' device.
    """

    def __init__(
        self,
        rows: int,
        classes: Mapping[str, Sequence[str]],
        windows: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._classes, self._windows, self._whole = classes, windows, rows
        self._columns = sum(map(len, classes.values()))
        shape = (rows + 1, self._columns, 3)
        self._sums = GroupedSums(windows, shape, device)

    def add_whole(self, label_JBP: Tensor, number_B: Tensor, loss_BP: Tensor) -> None:
        """Adds windows read by the unchanged model.

        Args:
            label_JBP: columns; -1: the token is not counted.
            number_B: the windows' numbers.
            loss_BP: losses in nats.
        """
        row_B = torch.full_like(number_B, self._whole)
        self.add(label_JBP, number_B, row_B, loss_BP, torch.ones_like(label_JBP[0]).bool())

    def add(
        self,
        label_JBP: Tensor,
        number_B: Tensor,
        row_B: Tensor,
        change_BP: Tensor,
        own_BP: Tensor,
    ) -> None:
        """Adds windows in which something is changed.

        Args:
            label_JBP: columns; -1: the token is not counted.
            number_B: the windows' numbers.
            row_B: the row of each window's change.
            change_BP: change of the loss.
            own_BP: which tokens use the expert.
        """
        group_B = self._sums.group_of(number_B)
        place_B = group_B * (self._whole + 1) + row_B.to(group_B.device)
        first_B1 = (place_B * self._columns).view(-1, 1)
        counted_JBP = label_JBP >= 0
        own_BP = own_BP.double()
        # `where`: uncounted values may not be finite, and 0 times those is not 0.
        change_BP = change_BP.double().where(counted_JBP[0], 0.0)
        values_BP3 = torch.stack([change_BP, change_BP * own_BP, own_BP], -1)
        flat = self._sums.sums_G.flatten(0, 2)
        for label_BP, counted_BP in zip(label_JBP, counted_JBP, strict=True):
            flat.index_add_(0, (first_B1 + label_BP)[counted_BP], values_BP3[counted_BP])

    def result(self, what: str, summed: Summed = lambda counts: counts) -> dict[str, ClassChanges]:
        """Returns the changes by labeling.

        Args:
            what: names the change in the error.
            summed: sums over processes.

        Raises:
            ConfigError: losses are not finite.
        """
        wrong = f"{what}: losses are not finite: weights hold NaN or inf, or are too large"
        sums_GEC3 = self._sums.result(summed, wrong)
        whole_C3 = sums_GEC3.sum(0)[self._whole]
        rows = slice(0, self._whole)

        def change(sums: Matrix) -> Matrix:
            return mean_of(sums[..., rows, :, 0], sums[..., self._whole, None, :, 2])

        def own(sums: Matrix) -> Matrix:
            return mean_of(sums[..., rows, :, 1], sums[..., rows, :, 2])

        tables = [intervals(each, sums_GEC3, self._windows) for each in (change, own)]
        own_EC = sums_GEC3.sum(0)[rows, :, 2]
        return {
            name: ClassChanges(
                classes=self._classes[name],
                tokens_C=whole_C3[part, 2],
                loss_C=mean_of(whole_C3[part, 0], whole_C3[part, 2]),
                own_EC=own_EC[:, part],
                change_3EC=tables[0][..., part],
                own_change_3EC=tables[1][..., part],
            )
            for name, part in slices_of(self._classes).items()
        }


def mean_of(sums: Matrix, counts: Matrix) -> Matrix:
    """Divides sums by counts; NaN where nothing was counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Matrix = np.where(counts > 0, sums / counts, np.nan)
    return mean
