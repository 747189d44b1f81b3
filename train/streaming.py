"""A decoder that is larger than memory reads held-out text block by block.

All windows go through block 0, then through block 1, and so on; what a block gives lies in memory,
or in a file where it does not fit or has to outlast the process. Windows are whole, so no keys and
values are kept.

A folder that the user names holds, for each reading in turn:

    reading-1/state.json     what is read, how many blocks are done, and the digests of the others
    reading-1/after-7.bin    what the last of them gave, batch after batch
    reading-1/sums-7.safetensors    what measures have added up

`state.json` is written when the files that it names are on the disk, and the older ones are removed
after that: whenever a process is killed, one whole state is there.

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
from polyad.parallel.checkpoint.reading import Checkpoint
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
"""From the number of a block a context in which it is run, and gives what is called with the number
of each batch that went through it."""
STATE, READING = "state.json", "reading-{}"
ROOM = 0.9
"""The share of the free memory that weights may take: the rest is for what is computed."""


class StreamError(ValueError):
    """A folder that a reading cannot go on from: one line that says why."""

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
    """A model in evaluation mode: whole, or a `Streamed` one if that does not fit into memory.

    Args:
        weights: of the model.
        world: this process.
        precision: of its parameters.
        folder: where readings block by block keep how far they are, which are then chosen in any
            case; what they kept is removed at the end. None: they keep nothing.
        needs_whole: why the model has to be there as a whole; None: it need not.

    Raises:
        ConfigError: it has to be there as a whole, and is not to be, or does not fit; or its
            largest part does not.
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
    """Why weights cannot be read block by block; None: they can."""
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
    """A model in evaluation mode, of which all has to be in memory, or may be swapped.

    Args:
        weights: of the model.
        device: where it goes.
        precision: of its parameters.
        needs_whole: why.

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
    """Makes the folder if need be, and removes it, or what readings left in it, at the end."""
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
    """What comes of reading with a model, whole or streamed.

    A streamed one is read with twice: first it keeps its inputs, and when all of them went through
    the blocks it predicts.

    Args:
        model: in evaluation mode.
        read: calls the predictor with token ids and targets, the same each time, and tells the
            share that it has done.
        what: is read, for who goes on after a stop.
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
    """A predictor that keeps what it is asked, and predicts nothing."""

    cross_entropy = staticmethod(cross_entropy)

    def __init__(self, device: torch.device) -> None:
        self.batches: list[Tensor] = []
        self._device = device

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """Zeros for the losses."""
        (input_ids_BT,) = inputs
        self.batches.append(input_ids_BT.to("cpu", torch.int32))
        return ModelOutput(torch.zeros(input_ids_BT.shape, device=self._device), ())


class _Last:
    """A predictor of the same inputs in the same order, from what the last block gave."""

    cross_entropy = staticmethod(cross_entropy)

    def __init__(
        self, model: Streamed, batches: Sequence[Tensor], activations: Iterable[Tensor]
    ) -> None:
        self._model = model
        self._next = zip(batches, activations, strict=True)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The losses of the batch whose turn it is."""
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
        model: of which nothing is in memory.
        batches: token ids [B, T] of each, on the CPU.
        blocks: how many.
        what: is read, and what is added up of it, for who goes on after a stop.
        watch: looks at a block.
        sums: what `watch` adds up, tensors that stay the same ones, by name; None: the reading
            begins again after a stop, since they cannot be kept.
        report: the progress.
        after: what follows, in blocks, for the progress.

    Yields:
        What the last one of them gives [B, T, D], batch after batch.

    Raises:
        StreamError: what another reading kept is there.
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
    """What a block gives, batch after batch."""
    for number, entering_BTD in enumerate(activations):
        with torch.inference_mode():
            x_BTD = entering_BTD.to(model.device)
            positions_T = torch.arange(x_BTD.shape[1], device=model.device)
            x_BTD, _ = model.blocks[block](x_BTD, model.given(positions_T, x_BTD.dtype))
            seen(number)
        yield x_BTD
        told(block, number)


class _Activations(ABC):
    """What the next block gets, batch after batch.

    Attributes:
        seconds: that the reading took before it was stopped.
    """

    seconds = 0.0

    def resume(self) -> int | None:
        """How many blocks are done; None: not even the embedding is."""
        return None

    @abstractmethod
    def __iter__(self) -> Iterator[Tensor]:
        """Batches [B, T, D] on the CPU."""

    @abstractmethod
    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        """Takes the place of what is there, from which values are made.

        Args:
            blocks: that are done then.
            values: batches [B, T, D].
        """


class _InMemory(_Activations):
    """In memory: each batch takes the place of that before the block."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._held)

    def advance(self, blocks: int, values: Iterator[Tensor]) -> None:
        for number, value in enumerate(values):
            self._held[number : number + 1] = [value.cpu()]


class _File(Record):
    """A file that is whole."""

    name: PlainName
    bytes: Count
    sha256: str


class _State(Record):
    """`state.json`."""

    format: Literal[1]
    about: dict[str, str]
    """What is read with what."""
    blocks: Count
    """That are done."""
    seconds: float
    """That it took so far."""
    after: _File
    """What the last of them gave."""
    sums: _File | None
    """What is added up; None: nothing is."""


class _OnDisk(_Activations):
    """In a file, beside which the next one is written.

    Args:
        folder: of the files.
        batches: token ids [B, T].
        width: D.
        dtype: of the numbers.
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
    """In a file of a folder that the user names, from which a reading goes on.

    Args:
        folder: of one reading.
        batches: token ids [B, T].
        width: D.
        dtype: of the numbers.
        about: what is read with what.
        sums: what is added up, tensors that stay the same ones.

    Raises:
        StreamError: what another reading kept is there.
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
    """The bytes of a tensor on any device; those of one on the CPU may be written."""
    found: memoryview = x.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return found
