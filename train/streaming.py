"""Block-by-block reading of held-out text with a decoder that is larger than memory.

All windows go through block 0, then through block 1, and so on. A block's outputs replace its
inputs in memory, or in a file if they do not fit. Windows are whole, so no keys and values are
cached.

Shapes: B windows of a batch, T tokens of a window, D width.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyad.data.files import named, temporary_folder
from polyad.model.decoder import DecoderSettings
from polyad.model.foreign import KIND
from polyad.model.output import ModelOutput
from polyad.parallel import comm
from polyad.parallel.host_memory import free_memory, keep_few_products, return_freed_memory
from polyad.parallel.weights import Streamed, Weights, bytes_of_weights, load_model, parts_of
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.errors import ConfigError
from polyad.train.results import in_bytes
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.samples import Passages
from polyad.train.tasks.task import OneDevice, Predictor, Share

Result = TypeVar("Result")
ROOM = 0.9
"""Share of the free memory for weights; the rest is for activations."""


@contextlib.contextmanager
def opened_model(
    weights: Weights,
    world: comm.World,
    precision: Precision,
    *,
    needs_whole: str | None = None,
) -> Iterator[nn.Module]:
    """Opens a model in evaluation mode: whole, or `Streamed` if it does not fit into memory.

    Args:
        weights: the model's weights.
        world: this process.
        precision: precision of the parameters.
        needs_whole: why the model must be in memory as a whole; None: it need not.

    Raises:
        ConfigError: it must be whole and does not fit, or its largest part does not fit.
    """
    size, free = bytes_of_weights(weights, precision), _free(world.device)
    refusal = needs_whole or _refusal(weights, world)
    if size <= ROOM * free or refusal is not None:
        yield whole_model(weights, world.device, precision, refusal)
        return
    keep_few_products()
    return_freed_memory()
    model = Streamed(weights, world.device, precision)
    if model.largest > ROOM * free:
        raise ConfigError(
            f"{weights.folder}: its largest part has {in_bytes(model.largest)} in {precision}, "
            f"and {in_bytes(free)} of memory are free"
        )
    if world.is_main:
        sizes = f"{in_bytes(size)} of weights in {precision}, {in_bytes(free)} of free memory"
        line = f"polyad: reading {weights.folder} block by block: {sizes}"
        print(line, file=sys.stderr, flush=True)
    yield model


def _refusal(weights: Weights, world: comm.World) -> str | None:
    """Returns why weights cannot be read block by block; None if they can."""
    config = weights.model_config()
    is_decoder = isinstance(config, DecoderSettings) and config.head is None
    if not is_decoder or config.kind == KIND:
        return f"model.kind: {config.kind} is read as a whole; a decoder of text block by block"
    if world.size > 1:
        return f"one process reads block by block, and there are {world.size}"
    return None


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def whole_model(
    weights: Weights, device: torch.device, precision: Precision, needs_whole: str | None
) -> nn.Module:
    """Loads a whole model in evaluation mode, which may be swapped.

    Args:
        weights: the model's weights.
        device: the model's device.
        precision: precision of the parameters.
        needs_whole: why it must be whole, for the error; None: it is known to fit.

    Raises:
        ConfigError: it does not fit.
    """
    import psutil  # not at the top: see `free_memory`

    size, free = bytes_of_weights(weights, precision), _free(device)
    swap = 0 if device.type == "cuda" else psutil.swap_memory().free
    if size > free + swap:
        raise ConfigError(
            f"{weights.folder}: {in_bytes(size)} of weights in {precision}, {in_bytes(free)} of "
            f"memory are free, and not block by block: {needs_whole}"
        )
    return load_model(weights, device, precision)


def predicting(
    model: nn.Module,
    read: Callable[[Predictor, Share | None], Result],
    report: Share | None,
) -> Result:
    """Returns the result of a reading with a whole or streamed model.

    For a streamed model `read` is called twice: first to collect its inputs, and after these went
    through the blocks to predict.

    Args:
        model: in evaluation mode.
        read: calls the predictor with token ids and targets, the same each time, and reports the
            share done.
        report: the progress.
    """
    if not isinstance(model, Streamed):
        return read(OneDevice(model, cross_entropy), report)
    predictor, blocks = _InTwoPasses(model), len(model.blocks)
    read(predictor, None)
    say = report or (lambda share: None)
    with activations_of(model, predictor.ids) as activations:
        for _ in run_blocks(
            model, activations, report=lambda share: say(share * blocks / (blocks + 1))
        ):
            pass
        predictor.outputs = iter(activations)
        with model.part(*parts_of(model)[-1]):
            return read(predictor, lambda share: say((blocks + share) / (blocks + 1)))


class _InTwoPasses:
    """A predictor that first records its inputs and predicts nothing, and then scores the last
    block's outputs for the same inputs in the same order."""

    cross_entropy = staticmethod(cross_entropy)

    def __init__(self, model: Streamed) -> None:
        self.ids: list[Tensor] = []
        self.outputs: Iterator[Tensor] | None = None
        self._model = model

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """Returns the losses of a batch; in the first pass zeros."""
        (input_ids_BT,) = inputs
        if self.outputs is None:
            self.ids.append(input_ids_BT.to("cpu", torch.int32))
            losses_BT = torch.zeros(input_ids_BT.shape, device=self._model.device)
            return ModelOutput(losses_BT, ())
        x_BTD = next(self.outputs).to(self._model.device)
        return ModelOutput(self._model.score(x_BTD, **named), ())


