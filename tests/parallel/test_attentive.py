"""Keys of the attentive score over processes: the means of hidden layers are those of one process.

Shapes: B batch, T tokens in a sequence, D width, E experts.
"""

import itertools

import pytest
import torch

from polyad.model.feedforward import BlockInput
from polyad.model.padding import RealTokens
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel import comm
from polyad.train.loop.losses import LossConfig
from polyad.train.loop.statistics import StepStatistics, update_routers
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course
from tests.helpers.routing import make, make_config
from tests.helpers.training import Case, moe_model, tensors, train

pytestmark = pytest.mark.distributed

KEYS = {"score": "attentive", "expert_keys": "hidden_means"}
SGD = Case(
    optimizer="sgd", learning_rate=0.1, clip=0.5, last_step=3,
    losses=LossConfig(load_balance=0.1, router_z=0.01),
)  # fmt: skip
MODELS = {"hidden_means": KEYS, "learned": {"score": "attentive", "graph": "similarity"}}
# Processes, tensor-parallel ones, expert-parallel ones, ZeRO stage.
LAYOUTS = [
    *((2, 1, 1, stage) for stage in range(4)),
    *((2, 2, 1, stage) for stage in range(4)),
    *((2, 1, 2, stage) for stage in range(4)),
    (4, 2, 2, 1),
]


def case_of(name):
    return SGD.but(model=moe_model(**MODELS[name]))


@everyday(
    ("name", "layout"),
    itertools.product(MODELS, LAYOUTS),
    keep=[
        ("hidden_means", (2, 1, 2, 1)),
        ("learned", (4, 2, 2, 1)),
    ],
)
def test_any_layout_trains_as_one_process(workers, whole_runs, tmp_path, name, layout):
    case = case_of(name)
    expected, folder = whole_runs(case)
    size, tensor, expert, stage = layout
    case = case.but(tensor=tensor, expert=expert, stage=stage, save_to=str(tmp_path))
    results = workers(size).run(train, case)
    assert all(result == results[0] for result in results)
    assert_same_course(results[0], expected)
    buffers = [key for key in tensors(folder) if key[0].endswith("mean_input")]
    assert len(buffers) == (2 if name == "hidden_means" else 0)
    assert_near_state(tmp_path / "step-00000003", folder)


def test_a_run_goes_on_from_its_buffer_on_another_layout(workers, whole_runs, tmp_path):
    case = case_of("hidden_means")
    _, folder = whole_runs(case)
    whole, later = tmp_path / "whole", tmp_path / "later"
    expected = workers(1).run(train, case.but(last_step=5, save_to=str(whole)))[0]
    case = case.but(first_step=3, last_step=5, resume=str(folder), save_to=str(later))
    result = workers(2).run(train, case.but(expert=2, stage=1))[0]
    assert result["losses"] == pytest.approx(expected["losses"][3:], rel=1e-5)
    assert_near_state(later / "step-00000005", whole / "step-00000005")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "tensor", "expert"),
    [({"recompute": "block"}, 2, 2), ({"compile": True}, 2, 1), ({"compile": True}, 1, 2)],
    ids=str,
)
def test_recomputation_and_compilation_change_nothing(workers, whole_runs, change, tensor, expert):
    case = case_of("hidden_means")
    expected, _ = whole_runs(case)
    model = case.model.model_copy(update=change)
    changed = case.but(model=model, stage=1, tensor=tensor, expert=expert)
    result = workers(tensor * expert).run(train, changed)[0]
    assert_same_course(result, expected)


def mean_inputs(batches):
    """The buffer after a step, from the micro-batches of each rank: tokens, and which are real."""
    comm.initialize()
    layer = make(SparseMoE, make_config(**KEYS))
    step = StepStatistics(torch.device("cpu"))
    chosen = []
    for u_BTD, lengths in batches[comm.rank()]:
        mask_BT = torch.arange(u_BTD.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        real = RealTokens.of(mask_BT)
        selected, stats = layer.router(u_BTD, BlockInput(real=real), layer.expert_features())
        chosen.append((u_BTD[mask_BT], selected.expert_ids_NK))
        step.add(torch.zeros(()), (stats,))
    before_ED = layer.router.score.mean_input.clone()
    update_routers(layer, step.exchange().routing, 0.0)
    return before_ED, layer.router.score.mean_input, chosen


def test_every_token_of_a_step_counts_once_however_it_is_padded_and_cut(workers):
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(2, 5, 12, dtype=torch.float64, generator=generator), lengths)
        for lengths in ([5, 2], [1, 3], [4, 4], [2, 1])
    ]
    (before_ED, after_ED, chosen), *_ = workers(1).run(mean_inputs, [batches])
    expected_ED = before_ED.double()
    for expert in range(6):
        own = [u_ND[(ids_NK == expert).any(1)] for u_ND, ids_NK in chosen]
        tokens_ND = torch.cat(own)
        if len(tokens_ND):
            expected_ED[expert] = 0.99 * expected_ED[expert] + 0.01 * tokens_ND.mean(0)
    torch.testing.assert_close(after_ED.double(), expected_ED, atol=1e-6, rtol=1e-6)
    for _, cut_ED, _ in workers(2).run(mean_inputs, [batches[:2], batches[2:]]):
        torch.testing.assert_close(cut_ED, after_ED, atol=1e-7, rtol=1e-6)
