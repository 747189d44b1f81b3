"""A loss or gradient that is not finite on one rank: all skip that step, and nothing changes."""

import itertools

import pytest
import torch

from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state
from tests.helpers.training import Case, moe_model, train

pytestmark = pytest.mark.distributed


PRECISIONS = ("fp32", "bf16")
POISONS = ("loss", "gradient")


EXPERTS = moe_model(graph="attention", balancing_rate=0.01, final_top_k=3)
CASES = [
    *itertools.product([None], [1, 2, 3], PRECISIONS, POISONS, [0, 1]),
    *itertools.product([EXPERTS], [1, 2], PRECISIONS, POISONS, [0]),
]


@everyday(
    ("model", "stage", "precision", "poison", "micro_batch"),
    CASES,
    keep=[(None, 1, "bf16", "gradient", 1), (EXPERTS, 2, "bf16", "loss", 0)],
    ids=lambda case: "-".join(("experts" if case[0] else "dense", *map(str, case[1:]))),
)
def test_a_poisoned_step_leaves_no_trace(
    workers, tmp_path, model, stage, precision, poison, micro_batch
):
    case = Case(
        stage=stage, precision=precision, poison=poison, poison_step=2,
        poison_micro_batch=micro_batch, save_to=str(tmp_path / "poisoned"),
    )  # fmt: skip
    if model is not None:
        case = case.but(model=model, expert=2)
    results = workers(2).run(train, case)
    assert [result["applied"] for result in results] == [[True, True, False, True]] * 2
    assert not torch.tensor(results[0]["norms"][2]).isfinite()
    without = case.but(skip_data=True, save_to=str(tmp_path / "without"))
    expected = workers(2).run(train, without)[0]
    assert results[0]["losses"][3] == expected["losses"][2]
    assert_equal_state(*(tmp_path / name / "step-00000004" for name in ("poisoned", "without")))


@everyday(
    ("world_size", "stage", "precision"),
    [(n, *how) for n in (2, 4) for how in ((1, "fp32"), (1, "bf16"), (3, "fp32"))],
    keep=[(2, 1, "fp32")],
)
def test_tensor_parallel_processes_skip_together(workers, world_size, stage, precision):
    case = Case(
        stage=stage, precision=precision, tensor=2, poison="gradient", poison_step=1, last_step=3
    )
    results = workers(world_size).run(train, case)
    assert [result["applied"] for result in results] == [[True, False, True]] * world_size
