"""Scores of images, against numbers worked out by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor

from polyad.parallel import comm
from polyad.train.tasks.counting import CountedClasses


def calibration_error(loss: str, logits_BK: Tensor, labels_B: Tensor) -> float:
    world = comm.initialize()
    chance = torch.sigmoid if loss == "sigmoid" else partial(torch.softmax, dim=-1)
    counted = CountedClasses(2, world.device, chance)
    counted.add(logits_BK, labels_B, torch.zeros(len(labels_B)))
    return counted.result(world, ("a", "b"))["calibration_error"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("loss", "error"),
    [
        # Confidences 3/4 of a right answer and 9/10 of a wrong one: (1/4 + 9/10) / 2.
        ("softmax", 0.575),
        # The second has the logits 0 and -ln 9, so 1/2 for its answer: (1/4 + 1/2) / 2.
        ("sigmoid", 0.375),
    ],
)
def test_calibration_is_of_the_probabilities_of_the_loss(workers, loss, error):
    logits_BK = torch.tensor([[3.0, 1.0], [1.0, 1 / 9]]).log()
    labels_B = torch.tensor([0, 1])
    found = workers(1).run(calibration_error, loss, logits_BK, labels_B)
    assert found == [pytest.approx(error)]
