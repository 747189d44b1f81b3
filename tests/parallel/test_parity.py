"""n processes compute what one process computes: losses, gradients (SGD), weights."""

import pytest
import torch

from tests.helpers.everyday import everyday
from tests.helpers.training import Case, describe, relative, tensors, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1)
# (processes, tensor-parallel ones, ZeRO stage); the first, one process, is the reference
LAYOUTS = [
    (world_size, tensor, stage)
    for world_size, tensor in ((1, 1), (2, 1), (2, 2), (4, 2))
    for stage in (0, 1, 2, 3)
][1:]


def close(a: list[float], b: list[float]) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def references(workers, tmp_path_factory):
    """One process at stage 0, for every setting that is compared."""
    made = {}

    def reference(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("reference")
            result = workers(1).run(train, case.but(stage=0, save_to=str(folder)))[0]
            made[case] = result, tensors(folder / "step-00000004")
        return made[case]

    return reference


@everyday(("world_size", "tensor", "stage"), LAYOUTS, keep=[(4, 2, 3), (4, 2, 0), (2, 1, 2)])
@everyday("clip", [0.5, 0.0, 100.0], keep=[0.5], ids=["clips", "no clipping", "clip not met"])
def test_sgd_gives_equal_losses_norms_and_weights(
    workers, references, tmp_path, world_size, tensor, stage, clip
):
    case = SGD.but(clip=clip)
    expected, weights = references(case)
    assert all(norm > 0.5 for norm in expected["norms"])  # so that a clip of 0.5 is active
    case = case.but(stage=stage, tensor=tensor, save_to=str(tmp_path))
    results = workers(world_size).run(train, case)
    assert all(result == results[0] for result in results)
    assert close(results[0]["losses"], expected["losses"])
    assert close(results[0]["norms"], expected["norms"])
    ours = tensors(tmp_path / "step-00000004")
    assert ours.keys() == weights.keys()
    assert max(relative(ours[key], weights[key]) for key in weights) < 1e-5


@everyday(
    ("world_size", "tensor", "stage"),
    [(2, 1, 3), (2, 2, 0), (2, 2, 3), (4, 2, 1)],
    keep=[(2, 2, 3)],
)
def test_a_head_of_its_own_is_cut_and_sharded(
    workers, references, tmp_path, world_size, tensor, stage
):
    model = SGD.model.model_copy(update={"tied_embeddings": False})
    case = SGD.but(clip=0.5, model=model)
    expected, weights = references(case)
    case = case.but(stage=stage, tensor=tensor, save_to=str(tmp_path))
    result = workers(world_size).run(train, case)[0]
    assert close(result["losses"], expected["losses"])
    assert close(result["norms"], expected["norms"])
    ours = tensors(tmp_path / "step-00000004")
    assert ours.keys() == weights.keys()
    assert ("head.weight", "master") in ours
    assert max(relative(ours[key], weights[key]) for key in weights) < 1e-5


def test_clipping_changes_the_weights(references):
    _, clipped = references(SGD.but(clip=0.5))
    _, free = references(SGD.but(clip=0.0))
    assert max(relative(clipped[key], free[key]) for key in free) > 1e-3


@everyday(("world_size", "tensor", "stage"), LAYOUTS, keep=[(4, 2, 3), (2, 1, 1)])
def test_adamw_gives_equal_losses(workers, references, world_size, tensor, stage):
    expected, _ = references(Case(learning_rate=1e-3))
    case = Case(learning_rate=1e-3, stage=stage, tensor=tensor)
    result = workers(world_size).run(train, case)[0]
    assert close(result["losses"], expected["losses"])


@everyday("stage", [0, 1, 2, 3], keep=[0, 3])
def test_bf16_stays_near_fp32(workers, references, stage):
    expected, _ = references(Case(learning_rate=1e-3))
    result = workers(2).run(train, Case(learning_rate=1e-3, stage=stage, precision="bf16"))[0]
    assert torch.allclose(torch.tensor(result["losses"]), torch.tensor(expected["losses"]), 2e-3)


@everyday("stage", [0, 1, 2, 3], keep=[3])
def test_recomputation_changes_nothing_under_the_engine(workers, references, stage):
    expected, _ = references(SGD.but(clip=0.5))
    model = SGD.model.model_copy(update={"recompute": "block"})
    result = workers(2).run(train, SGD.but(clip=0.5, stage=stage, model=model))[0]
    assert close(result["losses"], expected["losses"])
    assert close(result["norms"], expected["norms"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_compiled_blocks_change_nothing_under_the_engine(workers, references, stage):
    expected, _ = references(SGD.but(clip=0.5))
    model = SGD.model.model_copy(update={"compile": True})
    result = workers(2).run(train, SGD.but(clip=0.5, stage=stage, model=model))[0]
    assert close(result["losses"], expected["losses"])
    assert close(result["norms"], expected["norms"])


def test_momentum_is_part_of_the_state(workers, references, tmp_path):
    case = SGD.but(momentum=0.9, learning_rate=0.01)
    expected, weights = references(case)
    result = workers(2).run(train, case.but(stage=2, save_to=str(tmp_path)))[0]
    ours = tensors(tmp_path / "step-00000004")
    assert close(result["losses"], expected["losses"])
    fields = {field for _, field in ours}
    assert fields == {"master", "momentum_buffer"}
    assert max(relative(ours[key], weights[key]) for key in weights) < 1e-5


def test_ids_name_what_differs():
    assert describe(Case(stage=2, clip=0.5)) == "stage=2,clip=0.5"
