"""Normalized and mixed images, and their targets, against numbers worked out by hand."""

import pytest
import torch

from polyad.train.tasks.pixels import mix_images, neighbours, normalize, soft_targets


def test_normalized_pixels_by_hand():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    # 0, 0.2 and 1, less the mean, over the standard deviation.
    out = normalize(images, (0.5, 0.1, 0.4), (0.5, 0.2, 0.3))
    assert out.dtype == torch.float32
    assert out.flatten().tolist() == pytest.approx([-1.0, 0.5, 2.0], abs=1e-6)


def test_neighbours_change_places_in_pairs():
    assert neighbours(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]


def test_mixup_is_a_weighted_mean_of_pixels_and_of_labels():
    images = torch.tensor([100, 200], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 2, 2)
    mix, box = torch.tensor([0.75, 0.75]), torch.zeros(2, 4, dtype=torch.int16)
    mixed = mix_images(images, mix, box)
    assert torch.equal(mixed[0], torch.full((3, 2, 2), 125.0))  # 3/4 of 100 + 1/4 of 200
    assert torch.equal(mixed[1], torch.full((3, 2, 2), 175.0))
    targets = soft_targets(torch.tensor([2, 0]), mix, 3, 0.0)
    assert targets.tolist() == [[0.25, 0.0, 0.75], [0.75, 0.0, 0.25]]


def test_a_box_holds_the_neighbours_pixels_and_nothing_is_blended():
    images = torch.stack([torch.full((1, 4, 4), 10), torch.full((1, 4, 4), 90)]).to(torch.uint8)
    # Rows 1 and 2, column 3: 2 of 16 pixels.
    box = torch.tensor([[1, 3, 3, 4]] * 2, dtype=torch.int16)
    mixed = mix_images(images, torch.full((2,), 14 / 16), box)
    expected = torch.full((4, 4), 10.0)
    expected[1:3, 3] = 90.0
    assert torch.equal(mixed[0, 0], expected)
    assert torch.equal(mixed[1, 0], 100.0 - expected)


def test_unmixed_images_stay_and_smoothing_is_spread_over_all_classes():
    images = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8)
    same = mix_images(images, torch.ones(2), torch.zeros(2, 4, dtype=torch.int16))
    assert torch.equal(same, images.float())
    targets = soft_targets(torch.tensor([1]), None, 4, 0.2)
    assert targets.tolist() == [pytest.approx([0.05, 0.85, 0.05, 0.05])]
