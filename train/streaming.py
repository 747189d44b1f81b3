"""Block-by-block reading of held-out text with a decoder that is larger than memory.

All windows go through block 0, then through block 1, and so on. A block's outputs are kept in
memory, or in a file if they do not fit. Windows are whole, so no keys and values are cached.

Shapes: B windows of a batch, T tokens of a window, D width.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from polyad.data.files import named, temporary_folder
from polyad.model.decoder import DecoderSettings
from polyad.model.output import ModelOutput
from polyad.parallel import comm
from polyad.parallel.host_memory import free_memory, keep_few_products, return_freed_memory
from polyad.parallel.streamed import Streamed, bytes_of_weights, parts_of
from polyad.parallel.weights import Weights, load_model
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.console import Progress, in_bytes
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.task import OneDevice, Predictor, Share

Found = TypeVar("Found")
Watch = Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]
"""Maps a block number to a context in which the block is run; the context yields a function that is
called with the number of each batch that has passed it."""
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
    if size <= ROOM * free:
        yield load_model(weights, world.device, precision)
        return
    if refusal is not None:
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
    if not isinstance(config, DecoderSettings) or config.head is not None:
        return f"model.kind: {config.kind} is read as a whole; a decoder of text block by block"
    if world.size > 1:
        return f"one process reads block by block, and there are {world.size}"
    return None


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def whole_model(
    weights: Weights, device: torch.device, precision: Precision, needs_whole: str
) -> nn.Module:
    """Loads a whole model in evaluation mode, which may be swapped.

    Args:
        weights: the model's weights.
        device: the model's device.
        precision: precision of the parameters.
        needs_whole: why it must be whole, for the error.

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
    read: Callable[[Predictor, Share | None], Found],
    report: Progress | None,
) -> Found:
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
    inputs = _Inputs(model.device)
    read(inputs, None)
    blocks = len(model.blocks)
    with (
        run_blocks(model, inputs.batches, blocks, report=report, after=1) as activations,
        model.part(*parts_of(model)[-1]),
    ):
        last = _Last(model, inputs.batches, activations)

        def told(share: float) -> None:
            if report is not None:
                report((blocks + share) / (blocks + 1))

        return read(last, told)


class _Inputs:
    """A predictor that records its inputs and predicts nothing."""

    cross_entropy = staticmethod(cross_entropy)

    def __init__(self, device: torch.device) -> None:
        self.batches: list[Tensor] = []
        self._device = device

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """Returns zeros as losses."""
        (input_ids_BT,) = inputs
        self.batches.append(input_ids_BT.to("cpu", torch.int32))
        return ModelOutput(torch.zeros(input_ids_BT.shape, device=self._device), ())


class _Last:
    """A predictor for the same inputs in the same order, from the last block's outputs."""

    cross_entropy = staticmethod(cross_entropy)

    def __init__(
        self, model: Streamed, batches: Sequence[Tensor], activations: Iterable[Tensor]
    ) -> None:
        self._model = model
        self._next = zip(batches, activations, strict=True)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """Returns the losses of the next batch."""
        (input_ids_BT,) = inputs
        ids_BT, x_BTD = next(self._next)
        assert torch.equal(ids_BT, input_ids_BT.to("cpu", torch.int32))
        x_BTD = x_BTD.to(self._model.device)
        return ModelOutput(self._model.score(x_BTD, **named), ())


@contextlib.contextmanager
def run_blocks(
    model: Streamed,
    batches: Sequence[Tensor],
    blocks: int,
    *,
    watch: Watch = lambda block: contextlib.nullcontext(lambda number: None),
    report: Progress | None = None,
    after: int = 0,
) -> Iterator[Iterable[Tensor]]:
    """Runs inputs through the first blocks of a model.

    Args:
        model: the model, not in memory.
        batches: token ids [B, T] of each batch, on the CPU.
        blocks: number of blocks to run.
        watch: observes a block.
        report: the progress.
        after: amount of work that follows, in blocks, for the progress.

    Yields:
        Outputs of the last one of them [B, T, D], batch after batch.
    """
    begin, *parts = parts_of(model)
    tokens = sum(batch.numel() for batch in batches)
    shape = (model.config.hidden_size, DTYPES[model.precision])
    size = tokens * shape[0] * shape[1].itemsize
    with contextlib.ExitStack() as stack:
        activations: _InMemory | _OnDisk = _InMemory()
        if size > (_free(torch.device("cpu")) - model.largest) / 2:
            folder = stack.enter_context(temporary_folder("polyad-stream-"))
            activations = _OnDisk(folder, batches, *shape)

        def told(block: int, number: int) -> None:
            if report is not None:
                report((block + (number + 1) / len(batches)) / (blocks + after))

        with model.part(*begin):
            activations.replace(_embedded(model, ids_BT) for ids_BT in batches)
        for block in range(blocks):
            with model.part(*parts[block]), watch(block) as seen:
                activations.replace(_through(model, block, activations, seen, told))
        yield activations


@torch.inference_mode()
def _embedded(model: Streamed, ids_BT: Tensor) -> Tensor:
    positions_T = torch.arange(ids_BT.shape[1], device=model.device)
    return model.embed(ids_BT.to(model.device).long(), positions_T)


def _through(
    model: Streamed,
    block: int,
    activations: Iterable[Tensor],
    seen: Callable[[int], None],
    told: Callable[[int, int], None],
) -> Iterator[Tensor]:
    """Yields a block's outputs, batch after batch."""
    for number, entering_BTD in enumerate(activations):
        with torch.inference_mode():
            x_BTD = entering_BTD.to(model.device)
            positions_T = torch.arange(x_BTD.shape[1], device=model.device)
            x_BTD, _ = model.blocks[block](x_BTD, model.given(positions_T, x_BTD.dtype))
            seen(number)
        yield x_BTD
        told(block, number)


class _InMemory:
    """Inputs of the next block [B, T, D] on the CPU, batch after batch, in memory."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._held)

    def replace(self, values: Iterable[Tensor]) -> None:
        """Replaces each batch by its value, which is computed from it."""
        for number, value in enumerate(values):
            self._held[number : number + 1] = [value.cpu()]


class _OnDisk:
    """The same in a file; the next block's are written beside it.

    Args:
        folder: folder of the files.
        batches: token ids [B, T].
        width: D.
        dtype: data type of the activations.
    """

    def __init__(
        self, folder: Path, batches: Sequence[Tensor], width: int, dtype: torch.dtype
    ) -> None:
        self._path, self._dtype = folder / "activations.bin", dtype
        self._shapes = [(*batch.shape, width) for batch in batches]

    def __iter__(self) -> Iterator[Tensor]:
        with self._path.open("rb") as file:
            for shape in self._shapes:
                x_BTD = torch.empty(shape, dtype=self._dtype)
                file.readinto(_bytes_of(x_BTD))
                yield x_BTD

    def replace(self, values: Iterable[Tensor]) -> None:
        """Replaces all batches by values that are computed from them."""
        following = self._path.with_suffix(".next")
        with following.open("wb") as file:
            for value in values:
                with named(following):
                    file.write(_bytes_of(value))
        following.replace(self._path)


def _bytes_of(x: Tensor) -> memoryview:
    """The bytes of a tensor on any device; for one on the CPU they are writable."""
    content: memoryview = x.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return content
