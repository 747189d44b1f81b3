"""Finds a checkpoint and reads it: any box of any tensor, whatever layout wrote it.

A path means the newest complete checkpoint of a run; reading is retried if the run deletes it
meanwhile. A run resumes from the newest checkpoint of which every byte is verified. Files are
mapped, and each is verified before anything in it is used. Nothing in a checkpoint can contain
code. `../README.md` describes the format and its guarantees.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from polyad.data.errors import say
from polyad.model.config import ConfigYamlError, load_yaml
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import (
    BUFFER,
    CONFIG_FILE,
    EMA,
    INDEX_FILE,
    MANIFEST_FILE,
    MASTER,
    RANDOM,
    Box,
    CheckpointError,
    Contents,
    DamagedCheckpoint,
    StoredBox,
    StoredTensor,
    damaged,
    read_contents,
)
from polyad.parallel.checkpoint.manage import (
    BEST_FILE,
    STEP_FOLDER,
    complete_checkpoints,
    step_folders,
)
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.source import StoredWeights, described_config, differing_shapes
from polyad.parallel.tensor_file import TORCH_DTYPES, mapped

T = TypeVar("T")
Choose: TypeAlias = Callable[[Path], Path]
"""Returns the checkpoint for a path, like `newest_of` and `best_checkpoint`."""


class Checkpoint(StoredWeights):
    """A complete checkpoint, from which any box of any tensor can be read, in any layout.

    It is the `Source` from which an engine resumes.

    Args:
        folder: `.../step-NNNNNNNN`.
        contents: its small files, if another process has read them; None: they are read.

    Raises:
        CheckpointError: it is incomplete, truncated, of another version, or not a checkpoint.
    """

    def __init__(self, folder: Path, contents: Contents | None = None) -> None:
        self.folder = folder
        self.contents = contents = contents or read_contents(folder)
        self.state, self.config_yaml = contents.state, contents.config_yaml
        self.training_step, self.tensors = contents.step, contents.tensors
        self.verified: set[str] = set()
        """The files whose bytes were compared with the manifest: they are not digested again."""
        self._chosen = MASTER

    def model_config(self) -> ModelSettings:
        """Returns the configuration of its model, complete.

        Raises:
            WeightsError: there is none, or another version wrote it.
        """
        return described_config(self.config_yaml, self.folder / CONFIG_FILE)

    def section(self, name: str) -> dict[str, Any]:
        """Returns a section of its configuration as parsed YAML; empty if it does not exist.

        Raises:
            CheckpointError: it is not YAML.
        """
        try:
            tree = load_yaml(self.config_yaml)
        except ConfigYamlError as error:
            raise damaged(self.folder / CONFIG_FILE, str(error)) from None
        return tree.get(name) or {} if isinstance(tree, dict) else {}

    def small_file(self, name: str) -> Path | None:
        """Returns a file beside the weights, verified; None if it does not exist.

        Raises:
            CheckpointError: it is damaged.
        """
        if name not in self.contents.files:
            return None
        self.contents.verify([name])
        return self.folder / name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns global shapes of the weights by name."""
        return {
            name: fields[MASTER].shape for name, fields in self.tensors.items() if MASTER in fields
        }

    def step(self, name: str) -> float:
        """Returns the number of optimizer steps of a parameter."""
        return self.tensors[name][MASTER].chunks[0].step

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box of a tensor from the stored boxes that overlap it.

        If there is no average of a weight, the weight is returned for it.

        Raises:
            CheckpointError: the tensor is missing or has another shape, or its file is damaged.
        """
        name, field, shape, offset, size = box
        if field == EMA and EMA not in self.tensors.get(name, {}):
            field = MASTER
        about = self.tensors.get(name, {}).get(field)
        if about is None:
            raise CheckpointError(f"{self.folder}: has no {field} of {name}")
        if about.shape != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(about.shape)} there, "
                f"{list(shape)} in this model"
            )
        values = torch.empty(size, dtype=TORCH_DTYPES[about.dtype])
        missing = math.prod(size)
        chunks, places = about.chunks, (len(about.chunks), len(shape))  # scalars have no axes
        begin_CA = np.array([each.offset for each in chunks], np.int64).reshape(places)
        size_CA = np.array([each.size for each in chunks], np.int64).reshape(places)
        low_CA = np.maximum(begin_CA, offset)
        high_CA = np.minimum(begin_CA + size_CA, np.add(offset, size))
        for chunk in np.flatnonzero((low_CA < high_CA).all(1)):
            low_A, high_A = low_CA[chunk], high_CA[chunk]
            here = tuple(map(slice, low_A - offset, high_A - offset))
            there = tuple(map(slice, low_A - begin_CA[chunk], high_A - begin_CA[chunk]))
            values[here] = self._stored(about, chunks[chunk])[there]
            missing -= values[here].numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {missing} elements of {name} are in no chunk")
        return values

    def whole(self, name: str, field: str | None = None) -> torch.Tensor:
        """Reads a whole tensor; without a field the weight, or the average that stands for it."""
        return self.own(name, field)

    def own(self, name: str, field: str | None = None) -> torch.Tensor:
        """Reads a whole tensor of the checkpoint itself, without that of a base."""
        field = field or (self._chosen if self._chosen in self.tensors[name] else MASTER)
        return Checkpoint.read(self, Box.whole(name, field, self.tensors[name][field].shape))

    def take_average(self) -> None:
        """Uses the moving average as the weights, wherever a whole weight is read.

        Raises:
            CheckpointError: there is none.
        """
        if not any(EMA in fields for fields in self.tensors.values()):
            raise CheckpointError(
                f"{self.folder}: has no moving average of its weights, which only runs with "
                "train.ema keep; use the trained weights"
            )
        self._chosen = EMA

    def check_model(self, module: nn.Module, without: tuple[str, ...] = ()) -> None:
        """Compares the buffers too, beside what `StoredWeights.check_model` compares.

        Raises:
            ValueError: they differ; the first few differences are named.
        """
        super().check_model(module, without)
        ours = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
        stored = ((name, self.tensors.get(name, {}).get(BUFFER)) for name in ours)
        theirs = {name: about.shape for name, about in stored if about is not None}
        if differing := differing_shapes(theirs, ours, without):
            raise CheckpointError(f"{self.folder}: is a different model: buffer {differing}")

    def buffer(self, name: str) -> torch.Tensor:
        """Returns a whole persistent buffer of the model."""
        if BUFFER not in self.tensors.get(name, {}):
            raise CheckpointError(f"{self.folder}: has no buffer {name}")
        return self.whole(name, BUFFER)

    def restore_random_states(self, world: comm.World) -> bool:
        """Restores the state of this rank's random generators.

        Ranks that share layers must draw the same numbers, and others different ones, so states of
        another layout are not used.

        Args:
            world: this rank.

        Returns:
            Whether the checkpoint has them: the same on all ranks.
        """
        shared = self.section("parallel").get("tensor_parallel_size", 1)
        ranks = sum(
            name.endswith(".torch") and RANDOM in fields for name, fields in self.tensors.items()
        )
        if (ranks, shared) != (world.size, world.tensor_parallel_size):
            return False
        cpu, cuda = (f"rank-{world.rank:05d}.{name}" for name in ("torch", "cuda"))
        torch.set_rng_state(self.whole(cpu, RANDOM))
        if world.device.type == "cuda" and cuda in self.tensors:
            torch.cuda.set_rng_state(self.whole(cuda, RANDOM), world.device)
        return True

    def _stored(self, about: StoredTensor, box: StoredBox) -> torch.Tensor:
        if box.file not in self.verified:
            self.contents.verify([box.file])
            self.verified.add(box.file)
        path = self.folder / box.file
        try:
            return mapped(path, about.dtype, box.size, box.begin)
        except (OSError, ValueError) as error:
            raise damaged(path, f"cannot be read: {error}") from None


def best_checkpoint(path: Path) -> Path:
    """Returns the checkpoint of a run's best validation.

    Args:
        path: the run's folder.

    Raises:
        CheckpointError: none is marked, or it does not exist.
    """
    marked = path / "checkpoints" / BEST_FILE
    if not marked.is_file():
        raise CheckpointError(
            f"{path}: no checkpoint is marked as the best; a run with checkpoint.keep_best: true "
            f"and a validation split marks one"
        )
    name = marked.read_text(errors="replace").strip()
    if not STEP_FOLDER.fullmatch(name) or not (marked.parent / name / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{marked}: names {name!r:.60}, but there is no such checkpoint in the same folder"
        )
    return marked.parent / name


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint for a path: the path itself, or the newest in a run folder.

    Raises:
        CheckpointError: there is none.
    """
    newest = newest_of(path)
    if newest != path or all((path / name).is_file() for name in (MANIFEST_FILE, INDEX_FILE)):
        return newest
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    if path.is_file():
        raise CheckpointError(
            f"{path}: is a file; a checkpoint is a folder step-NNNNNNNN, and a run has several. "
            "Pickles (.pt, .bin) are not read, because they could run code"
        )
    raise CheckpointError(
        f"{path}: holds no complete checkpoint (a run folder or a step-* folder); "
        "`polyad convert --to polyad` makes one of other weights"
    )


