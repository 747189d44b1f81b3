"""Boxes: an oracle that counts every element."""

import itertools
import math

import pytest
import torch

from polyad.parallel.shard import boxes


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (2, 3, 4), (2, 2, 2, 3)])
def test_boxes_cover_a_range_in_order_and_are_few(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        found = list(boxes(shape, start, stop))
        pieces = [
            numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].reshape(-1)
            for offset, size in found
        ]
        covered = torch.cat(pieces).tolist() if pieces else []
        assert covered == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
