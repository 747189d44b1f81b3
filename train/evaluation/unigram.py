"""The simplest language model, to compare with: every token on its own, by its frequency."""

import math

import numpy as np
import numpy.typing as npt

from polyad.data.text.dataset import TokenStream

CHUNK_TOKENS = 1 << 20
"""Tokens held at a time."""


def unigram_perplexity(train: TokenStream, held_out: TokenStream, vocab_size: int) -> float:
    """Perplexity of token frequencies, each raised by one so that none is zero.

    Args:
        train: the split whose tokens are counted.
        held_out: the split that is scored, end-of-text tokens included.
        vocab_size: V.

    Returns:
        exp of the mean negative log-likelihood of a token of `held_out`.
    """
    counts_V = count_tokens(train, vocab_size)
    log_probability_V = np.log(counts_V + 1.0) - math.log(int(counts_V.sum()) + vocab_size)
    scored_V = count_tokens(held_out, vocab_size)
    return math.exp(-float(scored_V @ log_probability_V) / int(scored_V.sum()))


def count_tokens(stream: TokenStream, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs.

    Args:
        stream: a split.
        vocab_size: V; all ids are below it.

    Returns:
        Counts, shape (V,).
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, stream.num_tokens, CHUNK_TOKENS):
        tokens = stream.read(start, min(start + CHUNK_TOKENS, stream.num_tokens))
        counts_V += np.bincount(tokens, minlength=vocab_size)
    return counts_V
