"""The nearest training image, against scikit-learn's."""

import numpy as np
import pytest

from polyad.data.images.dataset import ImageData
from polyad.data.images.prepare import prepare_images
from polyad.train.evaluation.neighbour import nearest_neighbour_accuracy


def test_it_is_scikit_learns(tmp_path):
    neighbors = pytest.importorskip("sklearn.neighbors")
    prepare_images("digits", tmp_path / "out", held_out=0.3, report=lambda line: None)
    data = ImageData.open(tmp_path / "out")
    splits = [data.split(name) for name in ("train", "validation")]
    pixels = [
        np.stack([split.decode(n).ravel() for n in range(len(split))]).astype(np.float64)
        for split in splits
    ]
    model = neighbors.KNeighborsClassifier(1).fit(pixels[0], splits[0].labels)
    expected = model.score(pixels[1], splits[1].labels)
    assert nearest_neighbour_accuracy(*splits, 8) == pytest.approx(expected, abs=0.004)
