"""Sharded checkpoints that do not depend on the layout that wrote them: reading.

The format, and what is promised of it, is described in `CHECKPOINTS.md`. Nothing in a checkpoint
can hold code. Readers map the files and touch only the bytes that they need, each verified before
it is used.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from model.build import ModelConfig
from model.config_yaml import ConfigYamlError, load
from parallel import comm
from parallel.commit import complete_checkpoints
from parallel.fragments import MASTER
from parallel.huggingface import is_huggingface_folder
from parallel.manifest import MANIFEST_FILE, CheckpointError, Manifest, damaged, digest
from parallel.plain_weights import is_plain_folder
from parallel.tensor_file import DTYPE_NAMES
from parallel.tensor_folder import differing_shapes

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NUMPY = {"F32": "<f4", "U8": "u1", "I64": "<i8", "BOOL": "?"}


class Checkpoint:
    """A complete checkpoint; gives any box of any tensor, whatever layout wrote it.

    It is the `Source` that an engine resumes from.

    Args:
        folder: `.../step-NNNNNNNN`.

    Raises:
        CheckpointError: it is incomplete, truncated, of a newer version, or none at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = Manifest(folder)
        self.training_step = manifest.step
        self.tensors: dict[str, dict[str, Any]] = manifest.json("index.json")["tensors"]
        self.state: dict[str, Any] = manifest.json("state.json")
        self.config_yaml = manifest.text("config.yaml")
        self.manifest = manifest
        _refuse_what_is_no_safetensors(manifest)
        self._verified: set[tuple[str, int]] = set()

    def model_config(self) -> ModelConfig:
        """The configuration of its model, complete.

        Raises:
            CheckpointError: there is none.
        """
        path = self.folder / "config.yaml"
        try:
            tree = load(self.config_yaml)
            return TypeAdapter[ModelConfig](ModelConfig).validate_python(tree["model"])
        except (ConfigYamlError, TypeError, KeyError, ValidationError):
            raise damaged(path, "it has no section `model` of a known model") from None

    def small_file(self, name: str) -> Path | None:
        """A file beside the weights, verified; None if it is not there.

        Raises:
            CheckpointError: it is damaged.
        """
        if name not in self.manifest.files:
            return None
        self.manifest.content(name)
        return self.folder / name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the weights by name."""
        return {
            name: tuple(fields[MASTER]["shape"])
            for name, fields in self.tensors.items()
            if MASTER in fields
        }

    def step(self, name: str) -> float:
        """Optimizer steps that a parameter has seen."""
        return float(self.tensors[name][MASTER]["chunks"][0]["step"])

    def read(
        self,
        name: str,
        field: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
    ) -> torch.Tensor:
        """A box of a tensor; only the chunks that it touches are read, each verified once.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, has it in another shape, or a chunk
                is damaged.
        """
        about = self.tensors.get(name, {}).get(field)
        if about is None:
            raise CheckpointError(f"{self.folder}: has no {field} of {name}")
        if tuple(about["shape"]) != tuple(global_shape):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {about['shape']} there, "
                f"{list(global_shape)} in this model"
            )
        box = torch.empty(size, dtype=TORCH_DTYPES[about["dtype"]])
        missing = math.prod(size)
        for chunk in about["chunks"]:
            low = [max(a, b) for a, b in zip(offset, chunk["offset"], strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offset, size, chunk["offset"], chunk["size"], strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here, there = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                    for origin in (offset, chunk["offset"])
                )
                box[here] = torch.from_numpy(np.array(self._stored(about, chunk)[there]))
                missing -= box[here].numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {missing} elements of {name} are in no chunk")
        return box

    def whole(self, name: str, field: str = MASTER) -> torch.Tensor:
        """A whole tensor in its global shape."""
        shape = tuple(self.tensors[name][field]["shape"])
        return self.read(name, field, shape, (0,) * len(shape), shape)

    def check_model(self, module: nn.Module) -> None:
        """Compares names and shapes of weights with a model's.

        Raises:
            CheckpointError: they differ; the first few differences are named.
        """
        ours = {name: tuple(p.shape) for name, p in module.named_parameters()}
        if differing := differing_shapes(self.shapes(), ours):
            raise CheckpointError(f"{self.folder}: is of another model: {differing}")

    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer of the model, whole."""
        if "buffer" not in self.tensors.get(name, {}):
            raise CheckpointError(f"{self.folder}: has no buffer {name}")
        return self.whole(name, "buffer")

    def restore_random_states(self, device: torch.device) -> bool:
        """Continues this rank's random numbers; False if the checkpoint has none for this rank."""
        prefix = f"rank-{comm.rank():05d}."
        stored = {n: self.whole(n, "random") for n in self.tensors if n.startswith(prefix)}
        if f"{prefix}torch" not in stored:
            return False
        torch.set_rng_state(stored[f"{prefix}torch"])
        if device.type == "cuda" and f"{prefix}cuda" in stored:
            torch.cuda.set_rng_state(stored[f"{prefix}cuda"], device)
        return True

    def _stored(self, about: dict[str, Any], chunk: dict[str, Any]) -> np.ndarray:
        path, size = self.folder / chunk["file"], tuple(chunk["size"])
        values = np.memmap(path, _NUMPY[about["dtype"]], "r", chunk["begin"], size)
        place = chunk["file"], chunk["begin"]
        if place not in self._verified:
            algorithm = self.manifest.algorithm
            if digest(values.data, algorithm) != chunk[algorithm]:
                raise damaged(
                    path, f"the {algorithm} of the chunk at byte {chunk['begin']:,} differs"
                )
            self._verified.add(place)
        return values


def _refuse_what_is_no_safetensors(manifest: Manifest) -> None:
    """Looks at the first bytes of tensor files: only their positions are used after that."""
    for name, record in manifest.files.items():
        if not name.endswith(".safetensors"):
            continue
        with (manifest.folder / name).open("rb") as file:
            head = file.read(9)
        if int.from_bytes(head[:8], "little") > record.bytes - 8 or head[8:] != b"{":
            pickled = head.startswith((b"PK\x03\x04", b"\x80"))
            what = "a pickle, which could run code" if pickled else "no safetensors file"
            raise damaged(manifest.folder / name, f"it is {what}")


class WeightsOnly:
    """A checkpoint as the start of another run: its weights, but no moments and no steps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(
        self,
        name: str,
        field: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
    ) -> torch.Tensor:
        """As `Checkpoint.read` for weights; zeros for optimizer state."""
        if field != MASTER:
            return torch.zeros(size)
        return self._checkpoint.read(name, field, global_shape, offset, size)

    def step(self, name: str) -> float:
        """None taken."""
        return 0.0

    def buffer(self, name: str) -> torch.Tensor:
        """As `Checkpoint.buffer`: buffers are part of the weights."""
        return self._checkpoint.buffer(name)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of the run folder it is.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST_FILE).is_file() and (path / "index.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    if path.is_file():
        raise CheckpointError(
            f"{path}: is a file; a checkpoint is a folder step-NNNNNNNN, a run has several. A "
            f"pickle (.pt, .bin) is not read: it could run code"
        )
    if is_huggingface_folder(path) or is_plain_folder(path):
        kind = "a Hugging Face folder" if is_huggingface_folder(path) else "a folder of weights"
        raise CheckpointError(
            f"{path}: is {kind}; `polyad convert {path} DESTINATION --to polyad` makes a "
            f"checkpoint of it"
        )
    raise CheckpointError(f"{path}: holds no complete checkpoint (a run folder or a step-* folder)")
