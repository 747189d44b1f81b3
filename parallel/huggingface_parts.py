"""Weights in the files of other libraries that store one of ours as several, row after row."""

import re
from abc import abstractmethod
from pathlib import Path

import torch
from torch import nn

from polyad.data.class_names import each_once
from polyad.model.build import initial_value
from polyad.model.huggingface import CONFIG_FILE, HuggingFaceError
from polyad.model.huggingface_vision import Parts
from polyad.parallel.tensor_folder import FolderWeights, TensorFolder

_ROWS = 4096
_UNNAMED = re.compile(r"LABEL_\d+")


class PartsWeights(FolderWeights):
    """The weights of such a folder: a `WeightSource`.

    Args:
        folder: with config.json and model.safetensors, or shards and an index.
        tensors: of that folder.
    """

    def __init__(self, folder: Path, tensors: TensorFolder) -> None:
        super().__init__(folder, tensors, {}, HuggingFaceError)
        self._fresh: nn.Module | None = None
        """The model whose new weights start as in any new model; None: no weight is new."""
        self.seed = 0
        """That new weights start from; a run sets its own."""

    @property
    @abstractmethod
    def labels(self) -> object:
        """What the folder calls its classes: names by their number, or in their order."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Classes of the head that the folder has; 0 without one."""

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes of its head; None if it has none, or does not name them all."""
        count, labels = self.num_classes, self.labels
        if isinstance(labels, list):
            labels = {str(number): name for number, name in enumerate(labels)}
        if not isinstance(labels, dict) or count < 2 or len(labels) != count:
            return None
        names = [labels.get(str(number)) for number in range(count)]
        known = [name for name in names if isinstance(name, str)]
        if len(known) < count or all(map(_UNNAMED.fullmatch, known)):
            return None
        return each_once(known)

    @property
    def unnamed(self) -> str | None:
        """A line for people where a head is taken whose classes have no names; None: they have."""
        if self.num_classes < 2 or self.class_names is not None:
            return None
        return (
            f"{self.folder / CONFIG_FILE} does not name all {self.num_classes} classes of its "
            f"head: that they are those of the data, in this order, is not checked"
        )

    @abstractmethod
    def is_new(self, name: str) -> bool:
        """Whether the folder does not have a weight or buffer that a run asks for."""

    @abstractmethod
    def parts(self, name: str) -> Parts:
        """Where a weight of ours is in the folder."""

    def buffer(self, name: str) -> torch.Tensor:
        """The initial value of a buffer of a new head: such a model has no others."""
        if self._fresh is None or not self.is_new(name):
            raise HuggingFaceError(f"{self.folder}: has no buffer {name}")
        return initial_value(self._fresh, name, self.seed)

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of a weight in our form, of any type."""
        return self._value(name)[slices]

    def _value(self, name: str) -> torch.Tensor:
        if self._fresh is not None and self.is_new(name):
            return initial_value(self._fresh, name, self.seed)
        shape, parts = self._shapes[name], self.parts(name)
        if not parts.names:
            return torch.zeros(shape)
        whole = tuple(slice(0, n) for n in parts.shape)
        return torch.cat([self._tensors.read(each, whole) for each in parts.names]).view(shape)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the folder; None if it is not there."""
        if name not in self._tensors.names():
            return None
        return tuple(self._tensors.mapped(name).get_shape())


def is_copy(tensors: TensorFolder, name: str, other: str) -> bool:
    """Whether two tensors of a folder are the same, bit for bit or both NaN.

    Args:
        tensors: of the folder.
        name: of a tensor that need not be there, as a tied head; then it counts as a copy.
        other: of one that is there.
    """
    if name not in tensors.names():
        return True
    one, two = tensors.mapped(name), tensors.mapped(other)
    if one.get_shape() != two.get_shape():
        return False
    return all(
        # A diverged run has NaN in both, which are not equal to each other.
        torch.allclose(
            one[row : row + _ROWS].double(),
            two[row : row + _ROWS].double(),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        for row in range(0, one.get_shape()[0], _ROWS)
    )
