"""Block-by-block reading of held-out text with a decoder that is larger than memory.

All windows go through block 0, then through block 1, and so on. A block's outputs are kept in
memory, or in a file if they do not fit or must outlast the process. Windows are whole, so no keys
and values are cached.

A folder that the user names contains, for each reading in turn:

    reading-1/state.json     what is read, how many blocks are done, and digests of the other files
    reading-1/after-7.bin    outputs of the last of them, batch after batch
    reading-1/sums-7.safetensors    accumulators of the measures

`state.json` is written once the files that it names are on disk, and older ones are removed after
that: whenever a process is killed, one complete state exists.

Shapes: B windows of a batch, T tokens of a window, D width.
"""

import contextlib
import hashlib
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from polyad.data.files import (
    DigestedFile,
    digest_of,
    flush_to_disk,
    locked,
    temporary_folder,
    write_whole,
    writing,
)
from polyad.model.decoder import DecoderSettings
from polyad.model.output import ModelOutput
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.host_memory import free_memory, keep_few_products
from polyad.parallel.records import Count, PlainName, Record
from polyad.parallel.streamed import Streamed, bytes_of_weights, parts_of
from polyad.parallel.tensor_folder import read_form
from polyad.parallel.weights import Weights, load_model
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.config.environment import folder_digest
from polyad.train.console import Progress, in_bytes
from polyad.train.errors import ConfigError
from polyad.train.tasks.losses import cross_entropy
from polyad.train.tasks.task import OneDevice, Predictor, Share

Found = TypeVar("Found")
Watch = Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]
"""Maps a block number to a context in which the block is run; the context yields a function that is
called with the number of each batch that has passed it."""
STATE, READING = "state.json", "reading-{}"
ROOM = 0.9
"""Share of the free memory for weights; the rest is for activations."""


class StreamError(ValueError):
    """A folder from which a reading cannot be resumed: one line that says why."""

    exit_status = 2


