"""Experts that are copies of a dense feed-forward."""

import pytest
import torch

from polyad.model.smoe.experts import copies, dense_tensor


def test_what_is_copied_is_named_and_the_rest_is_not():
    layer = "blocks.12.feed_forward"
    assert dense_tensor(f"{layer}.experts.up") == (f"{layer}.up.weight", True)
    assert dense_tensor(f"{layer}.experts.up_bias") == (f"{layer}.up.bias", False)
    assert dense_tensor(f"{layer}.experts.down") == (f"{layer}.down.weight", True)
    assert dense_tensor(f"{layer}.output_bias") == (f"{layer}.down.bias", False)
    for name in (f"{layer}.router.score.weight", f"{layer}.up.weight", "final_norm.weight"):
        assert dense_tensor(name) is None


def test_copies_without_noise_are_bitwise_the_value():
    value = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).T
    stacked = copies(value, 3, 0.0, 7, "up")
    assert stacked.shape == (3, 4, 6)
    assert stacked.is_contiguous()
    assert all(torch.equal(copy, value) for copy in stacked)


def test_noise_is_a_share_of_the_deviation_and_of_each_expert_its_own():
    # Values 3 +- 2: their standard deviation is 2, whatever their mean.
    value = torch.tensor([1.0, 5.0]).repeat(100, 100)
    added = copies(value, 3, 0.05, 7, "up") - value
    for noise in added:
        assert noise.std().item() == pytest.approx(0.1, rel=0.02)  # of 20,000 draws: 0.5%
        assert noise.mean().item() == pytest.approx(0, abs=0.004)
    assert all(
        abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.04
        for a, b in [(added[0], added[1]), (added[0], added[2]), (added[1], added[2])]
    )


def test_noise_hangs_on_seed_name_and_expert_alone():
    value = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = copies(value, 3, 0.1, 7, "up")
    torch.manual_seed(2)
    assert torch.equal(copies(value, 3, 0.1, 7, "up"), first)
    assert torch.equal(copies(value, 8, 0.1, 7, "up")[:3], first)
    assert not torch.equal(copies(value, 3, 0.1, 8, "up"), first)
    assert not torch.equal(copies(value, 3, 0.1, 7, "down"), first)