@contextlib.contextmanager
def activations_of(model: Streamed, batches: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the input of the first block for each batch [B, T, D], on the CPU.

    They are in memory, or in a mapped file if they do not fit.

    Args:
        model: the model, not in memory.
        batches: token ids [B, T], on the CPU.
    """
    width, dtype = model.config.hidden_size, DTYPES[model.precision]
    sizes = [width * ids_BT.numel() for ids_BT in batches]
    with contextlib.ExitStack() as stack:
        if sum(sizes) * dtype.itemsize > (_free(torch.device("cpu")) - model.largest) / 2:
            folder = stack.enter_context(temporary_folder("polyad-stream-"))
            numbers = mapped(folder / "activations.bin", sum(sizes), dtype)
        else:
            numbers = torch.empty(sum(sizes), dtype=dtype)
        activations = [
            part.view(*ids_BT.shape, width)
            for part, ids_BT in zip(torch.split(numbers, sizes), batches, strict=True)
        ]
        with model.part(*parts_of(model)[0]), torch.inference_mode():
            for x_BTD, ids_BT in zip(activations, batches, strict=True):
                positions_T = torch.arange(ids_BT.shape[1], device=model.device)
                x_BTD.copy_(model.embed(ids_BT.to(model.device).long(), positions_T))
        yield activations


def mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers that are in a new file.

    Raises:
        DataError: the disk has no room for it.
    """
    with named(path), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def run_blocks(
    model: Streamed,
    activations: Sequence[Tensor],
    last: int | None = None,
    *,
    report: Share = lambda share: None,
) -> Iterator[tuple[int, int]]:
    """Runs inputs through the first blocks of a model; a block's outputs replace its inputs.

    Args:
        model: the model, not in memory.
        activations: inputs of the first block [B, T, D], on the CPU.
        last: number of blocks to run; None: all.
        report: called with the share done.

    Yields:
        A block that is in memory, and the number of the batch that has passed it.
    """
    blocks = len(model.blocks) if last is None else last
    for block in range(blocks):
        with model.part(*parts_of(model)[1 + block]):
            for number, x_BTD in enumerate(activations):
                x_BTD.copy_(run_block(model, block, x_BTD))
                yield block, number
                report((block + (number + 1) / len(activations)) / blocks)


@torch.inference_mode()
def run_block(model: Streamed, block: int, x_BTD: Tensor) -> Tensor:
    """Returns the output of a block that is in memory, on the model's device."""
    x_BTD = x_BTD.to(model.device)
    positions_T = torch.arange(x_BTD.shape[1], device=model.device)
    x_BTD, _ = model.blocks[block](x_BTD, model.given(positions_T, x_BTD.dtype))
    return x_BTD


def on_device(passages: Passages, device: torch.device) -> Passages:
    """Returns a batch whose tokens are on a device."""
    return Passages(passages.number_B, *(each.to(device) for each in passages[1:]))
