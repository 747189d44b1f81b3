"""Class polysemanticity by hand, and leaving experts out against weights of 0."""

import math

import pytest
import torch

from polyad.train.experts.polysemanticity import polysemanticity


def test_polysemanticity_by_hand():
    right = torch.tensor([10.0, 20.0, 0.0])
    lost = torch.tensor(
        [
            [10.0, 0.0, 0.0],  # d = (1, 0, 0): one class alone, p = 0
            [5.0, 10.0, 0.0],  # d = (0.5, 0.5, 0): |(-0.5, 0.5)| (the first is the highest)
            [0.0, -2.0, 0.0],  # d = (0, -0.1, 0): the highest is class 0, |(-1, -0.1, 0)|
            [0.0, 0.0, 0.0],  # matters to none
        ]
    )
    found = polysemanticity(right, lost)
    expected = [0.0, math.sqrt(0.5), math.sqrt(1.01)]
    assert found.expert_S[:3].tolist() == pytest.approx(expected)
    assert found.expert_S[3].isnan()
    assert found.class_S.tolist() == [0, 0, 0, -1]
    assert found.mean == pytest.approx(sum(expected) / 3)
    assert sum(found.histogram()["experts"]) == 3
