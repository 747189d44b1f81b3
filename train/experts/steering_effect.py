"""What steering does to text that is read: the loss by class of token, and what is predicted.

The change of the loss says for which tokens a steered model is worse; what it would write is in its
predictions: how much probability the next token's classes get, with steering and without.

Shapes: B windows, P predicted tokens, D width, V vocabulary, K classes of all ways to sort the next
token, G groups of windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyad.model.gpt2 import GPT2
from polyad.train.experts.class_changes import (
    Change,
    ChangeSums,
    ClassChanges,
    as_table,
    mean_of,
    with_ends,
)
from polyad.train.experts.information import Matrix, Summed, groups_of_samples, intervals
from polyad.train.experts.steering import Steering, gate_column, steered
from polyad.train.experts.token_classes import ClassColumns, classes_of_vocabulary
from polyad.train.tasks.samples import Passages, TextSamples, embedded, losses, through


@dataclass(frozen=True, kw_only=True)
class ClassMass:
    """The probability that classes of the next token get, for one way to sort tokens."""

    classes: Sequence[str]
    before_K: Matrix
    """Mean probability of each class without steering."""
    change_3K: Matrix
    """What steering adds to it, and the ends of the interval."""

    def change(self, column: int) -> Change:
        """The change of a class."""
        return Change(*self.change_3K[:, column].tolist())

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "classes": list(self.classes),
            "unsteered": self.before_K.tolist(),
            "change": as_table(self.change_3K),
        }


@dataclass(frozen=True, kw_only=True)
class SteeringEffect:
    """What steerings do together."""

    steerings: Sequence[Steering]
    by_class: Mapping[str, ClassChanges]
    """Changes of the loss; one row."""
    mass: Mapping[str, ClassMass]
    """The probability of the classes of the next token."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "steer": [str(each) for each in self.steerings],
            "by": {name: each.to_json(own=False) for name, each in self.by_class.items()},
            "probability": self.mass,
        }


class SteeredReading:
    """Adds up what steering changes.

    Args:
        model: a GPT-2 in evaluation mode, on one device.
        steerings: all at once.
        text: that is read.
        classes: of its tokens.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """

    def __init__(
        self,
        model: GPT2,
        steerings: Sequence[Steering],
        text: TextSamples,
        classes: ClassColumns,
    ) -> None:
        for steering in steerings:
            gate_column(model, steering)
        self._model, self._steerings, self._windows = model, steerings, text.rows
        device = next(model.parameters()).device
        self._losses = ChangeSums(1, classes.classes, text.rows, device)
        vocabulary = classes_of_vocabulary(text.tokenizer, text.stream)
        self._mass_classes = {name: classes for name, (classes, _) in vocabulary.items()}
        tables = [one_hot(class_V, len(classes)) for classes, class_V in vocabulary.values()]
        self._class_VK = torch.cat(tables, -1).float().to(device)
        width = 2 * self._class_VK.shape[1] + 1
        groups, group_A = groups_of_samples(text.rows, width)
        self._group_A = group_A.to(device)
        self._mass_G = torch.zeros(groups, width, dtype=torch.float64, device=device)

    @torch.inference_mode()
    def add(self, passages: Passages, label_JBP: Tensor, x_BTD: Tensor, loss_BP: Tensor) -> None:
        """Adds a batch.

        Args:
            passages: the windows.
            label_JBP: columns of classes; -1: the token does not count.
            x_BTD: what the last block gives, of the model as it is.
            loss_BP: of the model as it is.
        """
        with steered(self._model, self._steerings):
            y_BTD = through(self._model, embedded(self._model, passages))
        change_BP = losses(self._model, y_BTD, passages).double() - loss_BP.double()
        number_B, counted_BP = passages.number_B, passages.scored_BP
        self._losses.add_whole(label_JBP, number_B, loss_BP)
        row_B = torch.zeros_like(number_B)
        self._losses.add(label_JBP, number_B, row_B, change_BP, torch.ones_like(counted_BP))
        for window, group in enumerate(self._group_A[number_B.to(self._group_A.device)].tolist()):
            one = slice(window, window + 1)
            masses = [self._mass(x[one], counted_BP[window]) for x in (x_BTD, y_BTD)]
            self._mass_G[group] += torch.cat([*masses, counted_BP[window].sum().view(1).double()])

    def _mass(self, x_1TD: Tensor, counted_T: Tensor) -> Tensor:
        """Sums of the probabilities of each class [K], of a window: its logits take much memory."""
        logits_NV = self._model.score(x_1TD)[0][counted_T]
        p_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).softmax(-1)
        # A model may know more tokens than its tokenizer: those are of no class.
        known_NV = p_NV[:, : len(self._class_VK)]
        return (known_NV @ self._class_VK.to(p_NV.dtype)).double().sum(0)

    def result(self, summed: Summed = lambda counts: counts) -> SteeringEffect:
        """What was found.

        Args:
            summed: over processes.

        Raises:
            ConfigError: losses are not finite.
        """
        by_class = self._losses.result("steered", summed)
        mass_G = summed(self._mass_G).cpu().numpy()
        columns = self._class_VK.shape[1]

        def change(sums: Matrix) -> Matrix:
            added = sums[..., columns : 2 * columns] - sums[..., :columns]
            return mean_of(added, sums[..., [-1]])

        change_3K = with_ends(intervals(change, mass_G, self._windows))
        total = mass_G.sum(0)
        found, first = {}, 0
        for name, classes in self._mass_classes.items():
            part = slice(first, first + len(classes))
            found[name] = ClassMass(
                classes=classes,
                before_K=mean_of(total[part], total[-1]),
                change_3K=change_3K[:, part],
            )
            first += len(classes)
        return SteeringEffect(steerings=self._steerings, by_class=by_class, mass=found)
