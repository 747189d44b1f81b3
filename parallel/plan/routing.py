"""Rows of experts where nobody knows which token chooses which: their numbers are assumed."""

import torch
from torch import nn

from polyad.model.smoe.dispatch import Plan
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.exchange import Counts, RowExchange


class AssumedExchange(RowExchange):
    """Sends the rows that a plan assumes: even shares leave, and more than one may arrive.

    Args:
        exchange: The one that it stands for.
        imbalance: Rows that arrive, over the mean of all processes.
        capacity: Rows that are kept of an even share, at most; None: all.
    """

    def __init__(self, exchange: RowExchange, imbalance: float, capacity: float | None) -> None:
        self.__dict__ = exchange.__dict__  # the group is made after this
        most = imbalance if capacity is None else capacity
        self._leave, self._arrive = min(1.0, most), min(imbalance, most)

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers, and takes the assumed ones for them."""
        begun = super().begin(plan)
        rows = plan.assignment_M.shape[0]
        send = _shares(round(rows * self._leave), self.lots, self.parts)
        receive = _shares(round(rows * self._arrive), self.lots, self.parts)
        return begun._replace(numbers=torch.tensor([send, receive]))


def _shares(total: int, lots: int, parts: int) -> list[list[int]]:
    """As even as whole numbers are."""
    whole, places = divmod(total, lots * parts)
    shares = [whole + (place < places) for place in range(lots * parts)]
    return [shares[lot * parts : (lot + 1) * parts] for lot in range(lots)]


def assume_rows(model: nn.Module, imbalance: float) -> None:
    """Has all expert-parallel layers of a model exchange assumed rows, in place.

    Args:
        model: Its layers are cut over processes.
        imbalance: Rows that arrive at this process, over the mean of all.
    """
    for layer in model.modules():
        if isinstance(layer, SelectingMoE):
            exchange = getattr(layer.dispatcher, "_exchange", None)
            if isinstance(exchange, RowExchange):
                assumed = AssumedExchange(exchange, imbalance, layer.config.capacity_factor)
                layer.dispatcher._exchange = assumed  # type: ignore[assignment]
