"""Mixtures of whole networks: n processes compute what one computes at every ZeRO stage, and any
layout loads what another wrote."""

import itertools

import pytest
import torch

from polyad.model.build import read_model_config
from tests.helpers.everyday import everyday
from tests.helpers.training import Case, resave, tensors, train

pytestmark = pytest.mark.distributed

NETWORK = {"convolutions": [3, 4], "padding": 1, "hidden_sizes": [10, 6]}
SECTION = {
    "kind": "mixture", "image_size": 8, "num_classes": 7, "num_experts": 3, "expert": NETWORK,
    "gate_network": NETWORK,
}  # fmt: skip
VIT = {"kind": "vit", "patch_size": 4, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
NORM = NETWORK | {"batch_norm": [1]}
MODELS = {
    "softmax": read_model_config(SECTION | {"top_k": 2}),
    "attentive with BatchNorm": read_model_config(
        SECTION | {"gate": "attentive", "expert": NORM, "gate_network": NORM}
    ),
    "attentive, of transformers": read_model_config(SECTION | {"gate": "attentive", "expert": VIT}),
}


def case_of(name, ranks, stage):
    """BatchNorm is over the images of a forward pass: each is a whole step, shared out."""
    return Case(
        optimizer="sgd", learning_rate=0.1, clip=0.5, model=MODELS[name], micro_batch=8 // ranks,
        stage=stage,
    )  # fmt: skip


@pytest.fixture(scope="module")
def references(workers, tmp_path_factory):
    made = {}

    def reference(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("reference")
            case = case_of(name, 1, 0).but(save_to=str(folder))
            made[name] = workers(1).run(train, case)[0], folder
        return made[name]

    return reference


@everyday(
    ("name", "ranks", "stage"),
    itertools.product(MODELS, (1, 2), range(4)),
    keep=[
        ("softmax", 2, 1),
        ("attentive with BatchNorm", 2, 2),
        ("attentive, of transformers", 2, 1),
    ],
)
def test_n_processes_are_one(workers, references, tmp_path, name, ranks, stage):
    expected, saved = references(name)
    case = case_of(name, ranks, stage).but(save_to=str(tmp_path))
    result = workers(ranks).run(train, case)[0]
    for measure in ("losses", "norms"):
        ours, theirs = (torch.tensor(each[measure]) for each in (result, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours, theirs = (tensors(folder / "step-00000004") for folder in (tmp_path, saved))
    assert ours.keys() == theirs.keys()
    far = {key: (ours[key] - theirs[key]).abs().max() for key in theirs}
    near = {key: 2e-5 * theirs[key].abs().max() + 1e-6 for key in theirs}
    assert [key for key in theirs if far[key] > near[key]] == []
    moved = [key for key in theirs if "running_variance" in key[0] and (theirs[key] != 1).all()]
    assert len(moved) == (4 if "BatchNorm" in name else 0)


def test_any_layout_loads_what_another_wrote(workers, references, tmp_path):
    _, saved = references("attentive with BatchNorm")
    written = saved / "step-00000004"
    case = case_of("attentive with BatchNorm", 2, 3)
    case = case.but(first_step=4, resume=str(written), save_to=str(tmp_path))
    workers(2).run(resave, case)
    ours, theirs = tensors(tmp_path / "step-00000004"), tensors(written)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