@contextlib.contextmanager
def opened_model(
    weights: Weights,
    world: comm.World,
    precision: Precision,
    *,
    folder: Path | None = None,
    needs_whole: str | None = None,
) -> Iterator[nn.Module]:
    """Opens a model in evaluation mode: whole, or `Streamed` if it does not fit into memory.

    Args:
        weights: the model's weights.
        world: this process.
        precision: precision of the parameters.
        folder: forces block-by-block reading, with its progress kept in this folder until the end.
            None: progress is not kept.
        needs_whole: why the model must be in memory as a whole; None: it need not.

    Raises:
        ConfigError: it must be whole but `folder` is given or it does not fit; or its largest part
            does not fit.
    """
    size, free = bytes_of_weights(weights, precision), _free(world.device)
    reason = f"{in_bytes(size)} of weights in {precision}, {in_bytes(free)} of free memory"
    refusal = needs_whole or _refusal(weights, world)
    if folder is not None:
        reason = f"--stream {folder}"
        if refusal is not None:
            raise ConfigError(f"{reason}: is not allowed: {refusal}")
    elif size <= ROOM * free:
        yield load_model(weights, world.device, precision)
        return
    elif refusal is not None:
        yield whole_model(weights, world.device, precision, refusal)
        return
    keep_few_products()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_kept(folder))
        model = Streamed(weights, world.device, precision, folder)
        if model.largest > ROOM * free:
            raise ConfigError(
                f"{weights.folder}: its largest part has {in_bytes(model.largest)} in {precision}, "
                f"and {in_bytes(free)} of memory are free"
            )
        if world.is_main:
            told = f"reading {weights.folder} block by block: {reason}"
            print(f"polyad: {told}", file=sys.stderr, flush=True)
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


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Creates the folder if need be, and at the end removes it or the readings' files in it."""
    was_there = folder.exists()
    if was_there and not folder.is_dir():
        raise StreamError(f"--stream: {folder}: is not a folder")
    strange = [p.name for p in folder.iterdir() if not p.match("reading-*")] if was_there else []
    if set(strange) - {"lock"}:
        raise StreamError(
            f"--stream: {folder}: holds {sorted(strange)[0]}, which no reading has left there; an "
            f"empty folder or a new one is needed"
        )
    with contextlib.ExitStack() as stack:
        with writing(folder):
            is_ours = stack.enter_context(locked(folder / "lock", wait=False))
        if not is_ours:
            raise StreamError(f"--stream: {folder}: another process is reading there")
        yield
        for path in folder.glob("reading-*"):
            shutil.rmtree(path)
        (folder / "lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def predicting(
    model: nn.Module,
    read: Callable[[Predictor, Share | None], Found],
    what: str,
    report: Progress | None,
) -> Found:
    """Returns the result of a reading with a whole or streamed model.

    For a streamed model `read` is called twice: first to collect its inputs, and after these went
    through the blocks to predict.

    Args:
        model: in evaluation mode.
        read: calls the predictor with token ids and targets, the same each time, and reports the
            share done.
        what: identifies what is read, for resuming.
        report: the progress.
    """
    if not isinstance(model, Streamed):
        return read(OneDevice(model, cross_entropy), report)
    inputs = _Inputs(model.device)
    read(inputs, None)
    blocks = len(model.blocks)
    with (
        run_blocks(
            model, inputs.batches, blocks, what, sums={}, report=report, after=1
        ) as activations,
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
    what: str,
    *,
    watch: Watch = lambda block: contextlib.nullcontext(lambda number: None),
    sums: Mapping[str, Tensor] | None = None,
    report: Progress | None = None,
    after: int = 0,
) -> Iterator[Iterable[Tensor]]:
    """Runs inputs through the first blocks of a model.

    Args:
        model: the model, not in memory.
        batches: token ids [B, T] of each batch, on the CPU.
        blocks: number of blocks to run.
        what: identifies what is read and accumulated, for resuming.
        watch: observes a block.
        sums: accumulators of `watch` by name, always the same tensor objects; None: they cannot be
            saved, so the reading restarts after a stop.
        report: the progress.
        after: amount of work that follows, in blocks, for the progress.

    Yields:
        Outputs of the last one of them [B, T, D], batch after batch.

    Raises:
        StreamError: the folder has the state of a different reading.
    """
    begin, *parts = parts_of(model)
    model.readings += 1
    place = None if model.folder is None else model.folder / READING.format(model.readings)
    about = {
        "weights": folder_digest(model.weights.folder) + _choice(model.weights),
        "precision": model.precision + (" as tf32" if _multiplies_tf32(model) else ""),
        "device": model.device.type,
        "torch": torch.__version__,
        "reading": what,
        "inputs": _digest(batches),
    }
    tokens = sum(batch.numel() for batch in batches)
    shape = (model.config.hidden_size, DTYPES[model.precision])
    size = tokens * shape[0] * shape[1].itemsize
    with contextlib.ExitStack() as stack:
        activations: _Activations
        if place is not None and sums is not None:
            activations = _Kept(place, batches, *shape, about, sums)
        elif size > (_free(torch.device("cpu")) - model.largest) / 2:
            folder = stack.enter_context(temporary_folder("polyad-stream-"))
            activations = _OnDisk(folder, batches, *shape)
        else:
            activations = _InMemory()
        done = activations.resume()
        model.seconds_before += activations.seconds
        if report is not None:
            report.go_on((done or 0) / (blocks + after))

        def told(block: int, number: int) -> None:
            if report is not None:
                report((block + (number + 1) / len(batches)) / (blocks + after))

        if done is None:
            with model.part(*begin):
                activations.advance(0, (_embedded(model, ids_BT) for ids_BT in batches))
        for block in range(done or 0, blocks):
            with model.part(*parts[block]), watch(block) as seen:
                run = _through(model, block, activations, seen, told)
                activations.advance(block + 1, run)
        yield activations


def _choice(weights: Weights) -> str:
    return " (their average)" if isinstance(weights, Checkpoint) and weights.is_average else ""


