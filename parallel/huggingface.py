"""A Hugging Face folder of GPT-2 as a source of weights: boxes are read, never the whole model."""

from pathlib import Path

import torch

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
from parallel.tensor_folder import TensorFolder, Wanted, read_json

# What decides which weights a model has and what they compute. Not `dropout`: that is training's.
_ARCHITECTURE = (
    "kind", "num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size", "bias",
    "layer_norm_epsilon", "tied_embeddings",
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
        tree = read_json(folder / CONFIG_FILE, HuggingFaceError)
        self.config: GPT2Config = config_from_huggingface(tree, str(folder / CONFIG_FILE))
        self._tensors = TensorFolder(
            folder, HuggingFaceError, lambda name: name.removeprefix(PREFIX)
        )
        self._shapes = self._described()
        self._check()

    def model_config(self) -> GPT2Config:
        """The configuration of its model, complete."""
        return self.config

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
        view = self._tensors.read(theirs, box[::-1] if transposed else box)
        view = view.T if transposed else view
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
        if last not in self._tensors.names():
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

    def _check(self) -> None:
        wanted: dict[str, Wanted] = {}
        for ours, box in self._shapes.items():
            theirs, transposed = their_tensor(ours)
            wanted[theirs] = Wanted(box[::-1] if transposed else box)
        names = self._tensors.names()
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        strange = sorted(names - wanted.keys() - {HEAD})
        faults += [f"unknown tensor {name}" for name in strange if not IGNORED.fullmatch(name)]
        if not faults and self.config.tied_embeddings and not self._head_is_tied():
            faults = [f"{HEAD} is not wte.weight, though {CONFIG_FILE} says that they are tied"]
        self._tensors.refuse(faults)

    def _head_is_tied(self) -> bool:
        if HEAD not in self._tensors.names():
            return True
        head, embedding = self._tensors.mapped(HEAD), self._tensors.mapped("wte.weight")
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
