"""A Hugging Face folder of GPT-2 as a source of weights: boxes are read, never the whole model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model.gpt2 import GPT2Config
from model.huggingface import (
    CONFIG_FILE,
    HEAD,
    IGNORED,
    PREFIX,
    HuggingFaceError,
    config_from_huggingface,
    parameter_shapes,
    their_tensor,
)
from parallel.fragments import MASTER

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
"""Of stored weights; each is exact in fp32."""
# What decides which weights a model has and what they compute. Not `dropout`: that is training's.
_ARCHITECTURE = (
    "kind", "num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size", "bias",
    "layer_norm_epsilon",
)  # fmt: skip
_ROWS = 4096


def is_huggingface_folder(path: Path) -> bool:
    """Whether a path is such a folder and no checkpoint or run of ours."""
    return (path / CONFIG_FILE).is_file() and not (path / "manifest.json").exists()


class HuggingFaceWeights:
    """The weights of a folder with config.json and safetensors: a `Source` without moments.

    Args:
        folder: with model.safetensors, or shards and model.safetensors.index.json.

    Raises:
        HuggingFaceError: it is of another architecture, incomplete or damaged, or holds a pickle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tree = _read_json(folder / CONFIG_FILE)
        self.config: GPT2Config = config_from_huggingface(tree, str(folder / CONFIG_FILE))
        self._open: dict[Path, Any] = {}
        self._stored = self._find()
        self._shapes = self._described()
        self._check()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by our names."""
        return self._shapes

    def read(
        self,
        name: str,
        field: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
    ) -> torch.Tensor:
        """A box of a weight in our orientation, fp32; zeros for optimizer state."""
        if field != MASTER:
            return torch.zeros(size)
        if self._shapes.get(name) != tuple(global_shape):
            raise HuggingFaceError(
                f"{self.folder}: {name} has shape {list(self._shapes.get(name, ())) or 'none'} "
                f"there, {list(global_shape)} in this model"
            )
        box = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
        theirs, transposed = their_tensor(name)
        view = self._slice(theirs)[box[::-1]].T if transposed else self._slice(theirs)[box]
        # A copy always: the view is of the mapped file.
        return view.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight in our orientation, fp32."""
        shape = self._shapes[name]
        return self.read(name, MASTER, shape, (0,) * len(shape), shape)

    def step(self, name: str) -> float:
        """None taken."""
        return 0.0

    def buffer(self, name: str) -> torch.Tensor:
        """There is none in such a model."""
        raise HuggingFaceError(f"{self.folder}: has no buffer {name}")

    def check_config(self, config: GPT2Config) -> None:
        """Compares the folder's model with the one that a configuration describes.

        Raises:
            HuggingFaceError: a key differs; each is named with both values.
        """
        pairs = {
            f"model.{key}": (getattr(self.config, key), getattr(config, key))
            for key in _ARCHITECTURE
        }
        kinds = self.config.feed_forward.kind, config.feed_forward.kind
        pairs["model.feed_forward.kind"] = kinds
        if kinds[0] == kinds[1]:
            inner = [c.feed_forward.inner_size(c.hidden_size) for c in (self.config, config)]
            pairs["model.feed_forward.hidden_size"] = (inner[0], inner[1])
        differing = [
            f"{key} {there!r} there, {here!r} here"
            for key, (there, here) in pairs.items()
            if there != here
        ]
        if differing:
            raise HuggingFaceError(f"{self.folder}: is of another model: {'; '.join(differing)}")

    def _described(self) -> dict[str, tuple[int, ...]]:
        """The shapes that config.json describes: sizes without bounds, so the files come first."""
        last = f"h.{self.config.num_layers - 1}.ln_1.weight"
        if last not in self._stored:
            raise HuggingFaceError(
                f"{self.folder}: no tensor {last}, though {CONFIG_FILE} says n_layer "
                f"{self.config.num_layers}"
            )
        try:
            return dict(parameter_shapes(self.config))
        except (RuntimeError, TypeError):  # torch's, of several lines, for what overflows 64 bits
            raise HuggingFaceError(
                f"{self.folder / CONFIG_FILE}: asks for more numbers than a tensor can have"
            ) from None

    def _find(self) -> dict[str, tuple[Path, str]]:
        """Where each tensor is: {their name without prefix: (file, name in it)}."""
        index, single = self.folder / INDEX_FILE, self.folder / WEIGHTS_FILE
        if index.is_file():
            listed = _read_json(index).get("weight_map")
            if not isinstance(listed, dict):
                raise HuggingFaceError(f"{index}: has no weight_map")
            files = {str(file) for file in listed.values()}
            if strange := sorted(f for f in files if Path(f).name != f or f in {"", ".."}):
                raise HuggingFaceError(f"{index}: {strange[0]!r} is not a file of this folder")
            paths = [self.folder / file for file in sorted(files)]
        elif single.is_file():
            paths = [single]
        else:
            raise HuggingFaceError(_no_weights(self.folder))
        stored: dict[str, tuple[Path, str]] = {}
        for path in paths:
            for name in self._file(path).keys():  # noqa: SIM118  # not a dict
                short = name.removeprefix(PREFIX)
                if short in stored:
                    before, other = stored[short]
                    raise HuggingFaceError(
                        f"{self.folder}: {short} is there twice: {other} in {before.name}, {name} "
                        f"in {path.name}"
                    )
                stored[short] = (path, name)
        return stored

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise HuggingFaceError(f"{path}: missing, though {INDEX_FILE} lists it") from None
            except (SafetensorError, OSError, UnicodeError) as error:
                raise HuggingFaceError(f"{path}: is damaged or no safetensors: {error}") from None
        return self._open[path]

    def _slice(self, theirs: str) -> Any:
        path, name = self._stored[theirs]
        return self._file(path).get_slice(name)

    def _check(self) -> None:
        wanted: dict[str, list[int]] = {}
        for ours, box in self._shapes.items():
            theirs, transposed = their_tensor(ours)
            wanted[theirs] = list(box[::-1] if transposed else box)
        strange = self._stored.keys() - wanted.keys() - {HEAD}
        faults = [f"no tensor {name}" for name in wanted if name not in self._stored]
        faults += [f"unknown tensor {n}" for n in sorted(strange) if not IGNORED.fullmatch(n)]
        for name, shape in wanted.items():
            if name in self._stored:
                found = self._slice(name)
                if found.get_shape() != shape:
                    faults.append(f"{name} is {found.get_shape()}, {CONFIG_FILE} says {shape}")
                elif found.get_dtype() not in DTYPES:
                    allowed = ", ".join(DTYPES)
                    faults.append(f"{name} is {found.get_dtype()}, allowed: {allowed}")
        if not faults and not self._head_is_tied():
            faults = [f"{HEAD} is not wte.weight: only a tied output head is supported"]
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise HuggingFaceError(f"{self.folder}: {'; '.join(faults[:3])}{more}")

    def _head_is_tied(self) -> bool:
        if HEAD not in self._stored:
            return True
        head, embedding = self._slice(HEAD), self._slice("wte.weight")
        if head.get_shape() != embedding.get_shape():
            return False
        return all(
            # A run that went wrong has left NaN in both, which equals nothing.
            torch.allclose(
                head[row : row + _ROWS].double(),
                embedding[row : row + _ROWS].double(),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
            for row in range(0, head.get_shape()[0], _ROWS)
        )


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        return (
            f"{folder}: holds {pickles[0]}, a pickle, which can run code when it is read; "
            f"{WEIGHTS_FILE} is needed: save the model again with safetensors "
            f"(transformers: model.save_pretrained)"
        )
    return f"{folder}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HuggingFaceError(f"{path}: cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise HuggingFaceError(f"{path}: holds {type(tree).__name__}, an object is needed")
    return tree
