"""Freezes some experts of a stacked parameter while the others are trained.

Frozen experts get no gradient. Moments and momentum that never had one are zero, so without weight
decay AdamW, SGD, and Muon, which handles each expert's matrix separately, do not change them.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from polyad.parallel.shard import placement_of


def keep_experts(parameter: nn.Parameter, experts: Collection[int]) -> None:
    """Marks experts of a parameter as frozen.

    Args:
        parameter: A parameter of a whole model on the meta device, experts first.
        experts: Their indices; empty if all are trained.
    """
    if experts:
        parameter.frozen_experts = tuple(sorted(experts))  # type: ignore[attr-defined]


def kept_experts(parameter: nn.Parameter) -> tuple[int, ...]:
    """Returns the frozen experts of a trained parameter of a whole model."""
    found: tuple[int, ...] = getattr(parameter, "frozen_experts", ())
    return found


def drop_gradients(parameter: nn.Parameter, experts: Collection[int]) -> None:
    """Suppresses a parameter's gradient for some of its experts.

    Args:
        parameter: This rank's part of it, with storage.
        experts: Indices in the whole model.
    """
    (run,) = placement_of(parameter).axes[0].runs
    here = [e - run.there + run.here for e in experts if run.there <= e < run.there + run.length]
    if not here:
        return
    index = torch.tensor(here, device=parameter.device)

    def dropped(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, index, 0)

    parameter.register_hook(dropped)
