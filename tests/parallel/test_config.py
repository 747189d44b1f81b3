"""Degrees and batch sizes: arithmetic by hand."""

import pytest

from polyad.parallel.config import Dims, LayoutError


def test_degrees_by_hand():
    # 4 processes x micro-batches of 3 = 12 at once; 36 needs 3 of them.
    assert Dims(world_size=4).accumulation_steps(36, 3) == 3
    assert Dims(world_size=8, tensor_parallel_size=2).data_parallel_size == 4


@pytest.mark.parametrize(
    ("degrees", "line"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3 .* the 4 processes.* 1, 2, 4;"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size: 8 .* the 4 processes"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 4}, "expert_parallel_size: 4 "),
    ],
)
def test_degrees_that_do_not_fit_the_processes_are_refused(degrees, line):
    with pytest.raises(LayoutError, match=f"parallel.{line}"):
        Dims(world_size=4, **degrees)
