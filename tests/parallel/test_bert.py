"""BERT: n processes compute what one computes, in every layout and with every kind of feed-forward,
and any layout loads what another wrote."""

import itertools

import pytest
import torch

from polyad.model.build import read_model_config
from tests.helpers.bert import scores_of_padded
from tests.helpers.breaks import breaks_of_a_step
from tests.helpers.everyday import everyday
from tests.helpers.pairwise import pairwise
from tests.helpers.training import Case, resave, tensors, train

pytestmark = pytest.mark.distributed

SIZES = {
    "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 17,
    "vocab_size": 61,
}  # fmt: skip
SPARSE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
MUMOE = {"kind": "mumoe", "num_experts": [6], "rank": 8, "hidden_size": 24}


def model(**section):
    return read_model_config(SIZES | section)


MODELS = {
    "dense": model(),
    "mumoe": model(feed_forward=MUMOE | {"gate_norm": "batch"}),
    "ring": model(feed_forward=MUMOE | {"factorization": "tr"}),
    "sparse": model(feed_forward=SPARSE | {"placement": [1], "dense_hidden_size": 16}),
    "sparse attention": model(feed_forward=SPARSE | {"graph": "attention"}),
    "classes": model(head={"kind": "classification", "num_classes": 7}),
}
# Model, processes, tensor-parallel ones, expert-parallel ones, stage.
EVERYDAY = [
    ("dense", 4, 2, 1, 1),
    ("sparse attention", 4, 2, 2, 1),
]


def allowed(name, processes, tensor, expert, stage):
    """Whole experts alone are spread, over processes of other data, and not at stage 3."""
    is_sparse = "sparse" in name
    is_spread = is_sparse and processes > tensor
    return tensor <= processes and expert <= (2 if is_spread else 1) and stage < 4 - is_sparse


EVERY = itertools.product(MODELS, (1, 2, 4), (1, 2), (1, 2), range(4))
CASES = pairwise((case for case in EVERY if allowed(*case)), EVERYDAY)


def case_of(name, ranks):
    """BatchNorm is over all micro-batches of a forward pass: each is a whole step, shared out."""
    return Case(
        optimizer="sgd", learning_rate=0.1, clip=0.5, model=MODELS[name], micro_batch=8 // ranks,
    )  # fmt: skip


@pytest.fixture(scope="module")
def references(workers, tmp_path_factory):
    made = {}

    def reference(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("reference")
            made[name] = workers(1).run(train, case_of(name, 1).but(save_to=str(folder)))[0], folder
        return made[name]

    return reference


@everyday(
    ("name", "processes", "tensor", "expert", "stage"),
    CASES,
    EVERYDAY,
    ids=lambda case: "-".join(map(str, case)),
)
def test_n_processes_are_one(workers, references, tmp_path, name, processes, tensor, expert, stage):
    expected, saved = references(name)
    case = case_of(name, processes // tensor)
    case = case.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(processes).run(train, case)
    for measure in ("losses", "norms"):
        ours, theirs = (torch.tensor(each[measure]) for each in (results[0], expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours, theirs = (tensors(folder / "step-00000004") for folder in (tmp_path, saved))
    assert ours.keys() == theirs.keys()
    far = {key: (ours[key] - theirs[key]).abs().max() for key in theirs}
    near = {key: 2e-5 * theirs[key].abs().max() + 1e-6 for key in theirs}
    assert [key for key in theirs if far[key] > near[key]] == []


@everyday("name", ["dense", "sparse"], keep=["dense"])
def test_any_layout_loads_what_another_wrote(workers, references, tmp_path, name):
    _, saved = references(name)
    written = saved / "step-00000004"
    case = case_of(name, 2).but(
        tensor=2, stage=1, first_step=4, resume=str(written), save_to=str(tmp_path)
    )
    case = case.but(expert=2 if name == "sparse" else 1)
    workers(4).run(resave, case)
    ours, theirs = tensors(tmp_path / "step-00000004"), tensors(written)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mumoe", "sparse"])
def test_a_compiler_traces_it_whole(workers, name):
    case = case_of(name, 2).but(stage=1)
    assert workers(2).run(breaks_of_a_step, case) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "ring", "sparse attention"])
@pytest.mark.parametrize("change", [{"recompute": "block"}, {"compile": True}], ids=str)
def test_recomputation_and_compilation_change_nothing(workers, references, name, change):
    expected, _ = references(name)
    case = case_of(name, 2).but(stage=1)
    changed = case.but(model=case.model.model_copy(update=change))
    result = workers(2).run(train, changed)[0]
    torch.testing.assert_close(
        torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-4, atol=0
    )


def test_a_cut_vocabulary_knows_the_best_guess(workers):
    case = case_of("dense", 1)
    asked = [[3, 60], [5, 6], [7, 8]]
    whole = workers(1).run(scores_of_padded, case, asked)[0]
    for targets in (asked, whole["best"]):
        expected = workers(1).run(scores_of_padded, case, targets)[0]
        for found in workers(2).run(scores_of_padded, case.but(tensor=2), targets):
            torch.testing.assert_close(
                torch.tensor(found["losses"]), torch.tensor(expected["losses"])
            )
            assert found["right"] == expected["right"]
    assert expected["right"] == [[1.0, 1.0]] * 3  # the last targets were the best guesses
