"""`polyad experts steer`: what a model predicts when its experts are changed.

Two effects are measured on held-out text: the change of the loss by class of token, which shows
where the changed model is worse; and the probability of the classes of the next token, which shows
what it would write.

Shapes: B windows, P predicted tokens, V vocabulary, K classes of all labelings of the next token, G
groups of windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from polyad.parallel.weights import device_of
from polyad.train.errors import ConfigError
from polyad.train.experts.information import GroupedSums, Matrix, Summed, interval_columns
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.knockout import ChangeSums, mean_of
from polyad.train.experts.token_classes import ClassColumns, classes_of_vocabulary
from polyad.train.measures.measure import Measure
from polyad.train.reading import TOKENS, EvaluationContext, ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import embedded, losses, through


@dataclass(kw_only=True)
class Steer(Measure):
    """Accumulates the joint effect of interventions on a decoder."""

    name = "steer"
    doing = "steering"
    needs_whole = "the changed model runs all blocks again"

    changes: Sequence[Intervention]
    """The interventions, all at once."""
    tokens: int = TOKENS
    """Approximate number of tokens to read."""

    def check(self, opened: EvaluationContext) -> None:
        """Refuses a model that does not predict the next token, and no changes."""
        opened.need(f"experts {self.name}", LanguageModelling)
        if not self.changes:
            raise ConfigError("experts steer: --intervene is missing")

    def subject_of(self, opened: EvaluationContext, model: nn.Module) -> Subject:
        """The text, and no layers; finds the classes of the vocabulary."""
        text, device = opened.text(self.tokens), device_of(model)
        self._model: Any = model
        self._text = text
        self._columns = ClassColumns(text)
        self._losses = ChangeSums(1, self._columns.classes, text.rows, device)
        vocabulary = classes_of_vocabulary(text.tokenizer, text.stream)
        self._next = [(by, name) for by, (classes, _) in vocabulary.items() for name in classes]
        tables = [one_hot(class_V, len(classes)) for classes, class_V in vocabulary.values()]
        self._class_VK = torch.cat(tables, -1).float().to(device)
        width = 2 * self._class_VK.shape[1] + 1
        self._masses = GroupedSums(text.rows, [width], device)
        return Subject(model, [], text, opened.batch_size)

    @torch.inference_mode()
    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch, which the changed model reads, too."""
        passages, x_BTD = forward_pass.batch, forward_pass.output
        label_JBP, loss_BP = self._columns(passages), losses(self._model, x_BTD, passages)
        with intervened(self._model, self.changes):
            y_BTD = through(self._model, embedded(self._model, passages))
        change_BP = losses(self._model, y_BTD, passages).double() - loss_BP.double()
        number_B, counted_BP = passages.number_B, passages.scored_BP
        self._losses.add_whole(label_JBP, number_B, loss_BP)
        row_B = torch.zeros_like(number_B)
        self._losses.add(label_JBP, number_B, row_B, change_BP, torch.ones_like(counted_BP))
        for window, group in enumerate(self._masses.group_of(number_B).tolist()):
            one = slice(window, window + 1)
            counted_P = counted_BP[window]
            masses = [self._mass(x[one], counted_P) for x in (x_BTD, y_BTD)]
            self._masses.sums_G[group] += torch.cat([*masses, counted_P.sum().view(1).double()])

    def _mass(self, x_1TD: Tensor, counted_T: Tensor) -> Tensor:
        """Sums the probabilities of each class [K] over one window, since logits take much
        memory."""
        logits_NV: Tensor = self._model.score(x_1TD)[0][counted_T]
        p_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).softmax(-1)
        # A model may have more tokens than its tokenizer; those have no class.
        known_NV = p_NV[:, : len(self._class_VK)]
        return (known_NV @ self._class_VK.to(p_NV.dtype)).double().sum(0)

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        import pandas as pd

        classes = self._losses.result("changed", summed)
        mass_G = self._masses.result(summed, "changed: probabilities")
        columns = self._class_VK.shape[1]

        def change(sums: Matrix) -> Matrix:
            added = sums[..., columns : 2 * columns] - sums[..., :columns]
            return mean_of(added, sums[..., [-1]])

        next_tokens = pd.DataFrame(self._next, columns=["by", "class"])
        next_tokens["probability"] = mean_of(mass_G.sum(0)[:columns], mass_G.sum(0)[-1])
        ends = interval_columns("change", change, mass_G, self._text.rows)
        next_tokens = next_tokens.assign(**ends)
        measured = ["by", "class", "tokens", "loss", "change", "change_low", "change_high"]
        return Tables(
            facts={
                "windows_read": self._text.rows,
                "sequence_length": self._text.length,
                "tokens_scored": int(classes["tokens"].iloc[0]),
                "loss": float(classes["loss"].iloc[0]),
                "changed": [str(each) for each in self.changes],
            },
            frames={"steering": classes[measured], "next_tokens": next_tokens},
            titles={
                "steering": "change in loss when the experts are changed",
                "next_tokens": "change in the probability of classes of the next token",
            },
        )