def newest_of(path: Path) -> Path:
    """Returns the newest checkpoint of a run or its `checkpoints` folder; other paths unchanged."""
    checkpoints = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    return checkpoints[-1] if checkpoints else path


def read_newest(path: Path, read: Callable[[Path], T], choose: Choose = newest_of) -> T:
    """Reads the checkpoint for a path; if it is deleted meanwhile, reads the one chosen then.

    Args:
        path: a run, or anything else that `read` accepts.
        read: called with the chosen path.
        choose: chooses the checkpoint for the path.

    Raises:
        Exception: any exception of `read` for a folder that still exists.
    """
    if choose is newest_of:
        _say_if_another_is_best(path)
    while True:
        chosen = choose(path)
        try:
            return read(chosen)
        except (ValueError, OSError):
            if chosen.exists() or choose(path) == path:
                raise
            say(f"{chosen} was deleted while it was being read; reading what {path} has now")


def _say_if_another_is_best(run: Path) -> None:
    with suppress(CheckpointError):
        best, newest = best_checkpoint(run), newest_of(run)
        if best != newest:
            say(
                f"reading the newest checkpoint of {run}, {newest.name}; its best validation was "
                f"that of {best}, which --best, or this path, reads"
            )


def chosen_by_main(path: Path, choose: Choose) -> Path:
    """Returns rank 0's choice for a path on all ranks: a run may write another checkpoint before
    the others look.

    Args:
        path: as in `read_newest`.
        choose: chooses the checkpoint for the path.
    """
    chosen = comm.from_main(comm.on_main(lambda: choose(path)))
    assert chosen is not None
    return chosen


