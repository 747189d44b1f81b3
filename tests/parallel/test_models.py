"""BERT, models of images and mixtures of whole networks: n processes compute what one computes, in
every layout and with every kind of feed-forward, and any layout loads what another wrote."""

import itertools

import pytest
import torch

from polyad.model.build import read_model_config
from tests.helpers.bert import scores_of_padded
from tests.helpers.breaks import breaks_of_a_step
from tests.helpers.everyday import everyday
from tests.helpers.gradients import rates_of_blocks
from tests.helpers.pairwise import pairwise
from tests.helpers.parity import assert_equal_state, assert_near_state, assert_same_course, near
from tests.helpers.training import Case, resave, tensors, train

pytestmark = pytest.mark.distributed

BERT = {
    "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 17,
    "vocab_size": 61,
}  # fmt: skip
IMAGES = {
    "image_size": 16, "patch_size": 4, "num_classes": 7, "num_layers": 2, "hidden_size": 24,
}  # fmt: skip
MIXER, VIT = IMAGES | {"kind": "mixer"}, IMAGES | {"kind": "vit", "num_heads": 4}
NETWORK = {"convolutions": [3, 4], "padding": 1, "hidden_sizes": [10, 6]}
MIXTURE = {
    "kind": "mixture", "image_size": 8, "num_classes": 7, "num_experts": 3, "expert": NETWORK,
    "gate_network": NETWORK,
}  # fmt: skip
BATCH_NORM = {"gate_norm": "batch"}
NORMED = NETWORK | {"batch_norm": [1]}
SPARSE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
SOME_SPARSE = SPARSE | {"placement": [1], "dense_hidden_size": 16}
SIMILAR = {"graph": "similarity"}
MUMOE = {"kind": "mumoe", "num_experts": [6], "rank": 8, "hidden_size": 24}


def mumoe(factorization, **more):
    section = {"factorization": factorization, "hidden_size": 20, "gate_input": "normalized"}
    return MUMOE | section | more


MODELS = {
    name: read_model_config(section)
    for name, section in {
        "bert": BERT,
        "bert mumoe": BERT | {"feed_forward": MUMOE | BATCH_NORM},
        "bert ring": BERT | {"feed_forward": MUMOE | {"factorization": "tr"}},
        "bert sparse": BERT | {"feed_forward": SOME_SPARSE},
        "bert sparse attention": BERT | {"feed_forward": SPARSE | {"graph": "attention"}},
        "bert classes": BERT | {"head": {"kind": "classification", "num_classes": 7}},
        "mixer": MIXER | {"token_feed_forward": {"kind": "dense", "hidden_size": 20}},
        "mixer cp": MIXER
        | {
            "token_feed_forward": mumoe("cp", **BATCH_NORM),
            "channel_feed_forward": mumoe("cp", **BATCH_NORM),
        },
        "mixer tr": MIXER
        | {
            "token_feed_forward": mumoe("tr", **BATCH_NORM),
            "channel_feed_forward": mumoe("tr", num_experts=[3, 2], level_std=0.1),
        },
        "mixer sparse": MIXER
        | {
            "token_feed_forward": SPARSE,
            "channel_feed_forward": SPARSE | SIMILAR | {"similarity": "cosine", "tau": 0.2},
        },
        "vit": VIT | {"pre_logits": 10},
        "vit sparse similarity": VIT | {"feed_forward": SOME_SPARSE | SIMILAR},
        "vit sparse attention": VIT
        | {"pool": "mean", "feed_forward": SPARSE | {"graph": "attention"}},
        "mixture": MIXTURE | {"top_k": 2},
        "mixture attentive with BatchNorm": MIXTURE
        | {"gate": "attentive", "expert": NORMED, "gate_network": NORMED},
    }.items()
}
# Model, processes, tensor-parallel ones, expert-parallel ones, stage.
EVERYDAY = [
    ("bert", 4, 2, 1, 1),
    ("bert sparse attention", 4, 2, 2, 1),
    ("mixer cp", 4, 2, 1, 1),
    ("mixer tr", 2, 1, 1, 3),
    ("mixer sparse", 4, 2, 2, 1),
    ("vit sparse attention", 4, 2, 2, 1),
    ("mixture", 2, 1, 1, 1),
    ("mixture attentive with BatchNorm", 2, 1, 1, 2),
]


def allowed(name, processes, tensor, expert, stage):
    """Whole experts alone are spread, over processes of other data; of mixtures no layer is cut."""
    if "mixture" in name:
        return tensor == expert == 1 and processes <= 2
    is_sparse = "sparse" in name
    is_spread = is_sparse and processes > tensor
    return tensor <= processes and expert <= (2 if is_spread else 1)


