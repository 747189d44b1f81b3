"""Boxes: an oracle that counts every element."""

import itertools
import math

import pytest
import torch

from polyad.parallel.shard import Axis, Placement, boxes


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


def test_a_stack_is_stored_as_the_parameters_in_it():
    # The second of 2 parts of 4 experts, and the first of 2 parts of 6 inner units.
    axes = (Axis.part(4, 1, 2), Axis.uncut(3), Axis.uncut(2), Axis.part(6, 0, 2))
    placement = Placement(axes, replicated=False, stacked=("gate", "up"))
    whole = {"layer.gate": torch.rand(4, 3, 6), "layer.up": torch.rand(4, 3, 6)}
    shard = torch.stack([each[2:, :, :3] for each in whole.values()], 2).flatten()
    for start, stop in itertools.combinations(range(len(shard) + 1), 2):
        seen = 0
        for box, view in placement.views("layer.up", "master", shard[start:stop], start):
            assert box.shape == (4, 3, 6)
            assert torch.equal(whole[box.name][box.slices], view)
            seen += view.numel()
        assert seen == stop - start
