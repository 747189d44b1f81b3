"""The only file that imports `megatron.core.datasets`, when it is needed.

Importing megatron-core takes half a second and warns, several times, about kernels that nothing
here uses; opening a data set, listing its manifest or training a tokenizer does without it.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


@functools.cache
def indexed_dataset() -> Any:
    """Imports megatron-core's format of tokens on the disk.

    Returns:
        The module `megatron.core.datasets.indexed_dataset`.
    """
    with quick_import():
        from megatron.core.datasets import indexed_dataset as module
    return module


@functools.cache
def sample_index_helpers() -> Any:
    """Imports megatron-core's C++ that cuts documents into samples.

    Returns:
        The module `megatron.core.datasets.helpers`.
    """
    with quick_import():
        from megatron.core.datasets import helpers as module
    return module


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Within the block libraries are imported without their warnings and without torch's compiler.

    megatron-core and parts of DeepSpeed decorate functions, of which nothing here calls one, with
    `torch.compile`. The first of these decorators imports all of torch's compiler, for more than a
    second; here they leave the functions as they are. What was imported before stays as it is.
    """
    import torch

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    compiler = torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile = as_it_is  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = compiler


def build_sample_index(
    lengths_D: npt.NDArray[np.int32],
    order_D: npt.NDArray[np.int32],
    sequence_length: int,
) -> npt.NDArray[np.int64 | np.int32]:
    """Cuts documents, laid end to end, into samples of `sequence_length` + 1 tokens.

    The last token of a sample is the first of the next: every token but the very first is a target
    once. What does not fill a sample at the end is left out.

    Args:
        lengths_D: Tokens of each of the D documents.
        order_D: The order in which they are laid.
        sequence_length: Targets of a sample, in tokens.

    Returns:
        An array of shape (samples + 1, 2): where each sample begins, as a position in `order_D` and
        an offset in that document, in tokens.
    """
    index: npt.NDArray[np.int64 | np.int32] = sample_index_helpers().build_sample_idx(
        lengths_D,
        order_D,
        sequence_length,
        num_epochs=1,
        tokens_per_epoch=int(lengths_D.sum(dtype=np.int64)),
        drop_last_partial_sequence=True,
        add_extra_token_to_sequence=True,
    )
    return index