def newest_that_opens(
    folder: Path, before: Path | None = None, reasons: Sequence[str] = ()
) -> Checkpoint | None:
    """Returns the newest checkpoint with a valid manifest, sizes and small files, or None.

    Nothing else is read, so every process may call it separately, before there is a process group.
    Damaged checkpoints are named in a warning.

    Args:
        folder: the run's `checkpoints` folder.
        before: a checkpoint: only older ones count; None: all.
        reasons: why newer ones cannot be used.

    Raises:
        CheckpointError: there are some, but none can be opened; or one has another version.
    """
    reasons, listed = [*reasons], step_folders(folder)
    if before in listed:
        listed = listed[: listed.index(before)]
    for path in reversed(listed):
        try:
            checkpoint = Checkpoint(path)
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            continue
        for reason in reasons if os.environ.get("RANK", "0") == "0" else ():
            say(f"warning: {reason}; the run continues from {path.name}")
        return checkpoint
    if reasons:
        raise DamagedCheckpoint(
            f"{'; '.join(reasons)}; no good checkpoint is left in {folder}: move the folder away "
            f"to begin at step 0, or put a good copy back"
        )
    return None


def shared(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Broadcasts the checkpoint that rank 0 has opened.

    Only rank 0 reads manifest, index and state: if 1,024 processes each requested the sizes of
    1,024 files, a server would get a million requests.

    Args:
        checkpoint: the checkpoint on rank 0; ignored on the others.
    """
    contents = comm.from_main(None if checkpoint is None else checkpoint.contents)
    if comm.rank() == 0:
        return checkpoint
    return None if contents is None else Checkpoint(contents.folder, contents)


def newest_verified(checkpoint: Checkpoint | None, folder: Path) -> Checkpoint | None:
    """Returns the checkpoint to resume from, with every byte verified; all ranks share the reading.

    Args:
        checkpoint: the result of `newest_that_opens` on rank 0.
        folder: the run's `checkpoints` folder.

    Returns:
        This one, or the next older one that is good, the same on every rank; damaged ones are named
        in a warning.

    Raises:
        CheckpointError: on every rank: there are some, but none is good.
    """
    checkpoint, reasons = shared(checkpoint), list[str]()
    while checkpoint is not None:
        try:
            verify_together(checkpoint)
            break
        except DamagedCheckpoint as error:
            reasons.append(str(error))
        older = partial(newest_that_opens, folder, checkpoint.folder, reasons)
        checkpoint = shared(comm.on_main(older))
    return checkpoint


def verify_together(checkpoint: Checkpoint) -> None:
    """Verifies every byte of a checkpoint that all ranks have opened: each file on one rank.

    Raises:
        DamagedCheckpoint: on every rank, for the first reason.
    """
    contents, reason = checkpoint.contents, None
    by_size = sorted(contents.files, key=lambda name: -contents.files[name].bytes)
    names = by_size[comm.rank() :: comm.size()]  # about equally many bytes on each rank
    total, disable = sum(contents.files[name].bytes for name in names), comm.rank() > 0 or None
    what = f"verify {contents.folder.name}"
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=disable) as bar:
        try:
            contents.verify(names, lambda done: bar.update(done - bar.n))
        except CheckpointError as error:
            reason = str(error)
    for text in comm.from_all(reason):
        if text is not None:
            raise DamagedCheckpoint(text)
    checkpoint.verified.update(contents.files)
