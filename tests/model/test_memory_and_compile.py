"""Recomputation and compilation change memory and speed, and nothing else."""

import pytest
import torch
from torch import _dynamo
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.model.build import build_model, compile_model, materialize, read_model_config
from polyad.model.mumoe.factorizations import FACTORIZATIONS
from polyad.model.output import AUXILIARY_LOSSES, ask_for_statistics
from tests.helpers.everyday import everyday
from tests.helpers.routed_models import assert_compiles
from tests.helpers.routing import scatter
from tests.helpers.small_decoders import small_decoder


def step(model, ids):
    """Runs one forward and backward pass; returns the logits and all gradients."""
    torch.manual_seed(11)  # dropout
    logits = model(ids).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(step_a, step_b, tolerance):
    torch.testing.assert_close(step_a[0], step_b[0], atol=tolerance, rtol=tolerance)
    assert step_a[1].keys() == step_b[1].keys()
    for name, gradient in step_a[1].items():
        torch.testing.assert_close(gradient, step_b[1][name], atol=tolerance, rtol=tolerance)


def saved_bytes(model, ids):
    """Bytes that the forward pass keeps for the backward pass, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )  # held: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids)
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputation_changes_no_gradient(small_model, random_ids, dropout):
    ids = random_ids(2, 16)
    plain = step(small_model(dropout=dropout), ids)
    recomputed = step(small_model(dropout=dropout, recompute="block"), ids)
    assert_same_step(plain, recomputed, tolerance=0)


def test_recomputation_keeps_much_less_for_the_backward_pass(small_model, random_ids):
    ids = random_ids(4, 16)
    overrides = {"num_layers": 8}
    plain = saved_bytes(small_model(**overrides), ids)
    recomputed = saved_bytes(small_model(**overrides, recompute="block"), ids)
    # The hooks do not see the blocks' inputs, which the checkpoints hold: B T D fp32 each.
    recomputed += 8 * 4 * 16 * 32 * 4
    # Of that size a block keeps about 17 (before and after each norm: 4; q, k, v: 3; the attended,
    # by head and merged: 2; before and after the activation, four times as wide: 8), and one when
    # recomputed; embeddings and head dilute that.
    assert recomputed < plain / 5


def test_recomputation_runs_without_gradients(small_model, random_ids):
    ids = random_ids(2, 16)
    with torch.no_grad():
        expected = small_model()(ids).logits
        assert torch.equal(small_model(recompute="block")(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "recompute", "placed_anywhere"),
    [
        *(("dense", *way) for way in (("none", False), ("none", True), ("block", False))),
        *((name, "none", False) for name in ("cp", "tr", "tt", "tucker", "smoe")),
    ],
)
def test_compiled_blocks_compute_the_same_from_one_program(
    small_model, random_ids, section, recompute, placed_anywhere
):
    feed_forward, tolerance = {"kind": section}, 1e-5
    if section in FACTORIZATIONS:
        feed_forward = {"kind": "mumoe", "factorization": section, "num_experts": [8, 2]}
        tolerance = 1e-4
    plain, other = (
        # Away from the start, where a norm would magnify what rounding leaves of equal scores.
        scatter(small_model(feed_forward=feed_forward, recompute=each), 0.1)
        for each in ("none", recompute)
    )
    ids = random_ids(2, 16)
    assert_compiles(plain, other, ids, tolerance, placed_anywhere=placed_anywhere)


@pytest.mark.slow
def test_no_kind_of_block_runs_uncompiled_after_many_programs(random_ids):
    """Two kinds of attention; steps with a record and without, evaluation, a smaller last batch."""
    config = small_decoder("sinks")
    model = build_model(config)
    materialize(model, seed=0)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    compile_model(model, backend="eager")
    ids = random_ids(4, config.sequence_length) % config.vocab_size
    for record_is_due in (True, False):
        ask_for_statistics(model, losses=frozenset(), samples=False, record_is_due=record_is_due)
        model(ids, target_ids_BT=ids).logits.sum().backward()
    model.eval()
    with torch.no_grad():
        for size in (4, 3, 1):
            model(ids[:size], target_ids_BT=ids[:size])
    assert not _dynamo.utils.counters["unimplemented"]


FEED_FORWARDS = {
    "dense": {"kind": "dense"},
    "cp": {"kind": "mumoe", "num_experts": [6], "rank": 8},
    "levels": {"kind": "mumoe", "num_experts": [4, 3], "rank": 4},
    "ring": {"kind": "mumoe", "factorization": "tr", "num_experts": [4, 3], "rank": 4},
    "sparse": {"kind": "smoe", "num_experts": 4},
    "similarity": {"kind": "smoe", "num_experts": 4, "graph": "similarity"},
    "attention": {"kind": "smoe", "num_experts": 4, "graph": "attention"},
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3},
    "transcoder": {"kind": "transcoder", "num_experts": 15, "top_k": 3},
    "groups": {"kind": "emoe", "num_experts": 4, "top_k": 2},
    "noisy": {"kind": "smoe", "num_experts": 4, "router_noise": 1.0},
}


@everyday("dtype", [torch.float32, torch.bfloat16], keep=[torch.float32], ids=str)
@everyday("name", FEED_FORWARDS, keep=["sparse"])
@pytest.mark.slow
def test_a_compiler_traces_model_and_loss_whole(small_model, random_ids, name, dtype):
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    model = small_model(feed_forward=FEED_FORWARDS[name], dropout=0.1).to(dtype)
    compile_model(model, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        ids = random_ids(2, 16)
        model(ids, target_ids_BT=ids.roll(-1, 1)).logits.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not _dynamo.utils.counters["graph_break"]
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 3


class Reinterpreted(TorchDispatchMode):
    """Finds tensors whose bits are read as other numbers."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.view.dtype:
            self.found.append((args[0].dtype, args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_step_has_nothing_that_no_compiler_for_a_gpu_takes(
    small_model, random_ids, name, monkeypatch
):
    """Triton has no cast of a bool's bits, and compilers before PyTorch 2.13 end a graph where
    something asks whether a device has autocast."""

    def asked(device_type):
        raise AssertionError(f"is_autocast_available({device_type!r})")

    monkeypatch.setattr(torch.amp, "is_autocast_available", asked)
    model, ids = small_model(feed_forward=FEED_FORWARDS[name], dropout=0.1), random_ids(2, 16)
    with Reinterpreted() as bits:
        model(ids, target_ids_BT=ids.roll(-1, 1)).logits.backward()
    assert not bits.found


def images_step(model, backend="aot_eager"):
    """A training step; returns how many programs it took."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    compile_model(model, backend=backend)
    for _ in range(2):
        logits = model.train()(torch.randn(3, 3, 8, 8)).logits
        cross_entropy(logits, torch.arange(3)).backward()
    assert not _dynamo.utils.counters["graph_break"]
    return _dynamo.utils.counters["stats"]["unique_graphs"]


VIT = {"kind": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_heads": 2,
       "num_layers": 12, "num_classes": 3, "dropout": 0.1}  # fmt: skip
MIXER = {"kind": "mixer", "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 12,
         "num_classes": 3}  # fmt: skip
ROUTED = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 8, "expert_dropout": 0.1}


@everyday("drop_path", [0.0, 0.5], keep=[0.5])
@everyday(
    "section",
    [VIT, MIXER, VIT | {"feed_forward": ROUTED}],
    keep=["mixer", "v-moe"],
    ids=["vit", "mixer", "v-moe"],
)
@pytest.mark.slow
def test_blocks_that_drop_at_other_rates_share_a_program(section, drop_path):
    model = build_model(read_model_config(section | {"drop_path": drop_path}))
    materialize(model, seed=0)
    # What is before the twelve blocks, one for all of them, and what is after them.
    assert images_step(model) == 3
    if drop_path:
        rates = [1 - float(block.drop_path.keep) for block in model.blocks]
        assert rates == pytest.approx([drop_path * n / 11 for n in range(12)], abs=1e-6)
        assert not any("keep" in name for name in model.state_dict())


SMALL_VIT = VIT | {"num_layers": 2}
NETWORK = {"convolutions": [1], "hidden_sizes": [5, 8]}
WITH_STATISTICS = {
    "capacity": SMALL_VIT | {"feed_forward": ROUTED | {"capacity_factor": 1.05}},
    "samples": SMALL_VIT | {"feed_forward": ROUTED},
    "muMoE head": SMALL_VIT | {"head": {"kind": "mumoe", "num_experts": [4], "rank": 2}},
    "mixture": {"kind": "mixture", "image_size": 8, "num_classes": 3, "expert": NETWORK,
                "gate_network": NETWORK},
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_STATISTICS)
@pytest.mark.slow
def test_statistics_that_are_changed_come_out_of_a_graph(name):
    model = build_model(read_model_config(WITH_STATISTICS[name]))
    materialize(model, seed=0)
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=name == "samples")
    assert images_step(model, backend="eager") <= 3


GROWING = {
    "linear": {},
    "noisy": {"router_noise": 1.0},
    "attention": {"graph": "attention"},
}


@everyday("name", GROWING, keep=[])
def test_a_k_that_grows_takes_two_programs(small_config, random_ids, name):
    section = {"kind": "smoe", "num_experts": 16, "top_k": 1, "final_top_k": 16,
               "expert_hidden_size": 8}  # fmt: skip
    config = small_config(feed_forward=section | GROWING[name])
    models = build_model(config), build_model(config)
    for model in models:
        materialize(model, seed=0)
    _dynamo.reset()
    _dynamo.utils.counters.clear()
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
    assert not _dynamo.utils.counters["graph_break"]
    # As in any model three; a second one of the blocks.
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
def test_compiled_recomputation_drops_the_same_units_twice(small_model, random_ids):
    ids = random_ids(2, 16)
    _dynamo.reset()
    steps = []
    for recompute in ("none", "block"):
        model = small_model(dropout=0.2, recompute=recompute)
        compile_model(model)
        steps.append(step(model, ids))
    assert_same_step(*steps, tolerance=1e-5)
