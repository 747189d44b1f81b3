"""Sequence parallelism: processes that share the tokens between the cut layers are one process."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.parallel import comm
from polyad.parallel.sequence import Tokens
from tests.helpers.parity import near
from tests.helpers.training import (
    MODEL,
    Case,
    build_engine,
    local_batches,
    local_losses,
    train,
)


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


pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, sequence=True)


def test_losses_of_tokens_are_those_of_whole_logits(workers):
    for length in (16, 15):
        model = MODEL.model_copy(update={"sequence_length": length})
        expected = torch.tensor(workers(1).run(local_losses, Case(model=model), 0)[0])
        for losses in workers(2).run(local_losses, Case(model=model, tensor=2, sequence=True), 0):
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=1e-6)


def test_each_process_keeps_its_tokens_alone(workers):
    def of_a_block(**layout):
        few, many = (
            workers(4).run(
                kept_for_backward,
                Case(model=MODEL.model_copy(update={"num_layers": layers}), tensor=4, **layout),
            )
            for layers in (2, 6)
        )
        return (many[0] - few[0]) / 4

    # In bf16 a block leaves 34 bytes of each unit of a token (Korthikanti et al., table 2), 10 of
    # them whole under tensor parallelism of 4, and a quarter of all with the sequence cut as well.
    assert of_a_block(sequence=True) < 0.6 * of_a_block()


@pytest.mark.slow
def test_dropout_differs_between_tokens_of_processes_and_recomputation_repeats_it(workers):
    case = SGD.but(tensor=2, stage=1, dropout=0.3, last_step=2)
    plain = workers(2).run(train, case)
    model = MODEL.model_copy(update={"recompute": "block"})
    again = workers(2).run(train, case.but(model=model))
    assert near(plain[0]["losses"], again[0]["losses"])
    assert plain[0]["losses"] == plain[1]["losses"]
    first, second = workers(2).run(residual_drops, case)
    assert 0.0 in first
    assert first != second


@pytest.mark.parametrize("processes", [2, 4])
def test_of_a_frozen_layer_nothing_is_gathered_again_and_no_gradient_computed(workers, processes):
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    for found in workers(processes).run(gathered_linear_backward, processes):
        assert found == {
            "equal": True,
            "(True, True)": [gather, "mm", scatter, "mm"],
            "(True, False)": ["mm", scatter],
            "(False, True)": [gather, "mm"],
        }
