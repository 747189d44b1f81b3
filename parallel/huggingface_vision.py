"""A folder of transformers' ViT or CLIP, or of timm's Mixer, as a source of weights."""

from pathlib import Path

from polyad.model.build import ModelSizeError, build_model
from polyad.model.huggingface import CONFIG_FILE, HuggingFaceError
from polyad.model.huggingface_vision import (
    IGNORED,
    Parts,
    config_from_files,
    labels_of,
    library_of,
    parameter_shapes,
    parts_of,
)
from polyad.model.settings import ModelSettings
from polyad.model.vision import ImageModelSettings
from polyad.parallel.huggingface_parts import PartsWeights
from polyad.parallel.tensor_folder import TensorFolder, Wanted, read_json

# What decides which weights a model has and what they compute; the classes are the data's.
_FREE = ("num_classes", "head", "head_bias", "dropout", "drop_path", "recompute", "compile",
         "initializer_range")  # fmt: skip


def is_vision_folder(path: Path) -> bool:
    """Whether config.json of a folder is of a model of images."""
    return library_of(read_json(path / CONFIG_FILE, HuggingFaceError)) is not None


class VisionWeights(PartsWeights):
    """The weights of such a folder: a `WeightSource`.

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
        super().__init__(folder, tensors)
        self.config = config_from_files(tree, self._shape, str(folder / CONFIG_FILE))
        self._labels = labels_of(tree)
        self._has_head = self._shape(library.outside.get("head", "") + ".weight") is not None
        if not self._has_head:
            self._fresh = build_model(self.config)
        try:
            self._shapes = parameter_shapes(self.config)
        except ModelSizeError:
            raise HuggingFaceError(
                f"{folder / CONFIG_FILE}: asks for more numbers than a tensor can have"
            ) from None
        self._check()

    @property
    def labels(self) -> object:
        """The names of classes as config.json has them: transformers' `id2label`, or timm's
        `label_names`."""
        return self._labels

    @property
    def num_classes(self) -> int:
        """Classes of its head; 0 without one."""
        return (self.config.num_classes or 0) if self._has_head else 0

    @property
    def note(self) -> str | None:
        """A line for people: what is not from the folder; None if everything is."""
        if self._fresh is None:
            return self.unnamed
        return f"the head is new: {self.folder} has none for these classes"

    def model_config(self) -> ImageModelSettings:
        """The configuration of its model, complete."""
        return self.config

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

    def is_new(self, name: str) -> bool:
        """Whether it is of a head that the folder does not have."""
        return self._fresh is not None and _of_head(name)

    def parts(self, name: str) -> Parts:
        """Where a weight of ours is in the folder."""
        return parts_of(name, self._shapes[name], self._library, self._tensors.names())

    def _check(self) -> None:
        wanted: dict[str, Wanted] = {}
        for name in self._shapes:
            if not self.is_new(name):
                parts = self.parts(name)
                wanted |= {each: Wanted(parts.shape) for each in parts.names}
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        strange = sorted(self._tensors.names() - wanted.keys())
        faults += [f"unknown tensor {name}" for name in strange if not IGNORED.fullmatch(name)]
        self._tensors.refuse(faults)


def _of_head(name: str) -> bool:
    return name.startswith("head.")
