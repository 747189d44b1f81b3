"""What each process writes: everything once, in few ranges."""

import itertools
import json
import math

import pytest
import torch

from polyad.model.build import build_model
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.train.loop.optimizer import GroupConfig
from tests.helpers.everyday import everyday
from tests.helpers.saving import train_rearranging
from tests.helpers.training import MODEL, Case, moe_model, mumoe_model, resave, tensors, train

pytestmark = pytest.mark.distributed

MODELS = {
    "dense": MODEL,
    "ring": mumoe_model(factorization="tr", rank=4, num_experts=[6]),
    "experts": moe_model(),
}


def index_of(folder):
    return json.loads((folder / "index.json").read_text())["tensors"]


def chunks_by_file(folder):
    found = {}
    for fields in index_of(folder).values():
        for field, about in fields.items():
            for chunk in about["chunks"]:
                if field in ("master", "exp_avg", "exp_avg_sq"):
                    found.setdefault(chunk["file"], []).append(math.prod(chunk["size"]))
    return found


@everyday("average", [None, 0.9], keep=[0.9])
@everyday(
    ("name", "processes", "tensor", "expert"),
    [
        *itertools.product(MODELS, (1, 2, 4), (1,), (1,)),
        *((name, 4, 2, 1) for name in MODELS),
        *(("experts", 4, tensor, 2) for tensor in (1, 2)),
    ],
    keep=[("experts", 4, 1, 2)],
)
def test_rearranged_parts_are_the_same_tensors(
    workers, tmp_path, name, processes, tensor, expert, average
):
    case = Case(
        stage=3, model=MODELS[name], tensor=tensor, expert=expert, average=average, last_step=2
    )
    contents = []
    for way, trained in (("as they are", train), ("rearranged", train_rearranging)):
        workers(processes).run(trained, case.but(save_to=str(tmp_path / way)))
        (folder,) = (tmp_path / way).glob("step-*")
        contents.append(tensors(folder))
    before, after = contents
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


# Of a width of 3, so that of 4 processes the last has no element of any trained vector.
NARROW = MODEL.model_copy(update={"hidden_size": 3, "num_heads": 1})
FEW = {"one vector": "final_norm.bias", "several": "*norm.*"}


@everyday("average", [None, 0.9], keep=[None])
@everyday("trained", FEW, keep=["several"])
@pytest.mark.slow
def test_processes_without_an_element_write_what_others_had(workers, tmp_path, trained, average):
    groups = GroupConfig(match=FEW[trained]), GroupConfig(match="*", freeze=True)
    case = Case(stage=3, model=NARROW, groups=groups, average=average)
    contents = []
    for way, run in (("as they are", train), ("rearranged", train_rearranging)):
        workers(4).run(run, case.but(last_step=2, save_to=str(tmp_path / way)))
        (folder,) = (tmp_path / way).glob("step-*")
        names = {name for name, field in tensors(folder) if field == "exp_avg"}
        assert {Checkpoint(folder).step(name) for name in names} == {2}
        contents.append(tensors(folder))
    before, after = contents
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    whole = workers(4).run(train, case)[0]["losses"]
    rest = case.but(first_step=2, resume=str(folder), save_to=str(tmp_path / "rest"))
    assert workers(4).run(train_rearranging, rest)[0]["losses"] == whole[2:]
    (last,) = (tmp_path / "rest").glob("step-*")
    assert {Checkpoint(last).step(name) for name in names} == {4}


@pytest.mark.slow
def test_there_are_as_many_ranges_as_parameters_and_processes(workers, tmp_path):
    parameters = len(list(build_model(MODEL).parameters()))
    for stage, trained in ((0, train), (1, train), (3, train_rearranging)):
        place = tmp_path / str(stage)
        workers(4).run(trained, Case(stage=stage, save_to=str(place)))
        found = chunks_by_file(next(place.glob("step-*")))
        # Three fields; a range of a matrix is at most three boxes, and each process cuts one.
        most = 3 * (parameters + 4 * 3)
        assert len(found) == 4
        assert sum(map(len, found.values())) <= most, stage
    place = tmp_path / "parts"
    workers(4).run(train, Case(stage=3, save_to=str(place)))
    assert sum(map(len, chunks_by_file(next(place.glob("step-*"))).values())) > most


@pytest.mark.slow
def test_a_run_goes_on_from_rearranged_parts(workers, tmp_path):
    case = Case(stage=3)
    workers(4).run(train_rearranging, case.but(last_step=2, save_to=str(tmp_path)))
    (saved,) = tmp_path.glob("step-*")
    whole = workers(4).run(train, case)[0]["losses"]
    rest = case.but(resume=str(saved), first_step=2)
    assert workers(4).run(train, rest)[0]["losses"] == whole[2:]
    again = rest.but(save_to=str(tmp_path / "one"))
    workers(1).run(resave, again.but(stage=1))
    assert tensors(saved).keys() == tensors(next((tmp_path / "one").glob("step-*"))).keys()
