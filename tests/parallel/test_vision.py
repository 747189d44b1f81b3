"""Models of images: n processes compute what one computes, in every layout and with every kind of
feed-forward, and any layout loads what another wrote."""

import itertools

import pytest
import torch

from polyad.model.build import read_model_config
from tests.helpers.breaks import breaks_of_a_step
from tests.helpers.everyday import everyday
from tests.helpers.gradients import rates_of_blocks
from tests.helpers.pairwise import pairwise
from tests.helpers.training import Case, resave, tensors, train

pytestmark = pytest.mark.distributed

IMAGES = {
    "image_size": 16, "patch_size": 4, "num_classes": 7, "num_layers": 2, "hidden_size": 24,
}  # fmt: skip
TOKENS = {"kind": "dense", "hidden_size": 20}
SPARSE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}


def mumoe(factorization, **more):
    return {
        "kind": "mumoe", "factorization": factorization, "num_experts": [6], "rank": 8,
        "hidden_size": 20, "gate_input": "normalized",
    } | more  # fmt: skip


def model(**section):
    return read_model_config(IMAGES | section)


BATCH_NORM = {"gate_norm": "batch"}
MODELS = {
    "mixer": model(kind="mixer", token_feed_forward=TOKENS),
    "mixer cp": model(
        kind="mixer",
        token_feed_forward=mumoe("cp", **BATCH_NORM),
        channel_feed_forward=mumoe("cp", **BATCH_NORM),
    ),
    "mixer tr": model(
        kind="mixer",
        token_feed_forward=mumoe("tr", **BATCH_NORM),
        channel_feed_forward=mumoe("tr", num_experts=[3, 2], level_std=0.1),
    ),
    "mixer sparse": model(
        kind="mixer",
        token_feed_forward=SPARSE,
        channel_feed_forward=SPARSE | {"graph": "similarity", "similarity": "cosine", "tau": 0.2},
    ),
    "vit": model(kind="vit", num_heads=4, pre_logits=10),
    "vit similarity": model(
        kind="vit", num_heads=4,
        feed_forward=SPARSE | {"graph": "similarity", "placement": [1], "dense_hidden_size": 16},
    ),
    "vit attention": model(
        kind="vit", num_heads=4, pool="mean", feed_forward=SPARSE | {"graph": "attention"},
    ),
}  # fmt: skip
# Model, processes, tensor-parallel ones, expert-parallel ones, stage.
EVERYDAY = [
    ("mixer cp", 4, 2, 1, 1),
    ("mixer tr", 2, 1, 1, 3),
    ("mixer sparse", 4, 2, 2, 1),
    ("vit attention", 4, 2, 2, 1),
]


def allowed(name, processes, tensor, expert, stage):
    """Whole experts alone are spread, over processes of other data, and not at stage 3."""
    is_sparse = "sparse" in name or name in ("vit similarity", "vit attention")
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
    # What adds the same to all channels of a patch is taken out by the next LayerNorm: in a Mixer
    # the gradient of such a bias, and the mean of a token gate's scores, are rounding around zero.
    far = {key: (ours[key] - theirs[key]).abs().max() for key in theirs}
    near = {key: 2e-5 * theirs[key].abs().max() + 1e-6 for key in theirs}
    assert [key for key in theirs if far[key] > near[key]] == []


@pytest.mark.parametrize("name", ["mixer cp", "vit attention"])
def test_any_layout_loads_what_another_wrote(workers, references, tmp_path, name):
    _, saved = references(name)
    written = saved / "step-00000004"
    case = case_of(name, 2).but(
        tensor=2, stage=1, first_step=4, resume=str(written), save_to=str(tmp_path)
    )
    case = case.but(expert=2 if name == "vit attention" else 1)
    workers(4).run(resave, case)
    ours, theirs = tensors(tmp_path / "step-00000004"), tensors(written)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_running_statistics_of_a_gate_move(workers, references):
    """Of every gate with a BatchNorm, in a Mixer two for each block."""
    _, saved = references("mixer cp")
    buffers = [key for key in tensors(saved / "step-00000004") if "running_variance" in key[0]]
    assert len(buffers) == 4
    values = tensors(saved / "step-00000004")
    assert all(bool((values[key] != 1).all()) for key in buffers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixer cp", "vit similarity"])
def test_a_compiler_traces_models_of_images_whole(workers, name):
    case = case_of(name, 2).but(stage=1)
    assert workers(2).run(breaks_of_a_step, case) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixer tr", "vit similarity"])
@pytest.mark.parametrize("change", [{"recompute": "block"}, {"compile": True}], ids=str)
def test_recomputation_and_compilation_change_nothing(workers, references, name, change):
    expected, _ = references(name)
    case = case_of(name, 2).but(stage=1)
    changed = case.but(model=case.model.model_copy(update=change))
    result = workers(2).run(train, changed)[0]
    torch.testing.assert_close(
        torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rates_of_blocks_are_exact_whatever_the_precision_of_weights(workers, precision):
    section = model(kind="vit", num_heads=4, num_layers=4, drop_path=0.1)
    case = Case(stage=1, model=section, precision=precision)
    for found in workers(2).run(rates_of_blocks, case):
        dtypes, shares = zip(*found, strict=True)
        assert set(dtypes) == {"torch.float32"}
        assert shares == pytest.approx([1 - 0.1 * n / 3 for n in range(4)], abs=1e-7)
