"""What an expert tells about the class: numbers by hand, and what chance gives."""

import numpy as np
import pytest
import torch

from polyad.model.smoe.router import Selected
from polyad.train.experts.by_class import ExpertCounts, assigned, shuffled_classes
from polyad.train.experts.probing import Decision, RoutedLayer


def test_chance_is_that_of_whole_sequences():
    """An expert that follows the sequence tells the class of a few sequences even by chance: as
    much as shuffled labels; one that follows the class tells more."""
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(2,))
    rows, length = 64, 10
    generator = torch.Generator().manual_seed(1)
    label_A = torch.randint(2, (rows,), generator=generator)
    row_N = torch.arange(rows).repeat_interleave(length)
    for expert_A, low, high in (
        (torch.randint(2, (rows,), generator=generator), 0.0, 0.06),
        (label_A, 0.9, 1.0),
    ):
        ids_N1 = expert_A[row_N].unsqueeze(-1)
        selected = Selected.of(torch.ones_like(ids_N1, dtype=torch.float32), ids_N1, 2)
        counts = ExpertCounts(layer, ["a", "b"], rows)
        decision = Decision(levels=[torch.zeros(rows * length, 2)], selected=selected)
        label_PN = shuffled_classes(label_A)[:, row_N]
        counts.count(assigned(decision), label_PN, row_N)
        (level,) = counts.result()
        assert level.counts_SY.sum() == rows * length
        assert low <= level.columns()["information_bits"] <= high
        # Of 640 tokens that were each on its own it would be 1 / (2 ln 2 640) = 0.0011 bits.
        assert 0.003 < level.by_chance < 0.05
    _, lifts = level.highest_lifts()
    assert [lift for lift, *_ in lifts] == pytest.approx((1 / level.share_S).tolist())


def test_shares_tell_less_than_which_is_the_highest():
    """Two networks that share 0.6 and 0.4 of an image, the other way in the other class: the
    shares tell 1 - H(0.6, 0.4) = 0.029 bits, the highest of them the whole bit."""
    layer = RoutedLayer(name="mixture", levels=(2,), shares=True)
    label_A = torch.tensor([0, 1] * 32)
    shares_AM = torch.tensor([[0.6, 0.4], [0.4, 0.6]])[label_A]
    counts = ExpertCounts(layer, ["a", "b"], 64)
    assigned_NS = assigned(Decision(levels=[shares_AM], selected=None))
    counts.count(assigned_NS, shuffled_classes(label_A), torch.arange(64))
    (level,) = counts.result()
    entropy = -(0.6 * np.log2(0.6) + 0.4 * np.log2(0.4))
    columns = level.columns()
    assert columns["information_bits"] == pytest.approx(1 - entropy)
    assert columns["information_bits_of_highest"] == pytest.approx(1.0)
    assert 0 < columns["information_bits_of_highest_by_chance"] < 0.1
    assert level.counts_SY.sum() == pytest.approx(64)
