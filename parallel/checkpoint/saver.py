"""Saves a run's checkpoints: while training waits, or from a snapshot while it goes on."""

import base64
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.commit import Retention, Shard, staging_folder
from polyad.parallel.checkpoint.snapshot import SnapshotWriter, memory_needed
from polyad.parallel.checkpoint.writer import (
    SaveError,
    chunks_of,
    raise_together,
    remove_quietly,
    save,
    small_files,
)
from polyad.parallel.zero import Engine


@dataclass
class _Pending:
    """A snapshot that is not a complete checkpoint yet."""

    step: int
    staging: Path
    others: dict[str, bytes]
    committing: bool = False
    answer: dict[str, Any] | None = None
    """The answer of this process's writer to its last order."""


class Saver:
    """Writes one checkpoint after the other; all processes call every method together.

    Asynchronous saving goes on while a thread copies what this process would write; whatever
    changes weights or moments first waits for that. Another process writes the copy. Nothing is
    committed before every process knows that all writers are done.

    Args:
        engine: what is saved.
        folder: the run's `checkpoints` folder.
        keep: which older checkpoints stay.
        asynchronous: whether training goes on meanwhile. It takes as much memory more on the host
            as this process's part of a checkpoint, from now on.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, keep: Retention, asynchronous: bool = False
    ) -> None:
        self._engine, self._folder, self._keep = engine, folder, keep
        self._pending: _Pending | None = None
        self._writer: SnapshotWriter | None = None
        self.seconds_waited = 0.0
        """Seconds that training waited for copies, over all saves."""
        if asynchronous:
            self._writer = self._new_writer(memory_needed(list(chunks_of(engine))))

    def save(
        self,
        step: int,
        state: dict[str, Any],
        config_yaml: str,
        files: Mapping[str, bytes],
        best: int | None = None,
        *,
        judged: bool = True,
    ) -> None:
        """Begins to save, after the save before is done; without a writer it returns when done.

        Of an asynchronous save weights and moments may still be read when this returns: see
        `Engine.before_change`.

        Args:
            step: optimizer steps done.
            state: JSON values for `state.json`, the same on every process.
            config_yaml: the resolved configuration.
            files: what else lies in it by name, as a tokenizer.
            best: the step of the best checkpoint so far, perhaps of this one, which stays; None:
                none is marked.
            judged: whether no validation of these weights is due.

        Raises:
            SaveError: this save or the one before failed, on any process.
        """
        self.finish()
        self._keep = replace(self._keep, best=best, judged=judged)
        if self._writer is None:
            save(
                self._engine, self._folder, step, state=state, config_yaml=config_yaml,
                files=files, keep=self._keep,
            )  # fmt: skip
            return
        chunks = list(chunks_of(self._engine))
        if (needed := memory_needed(chunks)) > self._writer.nbytes:
            self._writer.close()
            self._writer = self._new_writer(needed)
        staging = comm.from_main(staging_folder(self._folder, step))
        assert staging is not None
        order = {"do": "write", "staging": str(staging), "rank": comm.rank()}
        self._writer.take(chunks, order, self._engine.device)
        self._engine.before_change(self._settle)
        self._pending = _Pending(step, staging, small_files(state, config_yaml, files))

    def _new_writer(self, nbytes: int) -> SnapshotWriter:
        return SnapshotWriter(nbytes, pinned=self._engine.device.type == "cuda")

    @property
    def writer_id(self) -> int | None:
        """The process that writes this one's snapshots, if there is one."""
        return None if self._writer is None else self._writer.process_id

    def poll(self) -> None:
        """Checks, without waiting, whether the save is done; called after every step.

        Raises:
            SaveError: it failed, on any process.
        """
        self._advance(wait=False)

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            SaveError: it failed, on any process.
        """
        self._advance(wait=True)

    def close(self) -> None:
        """Ends the writer; an unfinished save is lost. Exchanges nothing with other processes."""
        if self._writer is not None:
            self._writer.close(kill=self._pending is not None)
            self._writer = None

    def _settle(self) -> None:
        """Waits until weights and moments are copied. Exchanges nothing with other processes."""
        if self._writer is not None:
            started = time.perf_counter()
            self._writer.settle()
            self.seconds_waited += time.perf_counter() - started

    def _advance(self, *, wait: bool) -> None:
        pending, writer = self._pending, self._writer
        if pending is None or writer is None:
            return
        if not pending.committing:
            if not self._all_answered(pending, writer, wait=wait):
                return
            assert pending.answer is not None
            shards = comm.gather_to_main(Shard(*pending.answer["shard"]))
            pending.committing, pending.answer = True, None if shards else {}
            if shards:
                writer.order(self._commit(pending, shards))
        if self._all_answered(pending, writer, wait=wait):
            self._pending = None

    def _all_answered(self, pending: _Pending, writer: SnapshotWriter, *, wait: bool) -> bool:
        """Whether every process has the answer that it waits for.

        Raises:
            SaveError: on every process, if it is an error on any.
        """
        if pending.answer is None:
            pending.answer = writer.answer(wait=wait)
        reason = pending.answer.get("error") if pending.answer else None
        mine = torch.tensor(
            [pending.answer is None, reason is not None],
            dtype=torch.float32,
            device=self._engine.device,
        )
        missing, failed = comm.max_over_ranks(mine).tolist()
        if failed:
            self._give_up(pending, reason)
        return not missing

    def _give_up(self, pending: _Pending, reason: str | None) -> None:
        try:
            raise_together(pending.step, reason)
        except SaveError:
            self.close()
            self._pending = None
            if comm.rank() == 0:
                remove_quietly(pending.staging)
            raise

    def _commit(self, pending: _Pending, shards: list[Shard]) -> dict[str, Any]:
        others = {name: base64.b64encode(data).decode() for name, data in pending.others.items()}
        return {
            "do": "commit", "staging": str(pending.staging), "step": pending.step,
            "shards": shards, "others": others, "keep": astuple(self._keep),
        }  # fmt: skip
