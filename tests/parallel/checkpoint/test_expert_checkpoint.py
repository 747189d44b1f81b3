"""Checkpoints of experts: from any layout into any other, buffers among them."""

import itertools

import pytest
import torch

from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state
from tests.helpers.training import (
    Case,
    assert_equal_routing,
    global_batch,
    moe_model,
    resave,
    tensors,
    train,
)

pytestmark = pytest.mark.distributed

# (processes, tensor-parallel ones, expert-parallel ones, ZeRO stage)
SHAPES = [(1, 1, 1), (2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2), (2, 1, 1), (2, 2, 1)]
LAYOUTS = [(*shape, stage) for shape in SHAPES for stage in (1, 2)]
# State of every kind: a balancing bias, head entropies, a frozen score, a K that grows.
MODEL = moe_model(score="random", graph="attention", balancing_rate=0.01, final_top_k=4)
PAIRS = [
    ((*origin, a), (*target, b))
    for (origin, target), (a, b) in zip(
        itertools.product(SHAPES, SHAPES), itertools.cycle(itertools.product((1, 2), repeat=2))
    )
] + [
    ((4, 1, 2, 3), (4, 2, 2, 1)), ((4, 2, 2, 3), (2, 1, 1, 1)), ((2, 1, 2, 1), (4, 1, 4, 3)),
    ((4, 1, 2, 1), (4, 2, 2, 3)),
]  # fmt: skip


def name(layout):
    processes, tensor, expert, stage = layout
    return f"{processes} TP {tensor} EP {expert} ZeRO {stage}"


def on(layout, **others):
    _, tensor, expert, stage = layout
    return Case(model=MODEL, tensor=tensor, expert=expert, stage=stage, total_steps=12, **others)


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory):
    """A checkpoint of three AdamW steps, by layout."""
    made = {}

    def save(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp("saved")
            workers(layout[0]).run(train, on(layout, save_to=str(folder), last_step=3))
            made[layout] = folder / "step-00000003"
        return made[layout]

    return save


@everyday(
    ("origin", "target"),
    PAIRS,
    keep=[
        ((4, 2, 2, 2), (4, 1, 2, 1)),
    ],
    ids=lambda pair: f"{name(pair[0])} to {name(pair[1])}",
)
def test_a_layout_saves_again_what_another_wrote(workers, saved, tmp_path, origin, target):
    path = saved(origin)
    case = on(target, resume=str(path), first_step=3, save_to=str(tmp_path))
    workers(target[0]).run(resave, case)
    assert_equal_state(tmp_path / "step-00000003", path)


def test_a_checkpoint_holds_every_expert_once_and_all_state(saved):
    for layout in [(4, 1, 2, 1), (4, 2, 2, 1), (4, 1, 4, 2)]:
        checkpoint = Checkpoint(saved(layout))
        for fields in checkpoint.tensors.values():
            for field, about in fields.items():
                covered = torch.zeros(about.shape, dtype=torch.int8)
                for chunk in about.chunks:
                    box = zip(chunk.offset, chunk.size, strict=True)
                    covered[tuple(slice(a, a + n) for a, n in box)] += 1
                assert covered.eq(1).all(), (layout, field)
        prefix = "blocks.0.feed_forward."
        buffers = {n.removeprefix(prefix) for n, f in checkpoint.tensors.items() if "buffer" in f}
        assert {
            "router.score.weight",
            "router.graph.head_entropy",
            "router.selection.balancing_bias",
            "router.selection.num_selected",
        } <= buffers
        assert checkpoint.shapes()[prefix + "experts.up"] == (4, 36, 24)


RESUMED = [
    *((1, 1, 1, 1), (2, 1, 2, 1), (4, 1, 2, 2), (4, 2, 2, 1), (4, 1, 4, 1), (4, 1, 2, 3)),
    (4, 2, 2, 3),
]


@everyday(
    ("layout", "precision"),
    itertools.product(RESUMED, ("fp32", "bf16")),
    keep=[((2, 1, 2, 1), "fp32")],
    ids=lambda case: f"{name(case[0])}-{case[1]}",
)
@pytest.mark.slow
def test_twelve_steps_equal_six_and_six_in_new_processes(workers, tmp_path, layout, precision):
    case = on(layout, precision=precision, dropout=0.1, learning_rate=1e-3)
    pool = workers(layout[0])
    whole = pool.run(train, case.but(last_step=12, save_to=str(tmp_path / "whole")))[0]
    first = pool.run(train, case.but(last_step=6, save_to=str(tmp_path / "half")))[0]
    pool.stop()  # the next call starts new processes
    middle = str(tmp_path / "half" / "step-00000006")
    rest = case.but(first_step=6, last_step=12, resume=middle, save_to=str(tmp_path / "rest"))
    second = pool.run(train, rest)[0]
    assert first["losses"] + second["losses"] == whole["losses"]
    assert_equal_routing(first["routing"] + second["routing"], whole["routing"])
    expected = tensors(tmp_path / "whole" / "step-00000012")
    actual = tensors(tmp_path / "rest" / "step-00000012")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    entropy = expected["blocks.0.feed_forward.router.graph.head_entropy", "buffer"]
    assert entropy.dtype == torch.float32
    assert not torch.equal(entropy, entropy.bfloat16().float())


@everyday("target", LAYOUTS[::2], keep=[(4, 2, 2, 1)], ids=name)
def test_training_goes_on_alike_after_a_change_of_layout(workers, saved, tmp_path, target):
    path = saved((2, 1, 2, 1))
    results = []
    for layout in ((2, 1, 2, 1), target):
        folder = tmp_path / str(len(results))
        case = on(layout, resume=str(path), first_step=3, last_step=6, save_to=str(folder))
        losses = workers(layout[0]).run(train, case)[0]["losses"]
        results.append((losses, chosen(folder / "step-00000006")))
    (expected, routes), (actual, other_routes) = results
    assert torch.allclose(torch.tensor(actual), torch.tensor(expected), rtol=1e-3, atol=0)
    changed = (routes != other_routes).any(-1).float().mean().item()
    assert changed <= 0.02, f"{100 * changed:.1f}% of the tokens have other experts"


def chosen(folder):
    """The experts of every token of one batch, in every block."""
    model, ids = load_model(folder), []
    for block in model.blocks:
        block.feed_forward.router.selection.register_forward_hook(
            lambda module, args, output: ids.append(output.expert_ids_NK.sort(-1).values)
        )
    with torch.no_grad():
        model(global_batch(99, MODEL)[:, :-1])
    return torch.stack(ids)


def test_a_loaded_model_selects_as_many_as_training_did(saved, workers, tmp_path):
    # K grows from 2 to 4 over 12 steps: 2, 3, 4 for a third of them each.
    case = on((2, 1, 2, 1), save_to=str(tmp_path), last_step=9)
    workers(2).run(train, case)
    begun = load_model(saved((2, 1, 2, 1))).blocks[0].feed_forward.router
    assert begun.selection.top_k == 2
    model = load_model(tmp_path / "step-00000009")
    assert model.blocks[0].feed_forward.router.selection.top_k == 4
