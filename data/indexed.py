"""The one door to `megatron.core.datasets`, opened when it is needed.

Importing megatron-core takes seconds and warns, several times, about kernels that nothing here
uses; opening a data set, listing its manifest or training a tokenizer does without it.
"""

import functools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt


@functools.cache
def indexed_dataset() -> Any:
    """Imports megatron-core's format of tokens on the disk.

    Returns:
        The module `megatron.core.datasets.indexed_dataset`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset as module
    return module


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.helpers import build_sample_idx
    index: npt.NDArray[np.int64 | np.int32] = build_sample_idx(
        lengths_D,
        order_D,
        sequence_length,
        num_epochs=1,
        tokens_per_epoch=int(lengths_D.sum(dtype=np.int64)),
        drop_last_partial_sequence=True,
        add_extra_token_to_sequence=True,
    )
    return index
