"""The unigram model, by hand."""

from typing import Any

import numpy as np
import pytest

from polyad.train.evaluation.unigram import count_tokens, unigram_perplexity


class Stream:
    """Tokens in memory, with what unigram counting uses of a split."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)
        self.num_tokens = len(tokens)

    def read(self, start: int, stop: int) -> Any:
        assert stop - start <= 2, "no more than a chunk at a time"
        return self._tokens[start:stop]


def test_unigram_perplexity_is_that_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyad.train.evaluation.unigram.CHUNK_TOKENS", 2)
    train, held_out = Stream([0, 0, 0, 1, 1]), Stream([0, 1, 2])
    assert count_tokens(train, 3).tolist() == [3, 2, 0]  # type: ignore[arg-type]
    # (4, 3, 1) / 8 after adding one; their geometric mean is (12 / 512) ** (1 / 3).
    perplexity = unigram_perplexity(train, held_out, 3)  # type: ignore[arg-type]
    assert perplexity == pytest.approx((512 / 12) ** (1 / 3), rel=1e-12)
