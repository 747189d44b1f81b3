"""A Hugging Face folder of GPT-2 as a source of weights: boxes are read, never the whole model."""

from pathlib import Path

import torch

from polyad.model.build import ModelSizeError
from polyad.model.gpt2 import GPT2Config
from polyad.model.huggingface import (
    CONFIG_FILE,
    HEAD,
    IGNORED,
    PREFIX,
    HuggingFaceError,
    config_from_huggingface,
    parameter_shapes,
    their_tensor,
)
from polyad.model.settings import ModelSettings
from polyad.parallel.huggingface_parts import is_copy
from polyad.parallel.tensor_folder import FolderWeights, TensorFolder, Wanted, read_json

# What decides which weights a model has and what they compute. Not `dropout`: that is training's.
_ARCHITECTURE = (
    "kind", "num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size", "bias",
    "layer_norm_epsilon", "tied_embeddings",
)  # fmt: skip


def is_huggingface_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder, and neither a checkpoint nor a run of Polyad."""
    return (path / CONFIG_FILE).is_file() and not (path / "manifest.json").exists()


class HuggingFaceWeights(FolderWeights):
    """The weights of a folder with config.json and safetensors: a `WeightSource`.

    Args:
        folder: with model.safetensors, or shards and model.safetensors.index.json.

    Raises:
        HuggingFaceError: it is of another architecture, incomplete or damaged, or holds a pickle.
    """

    def __init__(self, folder: Path) -> None:
        tree = read_json(folder / CONFIG_FILE, HuggingFaceError)
        self.config: GPT2Config = config_from_huggingface(tree, str(folder / CONFIG_FILE))
        tensors = TensorFolder(folder, HuggingFaceError, lambda name: name.removeprefix(PREFIX))
        super().__init__(folder, tensors, {}, HuggingFaceError)
        self._shapes = self._described()
        self._check()

    def model_config(self) -> GPT2Config:
        """The configuration of its model, complete."""
        return self.config

    def stored(self, name: str) -> tuple[str, bool]:
        """Hugging Face's name, and whether it is the transposed weight of a `Conv1D`."""
        return their_tensor(name)

    def buffer(self, name: str) -> torch.Tensor:
        """Always raises: such a model has no buffers."""
        raise HuggingFaceError(f"{self.folder}: has no buffer {name}")

    def check_config(self, config: ModelSettings) -> None:
        """Compares the folder's model with the one that a configuration describes.

        Raises:
            HuggingFaceError: a key differs; each is named with both values.
        """
        if not isinstance(config, GPT2Config):
            raise HuggingFaceError(
                f"{self.folder}: is of another model: model.kind 'gpt2' there, {config.kind!r} here"
            )
        pairs = {
            f"model.{key}": (getattr(self.config, key), getattr(config, key))
            for key in _ARCHITECTURE
            if key != "tied_embeddings" or config.head is None  # else there is no such head
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
        except ModelSizeError:
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
        if (
            not faults
            and self.config.tied_embeddings
            and not is_copy(self._tensors, HEAD, "wte.weight")
        ):
            faults = [f"{HEAD} is not wte.weight, though {CONFIG_FILE} says that they are tied"]
        self._tensors.refuse(faults)
