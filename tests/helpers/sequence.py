"""Sequence parallelism looked at from inside; called in worker processes."""

import torch

from parallel import comm
from tests.helpers.training import Case, build_engine, local_batches


def kept_for_backward(case: Case) -> int:
    """Bytes that a forward pass keeps on this process, without parameters."""
    engine, world = build_engine(case)
    known = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            kept[place] = tensor  # held: no address comes twice
        return tensor

    (batch, *_) = local_batches(0, world, case.model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine(batch[:, :-1], target_ids_BT=batch[:, 1:].contiguous())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def residual_drops(case: Case) -> list[float]:
    """What dropout of the residual stream leaves of ones."""
    engine, world = build_engine(case)
    comm.seed_random(5, 0, world)
    dropped = engine.module.blocks[0].attention.residual_dropout(torch.ones(1000))
    return list(dropped.tolist())
