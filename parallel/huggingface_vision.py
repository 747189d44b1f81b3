"""A folder of transformers' ViT or CLIP, or of timm's Mixer, as a source of weights."""

from pathlib import Path

import torch
from torch import nn

from model.build import ModelSizeError, build_model, initial_value
from model.huggingface import CONFIG_FILE, HuggingFaceError
from model.huggingface_vision import (
    IGNORED,
    config_from_files,
    library_of,
    parameter_shapes,
    parts_of,
)
from model.settings import ModelSettings
from model.vision import ImageModelSettings
from parallel.checkpoint.index import OF_WEIGHTS
from parallel.checkpoint.tensor_folder import FolderWeights, TensorFolder, Wanted, read_json

# What decides which weights a model has and what they compute; the classes are the data's.
_FREE = ("num_classes", "head", "head_bias", "dropout", "drop_path", "recompute", "compile",
         "initializer_range")  # fmt: skip


def is_vision_folder(path: Path) -> bool:
    """Whether config.json of a folder is of a model of images."""
    return library_of(read_json(path / CONFIG_FILE, HuggingFaceError)) is not None


class VisionWeights(FolderWeights):
    """The weights of such a folder: a `Source` without moments.

    Args:
        folder: with config.json and model.safetensors, or shards and an index.

    Raises:
        HuggingFaceError: it is incomplete or damaged, asks for what is not built here, or holds a
            pickle.
    """

    def __init__(self, folder: Path) -> None:
        tree = read_json(folder / CONFIG_FILE, HuggingFaceError)
        library = library_of(tree)
        assert library is not None
        self._library = library
        tensors = TensorFolder(
            folder, HuggingFaceError, lambda name: name.removeprefix(library.prefix)
        )
        super().__init__(folder, tensors, {}, HuggingFaceError)
        self.config = config_from_files(tree, self._shape, str(folder / CONFIG_FILE))
        self._fresh: nn.Module | None = None  # the model whose head is new
        if self._shape(library.outside.get("head", "") + ".weight") is None:
            self._fresh = build_model(self.config)
        try:
            self._shapes = parameter_shapes(self.config)
        except ModelSizeError:
            raise HuggingFaceError(
                f"{folder / CONFIG_FILE}: asks for more numbers than a tensor can have"
            ) from None
        self._check()

    @property
    def note(self) -> str | None:
        """A line for people: what is not from the folder; None if everything is."""
        if self._fresh is None:
            return None
        return f"the head is new: {self.folder} has none for these classes"

    def model_config(self) -> ImageModelSettings:
        """The configuration of its model, complete."""
        return self.config

    def buffer(self, name: str) -> torch.Tensor:
        """The initial value of a buffer of a new head: such a model has no others."""
        if self._fresh is None or not _of_head(name):
            raise HuggingFaceError(f"{self.folder}: has no buffer {name}")
        return initial_value(self._fresh, name, 0)

    def check_config(self, config: ModelSettings) -> None:
        """Compares the folder's model with the one that a configuration describes.

        The head is new if the classes are not as many: the folder's has nothing to say of others.

        Raises:
            HuggingFaceError: a key differs; each is named with both values.
        """
        if not isinstance(config, ImageModelSettings) or config.kind != self.config.kind:
            raise HuggingFaceError(
                f"{self.folder}: is of another model: model.kind {self.config.kind!r} there, "
                f"{config.kind!r} here"
            )
        theirs, ours = (c.model_dump(exclude=set(_FREE)) for c in (self.config, config))
        for key, each in config.feed_forwards().items():  # null is four times the width
            place, read = key.removeprefix("model."), self.config.feed_forwards()[key]
            if each.kind == read.kind == "dense":
                width = config.hidden_size
                if "token" in place:
                    width = config.num_patches
                sizes = each.inner_size(width), read.inner_size(width)
                ours[place], theirs[place] = ({"hidden_size": size} for size in sizes)
        differing = [
            f"model.{key} {theirs.get(key)!r} there, {value!r} here"
            for key, value in ours.items()
            if theirs.get(key) != value
        ]
        if differing:
            more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise HuggingFaceError(
                f"{self.folder}: is of another model: {'; '.join(differing[:3])}{more}"
            )
        of_folder = (self.config.num_classes, self.config.head)
        if (config.num_classes, config.head) != of_folder or self._fresh is not None:
            self._fresh = build_model(config)
            self._shapes = parameter_shapes(config)

    def read(
        self,
        name: str,
        field: str,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        size: tuple[int, ...],
    ) -> torch.Tensor:
        """A box of a weight in our form, fp32; zeros for optimizer state."""
        if field not in OF_WEIGHTS:
            return torch.zeros(size)
        if self._shapes.get(name) != tuple(global_shape):
            raise HuggingFaceError(
                f"{self.folder}: {name} has shape {list(self._shapes.get(name, ())) or 'none'} "
                f"there, {list(global_shape)} in this model"
            )
        box = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
        return self._value(name)[box].to(torch.float32, copy=True)

    def _value(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if self._fresh is not None and _of_head(name):
            return initial_value(self._fresh, name, 0)
        parts = parts_of(name, shape, self._library, self._tensors.names())
        if not parts.names:
            return torch.zeros(shape)
        whole = tuple(slice(0, n) for n in parts.shape)
        return torch.cat([self._tensors.read(each, whole) for each in parts.names]).view(shape)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._tensors.names():
            return None
        return tuple(self._tensors.mapped(name).get_shape())

    def _check(self) -> None:
        wanted: dict[str, Wanted] = {}
        for name, shape in self._shapes.items():
            if self._fresh is not None and _of_head(name):
                continue
            parts = parts_of(name, shape, self._library, self._tensors.names())
            wanted |= {each: Wanted(parts.shape) for each in parts.names}
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        strange = sorted(self._tensors.names() - wanted.keys())
        faults += [f"unknown tensor {name}" for name in strange if not IGNORED.fullmatch(name)]
        self._tensors.refuse(faults)


def _of_head(name: str) -> bool:
    return name.startswith("head.")
