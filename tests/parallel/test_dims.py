"""Degrees and batch sizes: arithmetic by hand."""

import pytest

from polyad.parallel.dims import Dims, LayoutError


def test_accumulation_fills_the_global_batch():
    # 4 processes x micro-batches of 3 = 12 at once; 36 needs 3 of them.
    assert Dims(world_size=4).accumulation_steps(36, 3) == 3


def test_tensor_parallel_processes_share_their_data():
    assert Dims(world_size=8, tensor_parallel_size=2).data_parallel_size == 4


def test_a_global_batch_that_does_not_divide_names_both_keys():
    with pytest.raises(LayoutError, match=r"global_batch_size: 10 .*micro_batch_size.*3 x 2 = 6"):
        Dims(world_size=2).accumulation_steps(10, 3)


@pytest.mark.parametrize(
    ("degrees", "line"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3 .* the 4 processes.* 1, 2, 4;"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size: 8 .* the 4 processes"),
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 4},
            "expert_parallel_size: 4 .* the 2 data-parallel processes.* 4 / 2.* 1, 2;",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_processes_are_refused(degrees, line):
    with pytest.raises(LayoutError, match=f"parallel.{line}"):
        Dims(world_size=4, **degrees)


@pytest.mark.parametrize(
    ("world", "tensor", "expert", "of_node", "crosses"),
    [
        (8, 2, 4, 8, False), (16, 2, 4, 8, False), (16, 2, 8, 8, True), (16, 4, 2, 6, True),
        (4, 2, 2, 8, False), (16, 1, 1, 8, False), (24, 1, 8, 12, True),
    ],
)  # fmt: skip
def test_a_layout_that_leaves_a_node_says_so(world, tensor, expert, of_node, crosses):
    dims = Dims(world_size=world, tensor_parallel_size=tensor, expert_parallel_size=expert)
    line = dims.crossing(of_node)
    assert (line is not None) == crosses
    if line:
        assert f"= {tensor * expert} processes do not fit into nodes of {of_node}" in line
