"""Sharded checkpoints that do not depend on the layout that wrote them.

A checkpoint is a folder `step-NNNNNNNN`:

    rank-00000.safetensors ...   what each process holds: fp32 master weights, optimizer state,
                                 buffers (from rank 0), random states; every byte once
    index.json                   for each tensor its global shape and its chunks: offset and size in
                                 the tensor, optimizer step, file, first byte, crc32
    state.json                   step, data position, versions: what the loop hands over
    config.yaml                  the resolved configuration
    tokenizer.json               the tokenizer, so that the checkpoint can be used anywhere; of
                                 SentencePiece tokenizer.model
    manifest.json                every file's size and crc32; written last: without it, it is none

Nothing in it can hold code. Readers map the files and touch only the bytes that they need.
"""

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import yaml
from pydantic import ConfigDict, PrivateAttr, TypeAdapter, ValidationError
from torch import nn

from model.build import ModelConfig, build_model, initial_value, place
from model.config import Config
from parallel import comm
from parallel.fragments import MASTER, persistent_buffers
from parallel.huggingface import HuggingFaceWeights, is_huggingface_folder
from parallel.plain_weights import PlainWeights, is_plain_folder
from parallel.tensor_file import DTYPE_NAMES
from parallel.tensor_folder import differing_shapes
from parallel.zero import DTYPES, Precision

FORMAT_VERSION = 1
STEP_FOLDER = re.compile(r"step-(\d{8,})")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NUMPY = {"F32": "<f4", "U8": "u1", "I64": "<i8", "BOOL": "?"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names it and says why."""

    exit_status = 2


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
        manifest = _Manifest.read(folder)
        self.training_step = manifest.step
        self.tensors: dict[str, dict[str, Any]] = json.loads(manifest.text("index.json"))["tensors"]
        self.state: dict[str, Any] = json.loads(manifest.text("state.json"))
        self.config_yaml = manifest.text("config.yaml")
        self._manifest = manifest
        self._verified: set[tuple[str, int]] = set()

    def model_config(self) -> ModelConfig:
        """The configuration of its model, complete."""
        tree = yaml.safe_load(self.config_yaml)
        return TypeAdapter(ModelConfig).validate_python(tree["model"])

    def small_file(self, name: str) -> Path | None:
        """A file beside the weights, verified if the manifest lists it; None if it is not there.

        Raises:
            CheckpointError: it is damaged.
        """
        if name in self._manifest.files:
            self._manifest.content(name)
        path = self.folder / name
        return path if path.is_file() else None

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
            if zlib.crc32(values.data) != chunk["crc32"]:
                raise _damaged(path, f"the crc32 of the chunk at byte {chunk['begin']} differs")
            self._verified.add(place)
        return values


class _Manifest(Config):
    """`manifest.json`, and the small files that it vouches for."""

    model_config = ConfigDict(extra="ignore")

    format: Literal["polyad-checkpoint"]
    version: int
    step: int
    files: dict[str, "_File"]
    _folder: Path = PrivateAttr()

    @classmethod
    def read(cls, folder: Path) -> "_Manifest":
        """Reads it and compares the sizes of all files that it lists.

        Raises:
            CheckpointError: it is missing, damaged or newer, or a file is missing or truncated.
        """
        path = folder / "manifest.json"
        if not path.is_file():
            raise CheckpointError(f"{folder}: is not a complete checkpoint: no manifest.json")
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise _damaged(path, "it is no manifest of a Polyad checkpoint") from None
        if manifest.version > FORMAT_VERSION:
            raise CheckpointError(
                f"{folder}: format version {manifest.version} is newer than {FORMAT_VERSION}, "
                f"which this Polyad reads"
            )
        for name in {"index.json", "state.json", "config.yaml"} - manifest.files.keys():
            raise _damaged(path, f"it does not list {name}")
        for name, about in manifest.files.items():
            if not (folder / name).is_file():
                raise _damaged(folder / name, "missing, though the manifest lists it")
            size = (folder / name).stat().st_size
            if size != about.bytes:
                raise _damaged(folder / name, f"{size} bytes, the manifest says {about.bytes}")
        manifest._folder = folder
        return manifest

    def text(self, name: str) -> str:
        """A small file of text, verified; see `content`."""
        return self.content(name).decode()

    def content(self, name: str) -> bytes:
        """A small file, verified.

        Raises:
            CheckpointError: it is damaged.
        """
        data = (self._folder / name).read_bytes()
        if zlib.crc32(data) != self.files[name].crc32:
            raise _damaged(self._folder / name, "its crc32 differs from the manifest's")
        return data


class _File(Config):
    bytes: int
    crc32: int


def _damaged(path: Path, what: str) -> CheckpointError:
    advice = ""
    if STEP_FOLDER.fullmatch(path.parent.name):
        advice = f"; without {path.parent.name} the run goes on from an older checkpoint"
    return CheckpointError(f"{path}: damaged: {what}{advice}")


Weights: TypeAlias = Checkpoint | HuggingFaceWeights | PlainWeights
"""A model's weights, whoever wrote them: names, shapes and whole tensors, one at a time."""


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


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints below a run's `checkpoints` folder that were committed, oldest first."""
    if not folder.is_dir():
        return []
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := STEP_FOLDER.fullmatch(path.name)) and (path / "manifest.json").is_file()
    }
    return [steps[step] for step in sorted(steps)]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of the run folder it is.

    Raises:
        CheckpointError: there is none.
    """
    if (path / "manifest.json").is_file() and (path / "index.json").is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    if is_huggingface_folder(path) or is_plain_folder(path):
        kind = "a Hugging Face folder" if is_huggingface_folder(path) else "a folder of weights"
        raise CheckpointError(
            f"{path}: is {kind}; `polyad convert {path} DESTINATION --to polyad` makes a "
            f"checkpoint of it"
        )
    raise CheckpointError(f"{path}: holds no complete checkpoint (a run folder or a step-* folder)")


def open_weights(path: Path) -> Weights:
    """The weights that a path means: a checkpoint, a run's newest one, a Hugging Face folder of
    GPT-2, or a folder of safetensors under our names.

    Raises:
        ValueError: with an `exit_status` of 2: it is none of them, or cannot be used.
    """
    if is_huggingface_folder(path):
        return HuggingFaceWeights(path)
    if is_plain_folder(path):
        return PlainWeights(path)
    return Checkpoint(find_checkpoint(path))


def load_model(
    path: Path | str,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
) -> nn.Module:
    """A model with the weights that a path means, on one device, in evaluation mode.

    Args:
        path: as of `open_weights`.
        device: where it goes.
        precision: of its parameters.

    Returns:
        The model; no process group is needed.
    """
    stored = open_weights(Path(path))
    model = build_model(stored.model_config())
    if isinstance(stored, Checkpoint):  # the others compared names and shapes when they were opened
        stored.check_model(model)
    weights = ((name, stored.whole(name)) for name, _ in model.named_parameters())
    buffers = [name for name, _ in persistent_buffers(model)]
    place(model, weights, device, DTYPES[precision])
    place(
        model, ((name, initial_value(model, name, 0)) for name, _ in model.named_buffers()), device
    )
    place(model, ((name, stored.buffer(name)) for name in buffers), device)
    return model.eval()
