"""The two files of a split in megatron-core's format: its tokens, and the index of documents.

`.bin`: tokens, document after document. `.idx`: a header of `HEADER_BYTES` (magic, version, code
of the token type, sequences, bounds), then for D documents of one sequence each the lengths in
tokens (4 bytes each), the offsets in bytes (8 each), and the numbers 0 to D (8 each), which are the
bounds of documents in sequences.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 34


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Chooses the integer type of a token, as megatron-core does.

    Args:
        vocab_size: Entries of the vocabulary.

    Returns:
        The type of a token.
    """
    return np.uint16 if vocab_size < 65_500 else np.int32


def index_bytes(documents: int) -> int:
    """Returns the size of an `.idx` file.

    Args:
        documents: Documents it lists, one sequence each.

    Returns:
        Bytes.
    """
    return HEADER_BYTES + 12 * documents + 8 * (documents + 1)


def read_lengths(path: Path, documents: int) -> npt.NDArray[np.int32]:
    """Reads the number of tokens of each document from an index."""
    return np.fromfile(path, np.int32, documents, offset=HEADER_BYTES)
