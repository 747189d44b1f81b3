"""`checkpoint.py`: the cost of saving, compared with a plain write of the same bytes.

One process trains GPT-2 124M. Again and again: a synchronous save, a plain write, an asynchronous
save during which training goes on, reading it all to verify it, and loading it. The writes take
turns in coming first, and each begins with an idle disk. Medians are reported.
"""

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyad.data.files import temporary_folder
from polyad.launch.command import Json, Positive, results
from polyad.model.build import build_model
from polyad.model.decoder import GPT2Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import PIECE_BYTES, verify_contents
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import Retention, step_folder, write_file
from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.config import ParallelConfig
from polyad.parallel.fragments import fill
from polyad.parallel.parallelize import parallelize
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine
from polyad.train.errors import ConfigError
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.loop.step import issue_step
from polyad.train.results import Progress, aligned
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.language import TextBatch, text_losses
from tests.benchmarks.comparison import Repeats, benchmark, now, start

STALL_GOAL, BANDWIDTH_GOAL = 1 / 20, 0.8
"""Shares of the synchronous save's time, and of the plain write's bandwidth."""
LEARNING_RATE = 1e-4
REST = 1.0
"""Seconds that the disk has to itself before a write, once all is flushed."""
Times = dict[str, list[float]]
RATES = (
    "plain_write", "synchronous_save", "asynchronous_commit", "verify_from_disk",
    "verify_from_memory", "load",
)  # fmt: skip
"""What moves the whole checkpoint."""


class _Trainer:
    """A training step on the same tokens each time."""

    def __init__(self, engine: Engine, batch_size: int, sequence_length: int) -> None:
        self.engine = engine
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, sequence_length + 1)
        self._tokens = torch.randint(50, shape, generator=generator).to(engine.device)

    def step(self) -> float:
        """Does a step; returns its seconds."""
        started = now(self.engine.device)
        batches = iter([TextBatch.of(self._tokens)])
        issued = issue_step(self.engine, text_losses, batches, 1, LEARNING_RATE)
        _ = issued.statistics.numbers  # waits for it
        return now(self.engine.device) - started


def _engine(config: GPT2Config, batch_size: int) -> Engine:
    engine = parallelize(
        build_model(config),
        ParallelConfig(zero_stage=1),
        world=comm.initialize(),
        make_optimizer=lambda parameters: build_optimizer(OptimizerConfig(), parameters),
        precision="fp32",
        global_batch_size=batch_size,
        micro_batch_size=batch_size,
        clip_grad_norm=1.0,
        source=InitialWeights(build_model(config), 0),
        cross_entropy=cross_entropy,
        compiled=False,
    )
    engine.train()
    return engine


@contextmanager
def _room_in(folder: Path, engine: Engine) -> Iterator[Path]:
    elements = sum(parameter.numel() for parameter in engine.module.parameters())
    needed = 3 * 12 * elements  # the plain file and two checkpoints of weights and two moments
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(f"--folder: {folder}: {needed:,} bytes are needed, {free:,} are free")
    with temporary_folder("bench-checkpoint-", folder) as place:
        yield place


def _measure(trainer: _Trainer, place: Path, repeats: int, steps: int) -> tuple[Times, int]:
    """All seconds by name, and the bytes of a checkpoint."""
    times: Times = {}
    progress = Progress("checkpoint", repeats + 1, "repeats")
    writes = _Writes(trainer, place)
    try:
        for repeat in range(repeats + 1):
            taken = {"step": [trainer.step() for _ in range(steps)]}
            kinds = [writes.synchronous, writes.plain, writes.asynchronous]
            first = repeat % len(kinds)
            for write in kinds[first:] + kinds[:first]:
                _settle(writes.nbytes)
                taken |= write(repeat)
            for name, seconds in taken.items() if repeat else ():
                times.setdefault(name, []).extend(seconds)
            progress((repeat + 1) / (repeats + 1))
    finally:
        writes.close()
    return times, writes.nbytes


def _settle(nbytes: int) -> None:
    """Gives every write the same conditions: an idle disk, and free memory to cache it in."""
    os.sync()  # or earlier writes and removals would be timed as well
    if nbytes:  # a virtual machine's host may have to provide the memory first
        with mmap.mmap(-1, nbytes) as memory:
            for page in range(0, nbytes, mmap.PAGESIZE):
                memory[page] = 1
    time.sleep(REST)


