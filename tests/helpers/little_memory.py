"""Models that do not fit into memory, and are read block by block."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from polyad.train import streaming


@contextmanager
def little_memory() -> Iterator[None]:
    """A context in which no model fits into memory as a whole."""
    with mock.patch.object(streaming, "bytes_of_weights", return_value=2**60):
        yield
