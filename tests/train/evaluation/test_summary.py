"""The unigram model, by hand."""

from typing import Any

import numpy as np
import pytest

from polyad.train.evaluation.summary import unigram_perplexity
from polyad.train.experts import token_classes


class Stream:
    """Tokens in memory, with what counting uses of a split."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)
        self.num_tokens = len(tokens)

    def read(self, start: int, stop: int) -> Any:
        assert stop - start <= 2, "no more than a part at a time"
        return self._tokens[start:stop]


def test_unigram_perplexity_is_that_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_classes, "AT_ONCE", 2)
    train, held_out = Stream([0, 0, 0, 1, 1]), Stream([0, 1, 2])
    assert token_classes.frequencies(train, 3).tolist() == [3, 2, 0]  # type: ignore[arg-type]
    # (4, 3, 1) / 8 after adding one; their geometric mean is (12 / 512) ** (1 / 3).
    perplexity = unigram_perplexity(train, held_out, 3)  # type: ignore[arg-type]
    assert perplexity == pytest.approx((512 / 12) ** (1 / 3), rel=1e-12)