class _Writes:
    """The three ways to write as many bytes, each timed and then removed."""

    def __init__(self, trainer: _Trainer, place: Path) -> None:
        self._trainer, self._place = trainer, place
        engine, keep = trainer.engine, Retention()
        self._synchronous = Saver(engine, place / "synchronous", keep=keep)
        self._asynchronous = Saver(engine, place / "asynchronous", keep=keep, asynchronous=True)
        self.nbytes = 0
        """Bytes of a checkpoint, known after the first save, which is the first write."""
        self._data = bytearray()

    def synchronous(self, repeat: int) -> Times:
        """A save that is done when it returns."""
        started = time.perf_counter()
        self._synchronous.save(repeat, {}, "", {})
        seconds = time.perf_counter() - started
        path = self._place / "synchronous" / step_folder(repeat)
        self.nbytes = sum(file.stat().st_size for file in path.iterdir())
        shutil.rmtree(path)
        return {"synchronous_save": [seconds]}

    def plain(self, repeat: int) -> Times:
        """One file of the same size, from memory, flushed."""
        if not self._data:
            self._data = bytearray(1 + number % 255 for number in range(4096))
            self._data *= -(-self.nbytes // len(self._data))
        path, data = self._place / "plain", memoryview(self._data)[: self.nbytes]
        started = time.perf_counter()
        write_file(path, (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)))
        seconds = time.perf_counter() - started
        path.unlink()
        return {"plain_write": [seconds]}

    def asynchronous(self, repeat: int) -> Times:
        """A save while training goes on, which is then read.

        The step after the save runs beside the copy, waits for it, and sees the writing begin.
        """
        saver, trainer = self._asynchronous, self._trainer
        waited, started = saver.seconds_waited, time.perf_counter()
        saver.save(repeat, {}, "", {})
        saved = time.perf_counter() - started
        copying = trainer.step()
        waited = saver.seconds_waited - waited
        path, writing = self._place / "asynchronous" / step_folder(repeat), []
        while not path.exists():  # poll commits the checkpoint once it is written
            saver.poll()
            writing.append(trainer.step())
        saver.finish()
        committed = time.perf_counter() - started
        reading = _reading(trainer.engine, path)
        shutil.rmtree(path)
        return {
            "asynchronous_save": [saved], "asynchronous_wait": [waited],
            "asynchronous_stall": [saved + waited], "asynchronous_commit": [committed],
            "step_while_copying": [copying], "step_while_writing": writing, **reading,
        }  # fmt: skip

    def close(self) -> None:
        """Ends the thread, and lets its memory go."""
        self._asynchronous.close()


def _reading(engine: Engine, path: Path) -> Times:
    """Verification from the disk and from memory, and loading after that."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    times = {}
    for name in ("verify_from_disk", "verify_from_memory"):
        started = time.perf_counter()
        verify_contents(path)
        times[name] = [time.perf_counter() - started]
    started = time.perf_counter()
    fill(engine, Checkpoint(path))
    times["load"] = [time.perf_counter() - started]
    return times


def checkpoint_bench_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    gigabytes = result["bytes"] / 1e9
    rows: list[tuple[str, ...]] = [("", "median s", "from", "to", "GB/s")]
    labels = {
        "plain_write": "plain write and fsync", "synchronous_save": "synchronous save",
        "asynchronous_save": "asynchronous: until save returns",
        "asynchronous_wait": "  and until weights may change",
        "asynchronous_stall": "  stall, the sum of both",
        "asynchronous_commit": "  until committed",
        "verify_from_disk": "verify, from disk", "verify_from_memory": "verify, from memory",
        "load": "load, from memory", "step": "step",
        "step_while_copying": "  after the save: beside the copy",
        "step_while_writing": "  while written",
    }  # fmt: skip
    for name, label in labels.items():
        median, spread = result["seconds"][name], result["spread"][name]
        rate = f"{gigabytes / median:.2f}" if name in RATES else ""
        rows.append((label, *(f"{seconds:.3f}" for seconds in (median, *spread)), rate))
    goals = (
        ("stall / synchronous save", "stall", "at most"),
        ("bandwidth / plain write", "bandwidth", "at least"),
    )
    lines = [f"a checkpoint of {gigabytes:.2f} GB, {result['repeats']} repeats", *aligned(rows)]
    for label, name, how in goals:
        reached = "reached" if result[f"{name}_reached"] else "missed"
        ratio, goal = result[f"{name}_ratio"], result[f"{name}_goal"]
        lines.append(f"{label}: {ratio:.3f}, goal {how} {goal:.2f}: {reached}")
    return "\n".join(lines)


@benchmark("checkpoint", "--folder . --json checkpoint.json")
def checkpoint(
    *,
    folder: Path = Path(),
    repeats: Repeats = 5,
    steps: Positive = 3,
    batch_size: Positive = 1,
    sequence_length: Positive = 128,
    json: Json = None,
) -> None:
    """Times saving and loading GPT-2 124M with its moments beside a plain write.

    Args:
        folder (DIR): a folder on the disk to measure; default: this one.
        steps: training steps in each run; default 3.
        batch_size (B): samples of a step; default 1.
        sequence_length (T): tokens of a sample; default 128.
    """
    config = GPT2Config(sequence_length=1024, vocab_size=50257)
    if not folder.is_dir():
        raise ConfigError(f"--folder: {folder}: there is no such folder")
    with results(json) as show:
        engine = _engine(config, batch_size)
        trainer = _Trainer(engine, batch_size, sequence_length)
        trainer.step()  # creates the optimizer's moments
        with _room_in(folder, engine) as place:
            times, nbytes = _measure(trainer, place, repeats, steps)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        stall = medians["asynchronous_stall"] / medians["synchronous_save"]
        bandwidth = medians["plain_write"] / medians["synchronous_save"]
        result = {
            "model": config.model_dump(mode="json"), "bytes": nbytes, "repeats": repeats,
            "batch_size": batch_size, "sequence_length": sequence_length,
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "seconds": medians, "all_seconds": times,
            "spread": {name: [min(taken), max(taken)] for name, taken in times.items()},
            "stall_ratio": stall, "stall_goal": STALL_GOAL, "stall_reached": stall <= STALL_GOAL,
            "bandwidth_ratio": bandwidth, "bandwidth_goal": BANDWIDTH_GOAL,
            "bandwidth_reached": bandwidth >= BANDWIDTH_GOAL,
        }  # fmt: skip
        show(result, checkpoint_bench_table(result))


if __name__ == "__main__":
    start(checkpoint)
