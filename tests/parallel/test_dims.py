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


@pytest.mark.parametrize("degree", [3, 8])
def test_degrees_that_do_not_fit_the_processes_are_refused(degree):
    with pytest.raises(LayoutError, match="does not divide the 4 processes"):
        Dims(world_size=4, tensor_parallel_size=degree)


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


@pytest.mark.parametrize(
    ("processes", "degrees", "said"),
    [
        (
            1, {"expert_parallel_size": 2},
            "parallel.expert_parallel_size: 2 does not divide the 1 process; `polyad launch CONFIG "
            "--processes-per-node 2` starts 2 on one machine; for the 1 process "
            "parallel.expert_parallel_size=1 would do",
        ),
        (
            6, {"tensor_parallel_size": 4},
            "parallel.tensor_parallel_size: 4 does not divide the 6 processes; `polyad launch "
            "CONFIG --processes-per-node 8` starts 8 on one machine; for the 6 processes "
            "parallel.tensor_parallel_size=1 or 2 or 3 or 6 would do",
        ),
        (
            4, {"tensor_parallel_size": 2, "expert_parallel_size": 4},
            "parallel.expert_parallel_size: 4 does not divide the 2 data-parallel processes that "
            "parallel.tensor_parallel_size: 2 leaves of 4; `polyad launch CONFIG "
            "--processes-per-node 8` starts 8 on one machine; for the 4 processes "
            "parallel.expert_parallel_size=1 or 2 would do",
        ),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_say_what_to_type(processes, degrees, said):
    with pytest.raises(LayoutError) as caught:
        Dims(world_size=processes, **degrees)
    assert str(caught.value) == said
    would_do = [int(word) for word in said.rpartition("=")[2].split(" would")[0].split(" or ")]
    for size in would_do:  # and they are right
        Dims(world_size=processes, **degrees | {said.split("=")[-2].rpartition(".")[2]: size})


@pytest.mark.parametrize(
    ("processes", "batch", "micro", "would_do"),
    [
        (32, 480, 12, "train.micro_batch_size=1 or 3 or 5 or 15 would do, or "
                      "train.global_batch_size=384 or 768"),
        (7, 480, 12, "train.global_batch_size=420 or 504 would do"),
        (8, 4, 2, "train.global_batch_size=16 would do"),
        # The six nearest to 7 of the divisors of 60.
        (1, 60, 7, "train.micro_batch_size=2 or 3 or 4 or 5 or 6 or 10 would do, or "
                   "train.global_batch_size=56 or 63"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_says_which_would(processes, batch, micro, would_do):
    dims = Dims(world_size=processes)
    with pytest.raises(LayoutError) as caught:
        dims.accumulation_steps(batch, micro)
    assert str(caught.value).endswith(f"= {micro * processes}; {would_do}")
