"""Sequence parallelism looked at from inside; called in worker processes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.parallel import comm
from polyad.parallel.sequence import Tokens
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


class _Called(TorchDispatchMode):
    """Keeps the names of collectives and products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in ("mm", "all_gather_into_tensor", "reduce_scatter_tensor"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def gathered_linear_backward(parts: int) -> dict[str, Any]:
    """What the backward pass does for each choice of gradients, and whether these are the same."""
    world = comm.initialize(tensor_parallel_size=parts)
    tokens = Tokens(world)
    tokens.shape = 3, 4 * parts
    generator = torch.Generator().manual_seed(world.rank)
    shapes = (1, 12, 8), (6, 8), (3, 4 * parts, 6)
    x_1nD, weight_FD, gradient_BTF = (torch.randn(s, generator=generator) for s in shapes)
    found: dict[str, Any] = {"equal": True}
    wholes: list[torch.Tensor | None] = []
    for wanted in ((True, True), (True, False), (False, True)):
        pairs = zip((x_1nD, weight_FD), wanted, strict=True)
        x, weight = (each.clone().requires_grad_(want) for each, want in pairs)
        y_BTF = tokens.gathered_linear(x, weight, None)
        with _Called() as called:
            y_BTF.backward(gradient_BTF)
        found[str(wanted)] = called.names
        wholes = wholes or [x.grad, weight.grad]
        for grad, whole, want in zip((x.grad, weight.grad), wholes, wanted, strict=True):
            assert whole is not None
            found["equal"] &= torch.equal(grad, whole) if grad is not None else not want
    return found
