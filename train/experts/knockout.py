"""The loss of text without experts of a layer, by class of token, with intervals.

An action is applied to experts at all tokens of a window (see `actions.py`); by default they are
removed, and the others keep their weights. Their block's input is unchanged, so a window is
recomputed from that block on. Unless the action changes scores, it is recomputed only if one of its
tokens uses the experts. The block's output changes only at those tokens. Later blocks mix tokens,
so the loss of later tokens changes as well (for a BERT, or with a graph that sees later tokens, of
any token), but not that of tokens before the first of them.

Shapes: B windows, T tokens of a window, P predicted tokens, R rows, D width, S experts of all
levels side by side, E sets of them to remove, J labelings of tokens, C columns (the classes of all
labelings side by side), G groups of windows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.weights import device_of
from polyad.train.experts.actions import CONTRIBUTION, RESCORING, Action, intervening
from polyad.train.experts.information import GroupedSums, Matrix, Summed, interval_columns
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.tasks.samples import Passages, losses, through

SIDES = ("predicted", "read")
"""A position is labeled by its predicted token, or by its input token."""
FEWEST_TOKENS = 50
"""Minimum number of tokens of a class to name it as one that an expert is for."""


class Change(NamedTuple):
    """A mean change in nats per token, or of a share."""

    value: float
    low: float
    """Ends of a 95% interval over windows; NaN where there are too few."""
    high: float


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

    def result(self, what: str, summed: Summed = lambda counts: counts) -> Any:
        """Returns the changes as a table.

        Args:
            what: names the change in the error.
            summed: sums over processes.

        Returns:
            For each `row`, labeling (`by`) and `class` with tokens: number of `tokens`, `loss` of
            the unchanged model, mean `change` with the ends of its interval, and the same of the
            tokens that use the expert, `own_tokens` and `own_change` (NaN without any).

        Raises:
            ConfigError: losses are not finite.
        """
        import pandas as pd

        sums_GEC3 = self._sums.result(summed, f"{what}: losses")
        whole_C3 = sums_GEC3.sum(0)[self._whole]
        rows = slice(0, self._whole)

        def change(sums: Matrix) -> Matrix:
            return mean_of(sums[..., rows, :, 0], sums[..., self._whole, None, :, 2])

        def own(sums: Matrix) -> Matrix:
            return mean_of(sums[..., rows, :, 1], sums[..., rows, :, 2])

        names = [(by, name) for by, classes in self._classes.items() for name in classes]
        frame = pd.DataFrame(names * self._whole, columns=["by", "class"])
        frame.insert(0, "row", np.repeat(np.arange(self._whole), len(names)))
        frame["tokens"] = np.tile(whole_C3[:, 2].astype(int), self._whole)
        frame["loss"] = np.tile(mean_of(whole_C3[:, 0], whole_C3[:, 2]), self._whole)
        frame = frame.assign(
            **interval_columns("change", change, sums_GEC3, self._windows),
            own_tokens=sums_GEC3.sum(0)[rows, :, 2].astype(int).ravel(),
            **interval_columns("own_change", own, sums_GEC3, self._windows),
        )
        return frame[frame["tokens"] > 0].reset_index(drop=True)


def harmed(classes: Any) -> Any:
    """Returns a table of the classes whose loss rises without an expert, beyond noise, those harmed
    most first.

    Args:
        classes: the table `classes`, expert after expert.
    """
    side = classes["by"].str.partition(" ")[0]
    is_harmed = (classes["tokens"] >= FEWEST_TOKENS) & (classes["change_low"] > 0)
    experts = classes.groupby(["module", "level", "expert"], sort=False).ngroup()
    ordered = classes.assign(number=experts, side=side)[side.isin(SIDES) & is_harmed].sort_values(
        ["number", "side", "change"], ascending=[True, True, False], kind="stable"
    )
    names = ["module", "level", "expert", "by", "class", "tokens"]
    return ordered[[*names, "change", "change_low", "change_high"]].reset_index(drop=True)


class KnockOut:
    """Accumulates the loss without experts of a layer, which shows what they are for.

    Args:
        model: in evaluation mode, not compiled, on one device.
        layer: a block's layer.
        sets: the sets of experts to remove together; each is a row of the tables.
        classes: class names of each labeling of tokens.
        windows: number of windows that all processes read together.
        action: the action on the experts.

    Attributes:
        sums: the changes, and the losses of windows read by the unchanged model.
        changes: after `result`, the table of `ChangeSums.result`; rows are the sets.
        windows_again: after `result`, the number of windows recomputed, over all sets.
    """

    changes: Any
    windows_again: int

    def __init__(
        self,
        model: nn.Module,
        layer: RoutedLayer,
        sets: Sequence[Sequence[int]],
        classes: Mapping[str, Sequence[str]],
        *,
        windows: int,
        action: Action = CONTRIBUTION,
    ) -> None:
        self._model, self.layer, self.sets = model, layer, sets
        self._action = action
        device = device_of(model)
        self._chosen_ES = torch.zeros(len(sets), layer.num_experts, dtype=torch.bool, device=device)
        for row, experts in enumerate(sets):
            self._chosen_ES[row, list(experts)] = True
        self.sums = ChangeSums(len(sets), classes, windows, device)
        self._again = torch.zeros(1, dtype=torch.float64, device=device)
        self._drops = may_drop(model)

    @torch.inference_mode()
    def add(
        self,
        x_BTD: Tensor,
        passages: Passages,
        label_JBP: Tensor,
        loss_BP: Tensor,
        decision: Decision,
    ) -> None:
        """Adds a batch.

        Args:
            x_BTD: input of the layer's block.
            passages: the windows.
            label_JBP: class columns; -1: the token is not counted.
            loss_BP: loss of the unchanged model.
            decision: the layer's decision.
        """
        self.sums.add_whole(label_JBP, passages.number_B, loss_BP)
        has_BTE = self.uses(decision, x_BTD.shape[0])
        for row_R, window_R in self.pairs(has_BTE):
            with self.without(row_R):
                y_RTD = through(self._model, x_BTD[window_R], self.layer.block)
            some = passages.rows(window_R)
            changed_RP = losses(self._model, y_RTD, some)
            change_RP = changed_RP.double() - loss_BP[window_R].double()
            own_RP = has_BTE[window_R, :, row_R].gather(1, some.places_BP)
            self.sums.add(label_JBP[:, window_R], some.number_B, row_R, change_RP, own_RP)

    def uses(self, decision: Decision, windows: int) -> Tensor:
        """Which tokens use an expert of each set [B, T, E].

        Args:
            decision: the layer's decision for whole windows.
            windows: number of windows, B.
        """
        has_BTS = decision.by_row(windows) != 0
        return has_BTS.float() @ self._chosen_ES.T.float() > 0

    def pairs(self, has_BTE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of a set and a window to recompute, as many at a time as there are windows.

        Args:
            has_BTE: the result of `uses`.

        Yields:
            The rows of sets [R], and the windows [R].
        """
        can_change_EB = has_BTE.any(1).T
        if self._action.how in RESCORING:
            can_change_EB = torch.ones_like(can_change_EB)
        elif self._drops:  # a capacity counts whole batches, so keep them
            can_change_EB = can_change_EB.any(1, keepdim=True).expand_as(can_change_EB)
        row_N, window_N = can_change_EB.nonzero().unbind(-1)
        self._again += len(row_N)
        if len(row_N):
            parts = (torch.split(each_N, len(has_BTE)) for each_N in (row_N, window_N))
            yield from zip(*parts, strict=True)

    @contextmanager
    def without(self, row_R: Tensor) -> Iterator[None]:
        """A context in which each window is read without the experts of a set.

        Args:
            row_R: the sets.
        """
        with intervening(self._model, self.layer, self._action) as intervene:
            intervene(self._chosen_ES[row_R], None)
            yield

    def result(self, summed: Summed = lambda counts: counts) -> "KnockOut":
        """Sums over processes, and returns itself.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: losses are not finite.
        """
        self.windows_again = int(summed(self._again))
        self.changes = self.sums.result(f"without an expert of {self.layer.name}", summed)
        return self

    def of_all(self) -> list[float]:
        """The change over all tokens without each set."""
        change: list[float] = self.changes.query("by == 'all'")["change"].tolist()
        return change

    def tables(self) -> dict[str, Any]:
        """Tables of single `experts`, and of every class (`classes`)."""
        import pandas as pd

        rows = [row for row, columns in enumerate(self.sets) if len(columns) == 1]
        names = ["module", "level", "expert"]
        places = [self.layer.named(self.sets[row][0]) for row in rows]
        experts = pd.DataFrame(places, index=rows, columns=names)
        changes = experts.join(self.changes.set_index("row"), how="inner")
        of_all = changes[changes["by"] == "all"]
        share = of_all["own_tokens"] / of_all["tokens"]
        measured = [f"{of}change{end}" for of in ("", "own_") for end in ("", "_low", "_high")]
        return {
            "experts": of_all.assign(share_of_tokens=share)[
                [*names, "share_of_tokens", *measured, "own_tokens"]
            ],
            "classes": changes,
        }


def may_drop(model: nn.Module) -> bool:
    """Whether a capacity may drop tokens."""
    return any(
        part.config.capacity(training=False) is not None
        for part in model.modules()
        if isinstance(part, SelectingMoE)
    )


def mean_of(sums: Matrix, counts: Matrix) -> Matrix:
    """Divides sums by counts; NaN where nothing was counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Matrix = np.where(counts > 0, sums / counts, np.nan)
    return mean
