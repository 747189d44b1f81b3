"""Gradients of bf16 models are added up, and summed over processes, in fp32."""

import pytest

from tests.helpers.everyday import everyday
from tests.helpers.gradients import calls_in_backward, exchanges_of_a_step, mean_gradient
from tests.helpers.training import Case

pytestmark = pytest.mark.distributed

# [micro-batch][rank], each of them exact in bf16, which keeps 8 bits: 256 + 1 is 256 there.
GRADIENTS = [[256.0, 1.0, 3.0], [1.0, 1.0, 1.0]]


@everyday("processes", [2, 3], keep=[3])
@everyday("stage", [1, 2, 3], keep=[2])
def test_bf16_gradients_are_summed_in_fp32(workers, stage, processes):
    # Three processes: a third is no number of bf16, so division has to be fp32's as well.
    for micro_batches in (1, 2):
        gradients = GRADIENTS[:micro_batches]
        exact = sum(sum(row[:processes]) for row in gradients) / processes / micro_batches
        for values, times in workers(processes).run(mean_gradient, stage, gradients):
            assert values == [pytest.approx(exact, rel=1e-6)]
            assert not times  # DeepSpeed's timer would wait for the device in every micro-batch


PADDED = 37_332
"""Numbers of the tiny model, whose vocabulary of 61 is 128 in a layout."""


@everyday("precision", ["fp32", "bf16"], keep=["bf16"])
def test_what_each_stage_sends(workers, precision):
    """In a step of 2 micro-batches a process. A reduction to the owner of a part sends half of what
    an all-reduce sends; of a reduce-scatter the numbers of the own part count."""
    weights = "bfloat16" if precision == "bf16" else "float32"
    expected = {
        1: {("_reduce_scatter_base", "float32"): PADDED // 2, ("_allgather_base", weights): PADDED},
        2: {("reduce", "float32"): 2 * PADDED, ("_allgather_base", weights): PADDED},
    }
    case = Case(precision=precision)
    for stage, kinds in expected.items():
        sent = workers(2).run(exchanges_of_a_step, case.but(stage=stage))[0]
        small = {kind: n for kind, n in sent.items() if kind not in kinds}
        assert {kind: n for kind, n in sent.items() if kind in kinds} == {
            kind: pytest.approx(n, abs=3) for kind, n in kinds.items()
        }
        assert sum(small.values()) <= 4, small  # the norm, and a step's loss
    sent = workers(2).run(exchanges_of_a_step, case.but(stage=3))[0]
    assert sent["_reduce_scatter_base", "float32"] == PADDED
    # In 2 forward and 2 backward passes; what ends one and begins the next is gathered once.
    assert 2 * PADDED < sent["_allgather_base", weights] < 4 * PADDED


@everyday("precision", ["fp32", "bf16"], keep=["bf16"])
def test_buckets_are_reduced_while_the_backward_pass_goes_on(workers, precision):
    case = Case(precision=precision, stage=2, bucket_size=4_000)
    calls = workers(2).run(calls_in_backward, case)[0]
    assert calls["reduce"] >= 10  # after each of two micro-batches
