"""The definition of every operation, with which faster ways are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from polyad.model.kernels import grouped, switch


@contextmanager
def by_definition() -> Iterator[None]:
    """Computes every operation by its definition, as with `POLYAD_KERNELS=reference`."""
    with mock.patch.object(switch, "REFERENCE", True):
        yield


@contextmanager
def by_products() -> Iterator[None]:
    """Computes experts by grouped products, as on a GPU."""
    with mock.patch.object(grouped, "has_gelu", return_value=False):
        yield