def _multiplies_tf32(model: Streamed) -> bool:
    return model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def _digest(batches: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(f"{tuple(batch.shape)}".encode())
        digest.update(batch.contiguous().numpy().data)
    return digest.hexdigest()[:16]


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


class _Activations(ABC):
    """Inputs of the next block, batch after batch.

    Attributes:
        seconds: time that the reading took before it was stopped.
    """

    seconds = 0.0

    def resume(self) -> int | None:
        """The number of finished blocks; None if not even the embedding is done."""
        return None

    @abstractmethod
    def __iter__(self) -> Iterator[Tensor]:
        """Batches [B, T, D] on the CPU."""

    @abstractmethod
    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        """Replaces the stored inputs by values that are computed from them.

        Args:
            blocks: number of blocks done then.
            values: batches [B, T, D].
        """


class _InMemory(_Activations):
    """In memory: each batch replaces its input to the block."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._held)

    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        for number, value in enumerate(values):
            self._held[number : number + 1] = [value.cpu()]


class _File(Record):
    """A complete file."""

    name: PlainName
    bytes: Count
    sha256: str


class _State(Record):
    """`state.json`."""

    format: Literal[1]
    about: dict[str, str]
    """Identifies the reading: its text, weights and measures."""
    blocks: Count
    """Number of finished blocks."""
    seconds: float
    """Time so far."""
    after: _File
    """Outputs of the last of them."""
    sums: _File | None
    """Accumulators; None: there are none."""


class _OnDisk(_Activations):
    """In a file; the next block's is written beside it.

    Args:
        folder: folder of the files.
        batches: token ids [B, T].
        width: D.
        dtype: data type of the activations.
    """

    def __init__(
        self, folder: Path, batches: Sequence[Tensor], width: int, dtype: torch.dtype
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._shapes = [(*batch.shape, width) for batch in batches]
        self._file: _File | None = None

    def __iter__(self) -> Iterator[Tensor]:
        assert self._file is not None
        with (self._folder / self._file.name).open("rb") as file:
            for shape in self._shapes:
                x_BTD = torch.empty(shape, dtype=self._dtype)
                file.readinto(_bytes_of(x_BTD))
                yield x_BTD

    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        written = self._written(f"after-{blocks}.bin", map(_bytes_of, values))
        if self._file is not None:
            (self._folder / self._file.name).unlink()
        self._file = written

    def _written(self, name: str, pieces: Iterable[memoryview]) -> _File:
        with self._writing():
            file = DigestedFile(self._folder / name)
        try:
            for piece in pieces:
                with self._writing():
                    file.write(piece)
            with self._writing():
                digest = file.finish()
        finally:
            file.close()
        return _File(name=name, bytes=file.size, sha256=digest)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing(self._folder, "--stream FOLDER names a place with more room")


class _Kept(_OnDisk):
    """In a file of a folder that the user names, from which a reading can be resumed.

    Args:
        folder: folder of one reading.
        batches: token ids [B, T].
        width: D.
        dtype: data type of the activations.
        about: identifies the reading.
        sums: accumulators, always the same tensor objects.

    Raises:
        StreamError: the folder has the state of a different reading.
    """

    def __init__(
        self,
        folder: Path,
        batches: Sequence[Tensor],
        width: int,
        dtype: torch.dtype,
        about: Mapping[str, str],
        sums: Mapping[str, Tensor],
    ) -> None:
        super().__init__(folder, batches, width, dtype)
        self._about, self._sums, self._began = dict(about), sums, time.monotonic()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> int | None:
        path = self._folder / STATE
        if not path.exists():
            return None
        state: _State = read_form(path, _State, StreamError)
        for name, value in self._about.items():
            if (there := state.about.get(name)) != value:
                raise StreamError(
                    f"{self._folder}: is of another reading: {name} {there!r} there, {value!r} "
                    f"here; delete it or name another folder"
                )
        for file in filter(None, (state.after, state.sums)):
            place = self._folder / file.name
            if not place.is_file() or digest_of(place) != file.sha256:
                raise StreamError(
                    f"{place}: is damaged or missing; delete {self._folder} to begin again"
                )
        if state.sums is not None:
            kept = load_file(self._folder / state.sums.name)
            for name, tensor in self._sums.items():
                tensor.copy_(kept[name])
        self._file, self.seconds = state.after, state.seconds
        return state.blocks

    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        after = self._written(f"after-{blocks}.bin", map(_bytes_of, values))
        sums = None
        if self._sums:
            content = save({name: tensor.cpu() for name, tensor in self._sums.items()})
            sums = self._written(f"sums-{blocks}.safetensors", [memoryview(content)])
        seconds = self.seconds + time.monotonic() - self._began
        state = _State(
            format=1, about=self._about, blocks=blocks, seconds=seconds, after=after, sums=sums
        )
        with self._writing():
            for file in filter(None, (after, sums)):
                flush_to_disk(self._folder / file.name)
            write_whole(self._folder / STATE, state.model_dump_json())
            flush_to_disk(self._folder)
            known = {STATE, *(file.name for file in (after, sums) if file)}
            for path in self._folder.iterdir():
                if path.name not in known:
                    path.unlink()
        self._file = after


def _bytes_of(x: Tensor) -> memoryview:
    """The bytes of a tensor on any device; for one on the CPU they are writable."""
    found: memoryview = x.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return found
