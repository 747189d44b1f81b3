"""Reads a checkpoint: any box of any tensor, whatever layout wrote it.

Files are mapped, and only the required bytes are read, each verified before use. Nothing in a
checkpoint can contain code. `../CHECKPOINTS.md` describes the format and its guarantees.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from polyad.model.build import build_model, read_model_config
from polyad.model.config_yaml import ConfigYamlError, load
from polyad.model.lora import of_base
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.box import BUFFER, EMA, MASTER, RANDOM, Box
from polyad.parallel.checkpoint.format import (
    CONFIG_FILE,
    INDEX_FILE,
    STATE_FILE,
    CheckpointError,
    StoredBox,
    StoredTensor,
    damaged,
    digest,
)
from polyad.parallel.checkpoint.tensor_file import DTYPE_NAMES
from polyad.parallel.checkpoint.verification import (
    PATIENCE,
    Contents,
    box_differs,
    patiently_opened,
    read_contents,
)
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.source import Source
from polyad.parallel.tensor_folder import differing_shapes

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NEEDED_TO_RESUME = {"step", "samples", "data_fingerprint", "tokenizer_fingerprint"}
"""Keys of `state.json` that are required to resume; every version writes them."""
_NUMPY = {"F32": "<f4", "U8": "u1", "I64": "<i8", "BOOL": "?"}


class Checkpoint(Source):
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
        self._patience = 0.0 if contents is None else PATIENCE
        self.contents = contents = contents or read_contents(folder)
        self.manifest, self.state = contents.manifest, contents.state
        self.config_yaml = contents.config_yaml
        self.training_step = self.manifest.step
        self.tensors = contents.index.tensors
        self.is_verified = False
        """Whether every byte was compared with the manifest, so that it is not digested again."""
        self._verified: set[StoredBox] = set()
        self._chosen = MASTER
        self.has_average = self._has_average()
        """Whether there is a moving average of every weight; a frozen weight is its own average."""

    def _has_average(self) -> bool:
        weights = [fields for fields in self.tensors.values() if MASTER in fields]
        averaged = [fields for fields in weights if EMA in fields]
        rest = [fields for fields in weights if EMA not in fields]
        return bool(averaged) and all(fields.keys() == {MASTER} for fields in rest)

    def model_config(self) -> ModelSettings:
        """Returns the configuration of its model, complete.

        Raises:
            CheckpointError: there is none.
        """
        path = self.folder / CONFIG_FILE
        try:
            return read_model_config(load(self.config_yaml)["model"])
        except (ConfigYamlError, TypeError, KeyError, ValueError):
            raise damaged(path, "it has no section `model` of a known model") from None

    def section(self, name: str) -> object:
        """Returns a section of its configuration as parsed YAML; None if it does not exist."""
        try:
            tree = load(self.config_yaml)
        except ConfigYamlError:
            return None
        return tree.get(name) if isinstance(tree, dict) else None

    def small_file(self, name: str) -> Path | None:
        """Returns a file beside the weights, verified; None if it does not exist.

        Raises:
            CheckpointError: it is damaged.
        """
        if name not in self.manifest.files:
            return None
        self.manifest.content(name)
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
        """Reads a box of a tensor; only the stored boxes that overlap it are read, each verified
        once.

        If there is no average of a weight, the weight is returned for it.

        Raises:
            CheckpointError: the tensor is missing or has another shape, or a chunk is damaged.
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
        for stored in about.chunks:
            low = [max(a, b) for a, b in zip(offset, stored.offset, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offset, size, stored.offset, stored.size, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here, there = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                    for origin in (offset, stored.offset)
                )
                values[here] = torch.from_numpy(np.array(self._stored(about, stored)[there]))
                missing -= values[here].numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {missing} elements of {name} are in no chunk")
        return values

    def whole(self, name: str, field: str | None = None) -> torch.Tensor:
        """Reads a whole tensor; without a field the weight, or the average that stands for it."""
        field = field or (self._chosen if self._chosen in self.tensors[name] else MASTER)
        return self.read(Box.whole(name, field, self.tensors[name][field].shape))

    @property
    def is_average(self) -> bool:
        """Whether the moving average is used as the weights."""
        return self._chosen == EMA

    def take_average(self) -> None:
        """Uses the moving average as the weights, wherever a whole weight is read.

        Raises:
            CheckpointError: there is none.
        """
        if not self.has_average:
            raise CheckpointError(
                f"{self.folder}: has no moving average of its weights, which only runs with "
                "train.ema keep; use the trained weights"
            )
        self._chosen = EMA

    def check_model(self, module: nn.Module, without: tuple[str, ...] = ()) -> None:
        """Compares names and shapes of weights and buffers with a model's.

        Frozen weights of a model with adapters are not in a checkpoint.

        Args:
            module: the model.
            without: prefixes of names to ignore on both sides.

        Raises:
            CheckpointError: they differ; the first few differences are named.
        """
        base = of_base(module)
        named = [(name, p) for name, p in module.named_parameters() if name not in base]
        ours = {name: tuple(p.shape) for name, p in named}
        if differing := differing_shapes(self.shapes(), ours, without):
            raise CheckpointError(f"{self.folder}: is a different model: {differing}")
        for name, buffer in persistent_buffers(module):
            if name.startswith(without):
                continue
            stored = self.tensors.get(name, {}).get(BUFFER)
            if stored is None or stored.shape != tuple(buffer.shape):
                there = "missing" if stored is None else list(stored.shape)
                raise CheckpointError(
                    f"{self.folder}: is a different model: buffer {name} {there} there, "
                    f"{list(buffer.shape)} here"
                )

    def check_own_model(self) -> None:
        """Compares its weights with the model of its own configuration.

        Raises:
            CheckpointError: they differ, or the model is invalid.
        """
        config, path = self.model_config(), self.folder / CONFIG_FILE
        last = config.last_parameter()  # checked before building a wrong number of layers
        if last is not None and last not in self.shapes():
            raise CheckpointError(
                f"{self.folder}: is a different model: {last} missing there, although config.yaml "
                "asks for it"
            )
        try:
            model = build_model(config)
        except ValueError as error:
            raise damaged(path, f"section `model`: {error}") from None
        self.check_model(model)

    def check_resume(self, state_fields: Mapping[str, Collection[str]]) -> None:
        """Checks that a run can resume from it, which needs more than weights.

        Args:
            state_fields: the optimizer state fields of each weight, by name.

        Raises:
            DamagedCheckpoint: something is missing.
        """
        if lacking := _NEEDED_TO_RESUME - self.state.model_fields_set:
            raise damaged(self.folder / STATE_FILE, f"{min(lacking)}: is missing")
        for name in self.shapes():
            if self.step(name) > self.training_step:
                raise damaged(
                    self.folder / INDEX_FILE,
                    f"{name} has seen {self.step(name)} steps of {self.training_step:,}",
                )
            if name not in state_fields:
                continue
            for field in state_fields[name]:
                if field not in self.tensors[name]:
                    raise damaged(self.folder / INDEX_FILE, f"it has no {field} of {name}")
            if EMA not in self.tensors[name] and any(EMA in f for f in self.tensors.values()):
                raise damaged(self.folder / INDEX_FILE, f"it has no {EMA} of {name}")
        size = torch.get_rng_state().numel()
        for name, fields in self.tensors.items():
            if name.endswith(".torch") and RANDOM in fields and fields[RANDOM].shape != (size,):
                raise damaged(
                    self.folder / INDEX_FILE,
                    f"{name} has {fields[RANDOM].shape[0]:,} bytes, {size:,} are needed",
                )

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

        Raises:
            DamagedCheckpoint: they are not valid states of torch's generators.
        """
        there = {
            name for name, f in self.tensors.items() if name.endswith(".torch") and RANDOM in f
        }
        parallel = self.section("parallel")
        shared = parallel.get("tensor_parallel_size", 1) if isinstance(parallel, dict) else 1
        if there != {f"rank-{rank:05d}.torch" for rank in range(world.size)}:
            return False
        if shared != world.tensor_parallel_size:
            return False
        device, prefix = world.device, f"rank-{world.rank:05d}."
        stored = {
            name: self.whole(name, RANDOM)
            for name, fields in self.tensors.items()
            if name.startswith(prefix) and RANDOM in fields
        }
        try:
            torch.set_rng_state(stored[f"{prefix}torch"])
            if device.type == "cuda" and f"{prefix}cuda" in stored:
                torch.cuda.set_rng_state(stored[f"{prefix}cuda"], device)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise damaged(self.folder, f"the random state of {prefix[:-1]}: {reason}") from None
        return True

    def _stored(self, about: StoredTensor, box: StoredBox) -> np.ndarray:
        path = self.folder / box.file
        with patiently_opened(path, self._patience) as file:
            values = np.memmap(file, _NUMPY[about.dtype], "r", box.begin, box.size)
        if not self.is_verified and box not in self._verified:
            if digest(values.data) != box.xxh3:
                raise box_differs(self.folder, box)
            self._verified.add(box)
        return values
