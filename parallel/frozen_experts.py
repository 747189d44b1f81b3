"""Experts of a stacked parameter that stay as they are, while others of it are trained.

They have no gradient. Moments and momentum of what never had one are zero, so without weight decay
AdamW, SGD and Muon, which takes each expert's matrix by itself, add zero to them.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from polyad.parallel.shard import placement_of


def keep_experts(parameter: nn.Parameter, experts: Collection[int]) -> None:
    """Notes experts of a parameter that are not trained.

    Args:
        parameter: Of a whole model on the meta device, with experts in its first dimension.
        experts: Their numbers; none: all are trained.
    """
    if experts:
        parameter.frozen_experts = tuple(sorted(experts))  # type: ignore[attr-defined]


def kept_experts(parameter: nn.Parameter) -> tuple[int, ...]:
    """The experts of a parameter of a whole model that are not trained though it is."""
    found: tuple[int, ...] = getattr(parameter, "frozen_experts", ())
    return found


def drop_gradients(parameter: nn.Parameter, experts: Collection[int]) -> None:
    """Has a parameter get no gradient for some of its experts.

    Args:
        parameter: This process's part of it, with storage.
        experts: Numbers in the whole.
    """
    (run,) = placement_of(parameter).axes[0].runs
    here = [e - run.there + run.here for e in experts if run.there <= e < run.there + run.length]
    if not here:
        return
    index = torch.tensor(here, device=parameter.device)

    def dropped(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, index, 0)

    parameter.register_hook(dropped)
