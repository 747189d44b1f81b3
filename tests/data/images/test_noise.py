"""Gaussian noise on held-out images."""

import numpy as np
import pytest

from polyad.data.images.augmentation import GaussianNoise
from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import EvaluationImages
from tests.helpers import images as made

GREY = np.full((3, 64, 64), 128, dtype=np.uint8)


def test_noise_has_the_standard_deviation_and_is_the_same_for_a_seed_and_an_image():
    noisy = GaussianNoise(0.1, seed=4)(GREY, 7)
    assert noisy.dtype == np.uint8
    assert np.array_equal(noisy, GaussianNoise(0.1, seed=4)(GREY, 7))
    assert not np.array_equal(noisy, GaussianNoise(0.1, seed=4)(GREY, 8))
    assert not np.array_equal(noisy, GaussianNoise(0.1, seed=5)(GREY, 7))
    difference = noisy.astype(float) - 128
    assert abs(difference.mean()) < 1
    assert difference.std() == pytest.approx(25.5, rel=0.02)
    half = GaussianNoise(0.05, seed=4)(GREY, 7).astype(float) - 128  # the same noise, weaker
    assert np.abs(difference - 2 * half).max() <= 1.5


def test_noise_ends_at_black_and_white_and_none_changes_nothing():
    assert np.array_equal(GaussianNoise(0)(GREY, 3), GREY)
    white = GaussianNoise(0.5)(np.full_like(GREY, 255), 3)
    assert white.max() == 255
    assert white.min() < 128


def test_held_out_images_have_it_whatever_part_is_read(tmp_path):
    settings = ImageDataConfig(path=str(made.class_folders(tmp_path / "all")))
    split, noise = ImageData.open(settings).split("train"), GaussianNoise(0.2, 1)
    clean = EvaluationImages(split, settings, 8)
    noisy = EvaluationImages(split, settings, 8, noise=noise)
    expected = noise(clean[5].images_BCHW.numpy(), 5)
    assert np.array_equal(noisy[5].images_BCHW.numpy(), expected)
