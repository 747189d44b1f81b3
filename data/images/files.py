"""Image files with classes, as the images of a split, without an index."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.images.decoding import Pixels, decode
from polyad.data.images.imagenet import LabelledFile


class FileSplit:
    """Files in their order.

    Args:
        files: With their classes.
    """

    def __init__(self, files: Sequence[LabelledFile]) -> None:
        self._files = files
        self.labels: npt.NDArray[np.integer] = np.array([file.label for file in files])
        self.domains: npt.NDArray[np.integer] | None = None

    @property
    def identity(self) -> str:
        """Any files have the order of so many."""
        return "files"

    def __len__(self) -> int:
        """Counts the images."""
        return len(self._files)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]."""
        path = self._files[number].path
        try:
            return decode(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None

    def name_of(self, number: int) -> str:
        """An image's file."""
        return str(self._files[number].path)

    def order(self, generator: np.random.Generator) -> npt.NDArray[np.integer]:
        """All numbers in random order."""
        return generator.permutation(len(self))
