"""Recomputation and compilation change memory and speed, and nothing else. That recomputation
changes no gradient is part of `test_contract.py`."""

import pytest
import torch
from torch import _dynamo
from torch.nn.functional import cross_entropy

from polyad.model.build import compile_model, read_model_config
from polyad.model.output import AUXILIARY_LOSSES, ask_for_statistics
from tests.helpers.allocated import Observed, saved_bytes
from tests.helpers.everyday import everyday
from tests.helpers.random_model import built
from tests.helpers.small_decoders import small_decoder
from tests.model.test_contract import CASES, ROUTERS, VIT, dropping, made, step_of


@pytest.fixture(autouse=True)
def counters():
    """What the compiler counts, from zero."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    return _dynamo.utils.counters


def assert_same_step(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_recomputation_keeps_much_less_for_the_backward_pass(small_model, random_ids):
    ids, kept = random_ids(4, 16), []
    for recompute in ("none", "block"):
        model = small_model(num_layers=8, recompute=recompute)
        kept.append(saved_bytes(lambda model=model: model(ids), model.parameters()))
    # The hooks do not see the blocks' inputs, which the checkpoints hold: B T D fp32 each.
    kept[1] += 8 * 4 * 16 * 32 * 4
    # Of that size a block keeps about 17 (before and after each norm: 4; q, k, v: 3; the attended,
    # by head and merged: 2; before and after the activation, four times as wide: 8), and one when
    # recomputed; embeddings and head dilute that.
    assert kept[1] < kept[0] / 5


OTHERS = [
    *(name for name in CASES if name.startswith("gpt2")),
    *(name for name in CASES if "entmax15, residual" in name),
    *ROUTERS,
    *("decoder, sinks", "decoder, latent", "mixture", "a factorized head", "V-MoE"),
]


@everyday(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OTHERS), ("linear, attention", torch.bfloat16)],
    keep=[("gpt2 smoe", torch.float32)],
    ids=str,
)
def test_a_compiler_traces_model_and_loss_whole(name, dtype, counters):
    config = read_model_config(CASES[name])
    compiled, plain = made(config, dtype), made(config, dtype)
    compile_model(compiled, backend="aot_eager")
    for model in (compiled, plain):
        ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=True)
    for _ in range(2):
        ours, theirs = (step_of(model, config) for model in (compiled, plain))
        if name != "V-MoE":  # whose dropout is drawn elsewhere
            assert_same_step(ours, theirs, 2e-5 if dtype == torch.float32 else 0.1)
    assert not counters["graph_break"]
    # What is before the blocks, one for all blocks of a kind, and what is after them.
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute", "placed_anywhere"),
    [
        *(("gpt2 dense", *way) for way in (("none", False), ("none", True), ("block", False))),
        *((name, "none", False) for name in CASES if "entmax15, residual, 3" in name),
        *((name, "none", False) for name in ("gpt2 smoe", "cosine, none", "linear, similarity")),
        ("a head's own values", "block", False),
    ],
)
def test_compiled_blocks_compute_the_same_from_one_program(
    name, recompute, placed_anywhere, counters
):
    config = read_model_config(CASES[name])
    compiled = made(config.model_copy(update={"recompute": recompute}))
    names = list(compiled.state_dict())
    compile_model(compiled, placed_anywhere=placed_anywhere)
    assert_same_step(step_of(compiled, config), step_of(made(config), config), 1e-4)
    assert list(compiled.state_dict()) == names
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.slow
def test_compiled_recomputation_drops_the_same_units_twice():
    config, steps = dropping(CASES["gpt2 dense"]), []
    for recompute in ("none", "block"):
        model = made(config.model_copy(update={"recompute": recompute}))
        compile_model(model)
        steps.append(step_of(model, config))
    assert_same_step(*steps, tolerance=1e-5)


@pytest.mark.slow
def test_no_kind_of_block_runs_uncompiled_after_many_programs(random_ids, counters):
    """Two kinds of attention; steps with a record and without, evaluation, a smaller last batch."""
    config = small_decoder("sinks")
    model = built(config)
    compile_model(model, backend="eager")
    ids = random_ids(4, config.sequence_length) % config.vocab_size
    for record_is_due in (True, False):
        ask_for_statistics(model, losses=frozenset(), samples=False, record_is_due=record_is_due)
        model(ids, target_ids_BT=ids).logits.sum().backward()
    model.eval()
    with torch.no_grad():
        for size in (4, 3, 1):
            model(ids[:size], target_ids_BT=ids[:size])
    assert not counters["unimplemented"]


@pytest.mark.slow
def test_steps_without_a_record_take_a_second_program_and_no_more(counters):
    config = read_model_config(CASES["linear, similarity"])
    model, steps = made(config), []
    compile_model(model, backend="eager")
    for is_due in (False, True, False, False, True):
        model.zero_grad()
        asked = frozenset({"balance_loss"})
        ask_for_statistics(model, losses=asked, samples=False, record_is_due=is_due)
        ids = torch.arange(16).view(1, 16)
        loss, routing = model(ids, target_ids_BT=ids.roll(-1, 1))
        (loss + sum(0.01 * each.losses["balance_loss"] for each in routing)).backward()
        steps.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss})
        assert all((each.measures.get("entropy") is not None) == is_due for each in routing)
        assert all((each.losses.get("z_loss") is not None) == is_due for each in routing)
    for other in steps[1:]:
        assert_same_step(other, steps[0], tolerance=1e-6)
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_k_that_grows_takes_two_programs(small_model, random_ids, counters):
    section = {
        "kind": "smoe", "num_experts": 16, "top_k": 1, "final_top_k": 16, "expert_hidden_size": 8,
        "router_noise": 1.0,
    }  # fmt: skip
    models = [small_model(feed_forward=section) for _ in range(2)]
    compile_model(models[0], backend="aot_eager")
    ids = random_ids(2, 16)
    for step in range(16):
        losses = []
        for model in models:
            torch.manual_seed(step)  # noise
            losses.append(model(ids, target_ids_BT=ids.roll(-1, 1)).logits)
            losses[-1].backward()
            for block in model.blocks:
                block.feed_forward.router.selection.update(torch.ones(16), (step + 1) / 16)
        assert losses[0] == losses[1]
    assert models[0].blocks[2].feed_forward.router.selection.top_k == 16
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 4


def test_blocks_that_drop_at_other_rates_share_a_program(counters):
    model = built(VIT | {"num_layers": 6, "drop_path": 0.5})
    compile_model(model, backend="aot_eager")
    for _ in range(2):
        cross_entropy(model(torch.randn(3, 3, 8, 8)).logits, torch.arange(3)).backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3
    rates = [1 - float(block.drop_path.keep) for block in model.blocks]
    assert rates == pytest.approx([0.5 * n / 5 for n in range(6)], abs=1e-6)
    assert not any("keep" in name for name in model.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_nothing_that_no_compiler_for_a_gpu_takes(name, monkeypatch):
    """Triton has no cast of a bool's bits, and compilers before PyTorch 2.13 end a graph where
    something asks whether a device has autocast."""

    def asked(device_type):
        raise AssertionError(f"is_autocast_available({device_type!r})")

    monkeypatch.setattr(torch.amp, "is_autocast_available", asked)
    config = dropping(CASES[name])
    found = set()
    with Observed(lambda func, *_: found.add(func)):
        step_of(made(config), config)
    assert torch.ops.aten.view.dtype not in found