EVERY = itertools.product(MODELS, (1, 2, 4), (1, 2), (1, 2), (1, 2, 3))
CASES = pairwise((case for case in EVERY if allowed(*case)), EVERYDAY)


def case_of(name, ranks):
    """BatchNorm is over all micro-batches of a forward pass: each is a whole step, shared out."""
    return Case(
        optimizer="sgd", learning_rate=0.1, clip=0.5, model=MODELS[name], micro_batch=8 // ranks,
    )  # fmt: skip


@everyday(
    ("name", "processes", "tensor", "expert", "stage"),
    CASES,
    [case for case in EVERYDAY if case[0] not in ("bert", "mixture")],
    ids=lambda case: "-".join(map(str, case)),
)
def test_n_processes_are_one(workers, whole_runs, tmp_path, name, processes, tensor, expert, stage):
    expected, saved = whole_runs(case_of(name, 1))
    case = case_of(name, processes // tensor)
    case = case.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    assert_same_course(workers(processes).run(train, case)[0], expected)
    assert_near_state(tmp_path / "step-00000004", saved, rounding=True)


@pytest.mark.parametrize(
    "section",
    [
        SPARSE | {"capacity_factor": 1.0, "combine": "softmax"},
        {"kind": "emoe", "num_experts": 4, "top_k": 2, "capacity_factor": 1.0},
    ],
    ids=["smoe", "emoe"],
)
def test_a_capacity_drops_the_same_tokens_of_the_same_micro_batches(workers, whole_runs, section):
    model = read_model_config(VIT | {"feed_forward": section})
    case = Case(optimizer="sgd", learning_rate=0.1, clip=0.5, model=model)
    expected, _ = whole_runs(case)
    result = workers(4).run(train, case.but(stage=1, tensor=2, expert=2))[0]
    assert_same_course(result, expected)
    assert all(0 < record["routing/dropped"] < 1 for record in result["routing"][:1])


@everyday(
    ("name", "layout"),
    [
        ("bert", {"tensor": 2, "stage": 1}),
        ("bert sparse", {"tensor": 2, "expert": 2, "stage": 1}),
        ("mixer cp", {"tensor": 2, "stage": 1}),
        ("vit sparse attention", {"tensor": 2, "expert": 2, "stage": 1}),
        ("mixture attentive with BatchNorm", {"stage": 3}),
    ],
    keep=["bert", "mixer cp", "vit sparse attention", "mixture attentive with BatchNorm"],
    ids=lambda case: case[0],
)
def test_any_layout_loads_what_another_wrote(workers, whole_runs, tmp_path, name, layout):
    _, written = whole_runs(case_of(name, 1))
    case = case_of(name, 2).but(first_step=4, resume=str(written), save_to=str(tmp_path), **layout)
    workers(2 * case.tensor).run(resave, case)
    assert_equal_state(tmp_path / "step-00000004", written)


@pytest.mark.parametrize("name", ["mixer cp", "mixture attentive with BatchNorm"])
def test_all_running_statistics_move(whole_runs, name):
    """A Mixer has two gates for each block; of a mixture each network has a BatchNorm."""
    _, saved = whole_runs(case_of(name, 1))
    found = [value for key, value in tensors(saved).items() if "running_variance" in key[0]]
    assert len(found) == 4
    assert all(bool((value != 1).all()) for value in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert mumoe", "bert sparse", "mixer cp", "vit sparse similarity"])
def test_a_compiler_traces_it_whole(workers, name):
    case = case_of(name, 2).but(stage=1)
    assert workers(2).run(breaks_of_a_step, case) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", "bert ring", "bert sparse attention", "mixer tr", "vit sparse similarity"]
)
@pytest.mark.parametrize("change", [{"recompute": "block"}, {"compile": True}], ids=str)
def test_recomputation_and_compilation_change_nothing(workers, whole_runs, name, change):
    expected, _ = whole_runs(case_of(name, 1))
    case = case_of(name, 2).but(stage=1)
    changed = case.but(model=case.model.model_copy(update=change))
    assert near(workers(2).run(train, changed)[0]["losses"], expected["losses"], 1e-4)


def test_a_cut_vocabulary_knows_the_best_guess(workers):
    case = case_of("bert", 1)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rates_of_blocks_are_exact_whatever_the_precision_of_weights(workers, precision):
    section = read_model_config(VIT | {"num_layers": 4, "drop_path": 0.1})
    case = Case(stage=1, model=section, precision=precision)
    for found in workers(2).run(rates_of_blocks, case):
        dtypes, shares = zip(*found, strict=True)
        assert set(dtypes) == {"torch.float32"}
        assert shares == pytest.approx([1 - 0.1 * n / 3 for n in range(4)], abs=1e-7)
