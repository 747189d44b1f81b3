"""The unigram model, by hand, and the nearest training image."""

from typing import Any

import numpy as np
import pytest

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.train.evaluation.summary import nearest_neighbour_accuracy, unigram_perplexity
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


def test_the_nearest_image_of_digits_has_their_class_mostly():
    data = ImageData.open(ImageDataConfig(path="digits", held_out=0.3))
    splits = [data.split(name) for name in ("train", "validation")]
    assert nearest_neighbour_accuracy(*splits, 8) == pytest.approx(0.9796, abs=0.004)
