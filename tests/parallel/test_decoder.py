"""Decoders on layouts compute what one process computes, and go on exactly."""

import pytest
import torch

from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.small_decoders import DECODERS, small_decoder
from tests.helpers.training import Case, assert_equal_routing, relative, tensors, train

pytestmark = pytest.mark.distributed

# (processes, tensor-parallel, expert-parallel, ZeRO stage, sequence parallelism)
DENSE_LAYOUTS = [(2, 2, 1, 1, False), (4, 4, 1, 1, False), (4, 2, 1, 1, True), (2, 1, 1, 3, False)]
ROUTED_LAYOUTS = [
    (2, 2, 1, 1, False), (2, 1, 2, 1, False), (4, 2, 2, 2, False), (4, 2, 2, 1, True),
    (4, 1, 2, 3, False), (2, 2, 1, 3, True),
]  # fmt: skip
ROUTED = {
    name
    for name, settings in DECODERS.items()
    if settings.get("feed_forward", {}).get("kind") in ("smoe", "emoe")
}
CASES = [
    (name, layout)
    for name in DECODERS
    for layout in (ROUTED_LAYOUTS if name in ROUTED else DENSE_LAYOUTS)
]
EVERYDAY = [
    ("grouped", DENSE_LAYOUTS[0]),
    ("norm over heads", ROUTED_LAYOUTS[2]),
    ("latent", ROUTED_LAYOUTS[3]),
    ("sinks", ROUTED_LAYOUTS[2]),
    ("graph", ROUTED_LAYOUTS[3]),
    ("factorized", DENSE_LAYOUTS[2]),
]


def label(case):
    name, (_, tensor, expert, stage, sequence) = case
    return f"{name} TP {tensor} EP {expert} ZeRO {stage}{' SP' if sequence else ''}"


@pytest.fixture(scope="module")
def references(workers, tmp_path_factory):
    made = {}

    def reference(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("reference")
            case = a_case(name)
            made[name] = workers(1).run(train, case.but(save_to=str(folder)))[0], folder
        return made[name]

    return reference


def a_case(name):
    model = small_decoder(name)
    losses = LossConfig()
    if name in ROUTED:
        over = "model" if name == "sinks" else "layer"
        sequence = 0.01 if name == "latent" else 0.0
        losses = LossConfig(
            load_balance=0.01, load_balance_over=over, sequence_balance=sequence, router_z=0.001
        )
    return Case(optimizer="sgd", learning_rate=0.1, clip=0.1, model=model, losses=losses)


@everyday(("name", "layout"), CASES, EVERYDAY, ids=label)
def test_sgd_gives_equal_losses_norms_and_weights(workers, references, tmp_path, name, layout):
    expected, folder = references(name)
    assert all(norm > 0.1 for norm in expected["norms"])  # so that the clip is active
    processes, tensor, expert, stage, sequence = layout
    case = a_case(name).but(
        stage=stage, tensor=tensor, expert=expert, sequence=sequence, save_to=str(tmp_path)
    )
    results = workers(processes).run(train, case)
    assert all(result == results[0] for result in results)
    for key in ("losses", "norms"):
        ours, wanted = (torch.tensor(each[key]) for each in (results[0], expected))
        assert torch.allclose(ours, wanted, rtol=1e-5, atol=0), key
    ours, weights = (tensors(each / "step-00000004") for each in (tmp_path, folder))
    assert ours.keys() == weights.keys()
    for key, value in weights.items():
        assert relative(ours[key], value) < 1e-5, key


# As OLMoE, DeepSeek-V3 and gpt-oss are; what only training has changes from step to step, too.
PUBLISHED = ("norm over heads", "latent", "sinks")
RESUMED = [
    (2, 1, 2, 1, False), (4, 1, 4, 1, False), (4, 2, 2, 2, False), (4, 2, 2, 1, True),
    (4, 1, 2, 3, False),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), enumerate(PUBLISHED), ids=PUBLISHED)
@pytest.mark.parametrize("layout", RESUMED, ids=str)
def test_a_run_in_two_pieces_is_bitwise_the_run_in_one(workers, tmp_path, number, name, layout):
    precision = ("fp32", "bf16")[(number + RESUMED.index(layout)) % 2]
    processes, tensor, expert, stage, sequence = layout
    case = a_case(name).but(
        optimizer="adamw", learning_rate=1e-3, precision=precision, dropout=0.1,
        stage=stage, tensor=tensor, expert=expert, sequence=sequence,
    )  # fmt: skip
    pool = workers(processes)
    whole = pool.run(train, case.but(last_step=7, save_to=str(tmp_path / "whole")))[0]
    first = pool.run(train, case.but(last_step=4, save_to=str(tmp_path / "half")))[0]
    pool.stop()  # the next call starts new processes
    middle = str(tmp_path / "half" / "step-00000004")
    rest = case.but(first_step=4, last_step=7, resume=middle, save_to=str(tmp_path / "rest"))
    second = pool.run(train, rest)[0]
    for key in ("losses", "norms"):
        assert first[key] + second[key] == whole[key], key
    assert_equal_routing(first["routing"] + second["routing"], whole["routing"])
    wanted, found = (tensors(tmp_path / each / "step-00000007") for each in ("whole", "rest"))
    assert found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []
    if name == "latent":
        layer = "blocks.1.feed_forward"
        loads = torch.tensor([step[f"routing/{layer}/load"] for step in whole["routing"]])
        moved = 0.001 * (0.25 - loads).sign().sum(0)
        bias = wanted[f"{layer}.router.selection.balancing_bias", "buffer"]
        assert torch.allclose(bias, moved, atol=1e-6)
