"""Entropy, against torch.distributions and by hand."""

import math

import pytest
import torch

from polyad.model.output import entropy


def test_by_hand():
    shares = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25] * 4])
    expected = torch.tensor([0.0, math.log(2), math.log(4)])
    torch.testing.assert_close(entropy(shares), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_a_distribution_has_it(dtype):
    scores = 4 * torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    expected = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(entropy(scores.softmax(-1)), expected)


def test_nan_stays():
    assert entropy(torch.tensor([float("nan"), 0.5])).isnan()
