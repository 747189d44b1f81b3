"""Cut factors, looked at from inside; called in worker processes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.build import build_model, place
from model.gpt2 import GPT2, GPT2Config
from parallel import comm
from parallel.factors import parallelize_factors
from parallel.fragments import MASTER
from parallel.parallelize import InitialWeights
from parallel.tensor import parallelize_tensors, placement_of


def cut_model(config: GPT2Config, parts: int, *, randomized: bool = False) -> GPT2:
    """A model in float64 over tensor-parallel processes, without an engine.

    Args:
        config: of the model.
        parts: processes.
        randomized: random weights in place of initial ones: a gate starts at zero.
    """
    world = comm.initialize(tensor_parallel_size=parts)
    source = InitialWeights(build_model(config), 7)
    model = build_model(config)
    assert isinstance(model, GPT2)
    if parts > 1:
        parallelize_tensors(model, world)
        for block in model.blocks:
            parallelize_factors(block.feed_forward, world)

    def values() -> Any:
        for name, parameter in model.named_parameters():
            where = placement_of(parameter)
            value = torch.zeros(where.shape)
            generator = torch.Generator().manual_seed(len(name))
            whole = torch.randn(where.global_shape, generator=generator)
            for piece in where.pieces:
                size = (piece.num_rows, *where.shape[1:])
                rows = slice(piece.first_row, piece.first_row + piece.num_rows)
                if randomized:
                    box = zip(piece.origin, size, strict=True)
                    value[rows] = whole[tuple(slice(a, a + n) for a, n in box)]
                else:
                    value[rows] = source.read(name, MASTER, where.global_shape, piece.origin, size)
            yield name, value
        for name, _ in model.named_buffers():
            yield name, source.buffer(name)

    place(model, values(), "cpu", torch.float64)
    return model


class Traffic(TorchDispatchMode):
    """What a process sends in each collective, in numbers, as a ring of `parts` would do it."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        if "c10d" in func.namespace and not name.endswith(("wait_tensor", "wrap_tensor_autograd")):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            times = {"allreduce": 2, "reduce_scatter_tensor": 1}  # and no others
            times["all_gather_into_tensor"] = self.parts
            numbers = times[name] * first.numel()
            self.sent.append((name, numbers * (self.parts - 1) // self.parts))
        return func(*args, **(kwargs or {}))


def traffic_of_a_block(config: GPT2Config, parts: int, tokens: int) -> Any:
    """What the feed-forward of one block sends, forward and backward."""
    layer = cut_model(config, parts).blocks[0].feed_forward
    inputs = [torch.randn(1, tokens, config.hidden_size).double().requires_grad_() for _ in "zu"]
    with Traffic(parts) as forward:
        y_BTD, _ = layer(*inputs)
    gradient = torch.ones_like(y_BTD)
    with Traffic(parts) as backward:
        y_BTD.backward(gradient)
    return forward.sent, backward.sent


def block_against_the_whole(config: GPT2Config, parts: int, tokens: int) -> dict[str, float]:
    """Largest differences of a block's output and gradients from those of one that is not cut."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, tokens, config.hidden_size)
    z_BTD, u_BTD, wanted_BTD = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    found = []
    for size in (parts, 1):
        layer = cut_model(config, size, randomized=True).blocks[0].feed_forward
        inputs = [x_BTD.clone().requires_grad_() for x_BTD in (z_BTD, u_BTD)]
        y_BTD, _ = layer(*inputs)
        (y_BTD * wanted_BTD).sum().backward()
        about = {"y": y_BTD.detach(), "z": inputs[0].grad, "u": inputs[1].grad}
        found.append((about | {name: p.grad for name, p in layer.named_parameters()}, layer))
    (ours, cut), (theirs, _) = found
    for name, parameter in cut.named_parameters():
        where = placement_of(parameter)
        (piece,) = where.pieces
        rows = slice(piece.first_row, piece.first_row + piece.num_rows)
        assert ours[name][piece.num_rows :].eq(0).all()  # padding
        size = (piece.num_rows, *where.shape[1:])
        box = tuple(slice(a, a + n) for a, n in zip(piece.origin, size, strict=True))
        ours[name], theirs[name] = ours[name][rows], theirs[name][box]
    return {
        name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
        if theirs[name] is not None  # a gate of the normalized input reads no other
    }


def logits(config: GPT2Config, parts: int, input_ids_BT: torch.Tensor) -> torch.Tensor:
    """This process's part of what a float64 model makes of token ids."""
    with torch.no_grad():
        return cut_model(config, parts)(input_ids_BT).logits
