"""Feed-forwards that learn from those in whose place they are (`distill.blocks`): the loss by hand,
what is trained and what stays, layouts, resuming, and what is refused."""

import shutil

import pytest
import torch

from polyad.data.text.samples import TrainingData
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.describe import describe_run
from polyad.train.tasks.distillation import feed_forward_losses
from polyad.train.verify_layout import small_config
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state, assert_two_train_as_one
from tests.helpers.runs import QUIET, records, refusal, run, run_and_listen, write_config

pytestmark = pytest.mark.distributed

SGD = ("optimizer.kind=sgd", "optimizer.learning_rate=0.5", "train.steps=3")


@pytest.fixture(scope="module")
def teacher(run_of):
    """A run of three blocks, with dropout that would show in a teacher that was training."""
    return run_of(train__steps=20, model__num_layers=3, model__dropout=0.3, **QUIET)


KINDS = {
    "dense": {"kind": "dense", "hidden_size": 48},
    "mumoe": {"kind": "mumoe", "num_experts": [4], "rank": 8},
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16},
}


@pytest.fixture
def student(tmp_path, prepared_path, teacher):
    """Writes the configuration of a run some of whose blocks learn."""

    def write(kind="dense", blocks=(1,), **changes):
        replaced = {"blocks": list(blocks), "feed_forward": KINDS[kind]}
        given = QUIET | {"model__num_layers": 3, "model__replaced": replaced}
        given |= {"distill__teacher": str(teacher), "distill__blocks": "normalized"}
        return write_config(tmp_path / "config.yaml", prepared_path, **given | changes)

    return write


def test_losses_by_hand():
    """y = (3, 4), ŷ = (3, 3): 1 / 5 over two units, and 1 of 25."""
    y, ours = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 3.0]]], requires_grad=True)
    found = feed_forward_losses(ours, y, "normalized")
    assert found["distill_loss"].item() == pytest.approx(0.1)
    assert (found["distill_error"] / found["distill_square"]).item() == pytest.approx(0.04)
    (gradient,) = torch.autograd.grad(found["distill_loss"], ours)
    torch.testing.assert_close(gradient, torch.tensor([[[0.0, -0.2]]]))  # 2 (3 - 4) / 5 / 2
    assert feed_forward_losses(ours, y, "squared")["distill_loss"].item() == pytest.approx(0.5)
    silent = feed_forward_losses(ours, torch.zeros_like(y), "normalized")["distill_loss"]
    assert silent.item() == pytest.approx(9.0)  # (9 + 9) / 2 units


def in_the_teacher(run_folder, teacher, block):
    """What enters a block's feed-forward in the first global batch, and what it gives there."""
    config = load_config(run_folder / "config.yaml")
    samples = TrainingData.open(config.data).samples(32, config.seed)
    ids_BT = torch.stack([samples[number] for number in range(8)])[:, :-1]
    model, found = load_model(teacher), []
    layer = model.get_submodule(f"blocks.{block}.feed_forward")
    layer.register_forward_hook(lambda _, given, out: found.append((*given, out[0])))
    with torch.inference_mode():
        model(ids_BT)
    return found[0]


@everyday(("kind", "loss"), [("dense", "normalized"), ("smoe", "squared"), ("mumoe", "normalized")],
          keep=[("dense", "normalized")])  # fmt: skip
def test_the_loss_of_a_run_is_that_by_hand(workers, tmp_path, student, teacher, kind, loss):
    """Of two blocks, from the true activations: block 2 does not see what block 1 gives."""
    config = student(kind, (2, 1), distill__blocks=loss)
    still = ("optimizer.learning_rate=1.0e-12", "train.steps=1")
    ((_, said),) = workers(1).run(run_and_listen, config, *still)
    assert "initialized from the seed: blocks.1.feed_forward.*, blocks.2.feed_forward.*" in said
    record, ours = records(tmp_path / "run")[0], load_model(tmp_path / "run")
    expected = 0.0
    for block in (1, 2):
        normalized, residual, given, y_BTD = in_the_teacher(tmp_path / "run", teacher, block)
        with torch.inference_mode():
            found, _ = ours.get_submodule(f"blocks.{block}.feed_forward")(
                normalized, residual, given
            )
        error_BT = (found - y_BTD).double().square().mean(-1)
        norm_BT = y_BTD.double().norm(dim=-1) if loss == "normalized" else 1.0
        own = (error_BT / norm_BT).mean().item()
        nmse = ((found - y_BTD).square().sum() / y_BTD.square().sum()).item()
        layer = f"routing/blocks.{block}.feed_forward"
        assert record[f"{layer}/distill_loss"] == pytest.approx(own, rel=1e-4)
        assert record[f"{layer}/nmse"] == pytest.approx(nmse, rel=1e-4)
        expected += own
    assert record["loss"] == pytest.approx(expected, rel=1e-4)
    assert f"nmse {record['routing/nmse']:.4f}" in said


@pytest.mark.slow
def test_only_the_replaced_feed_forward_is_trained_and_it_comes_near(
    workers, tmp_path, student, teacher
):
    config = student("smoe", train__steps=40)
    ((_, said),) = workers(1).run(run_and_listen, config)
    first, *_, last = records(tmp_path / "run")
    assert last["loss"] < 0.3 * first["loss"]
    assert last["routing/nmse"] < 0.5
    ours, theirs = (
        dict(load_model(path).named_parameters()) for path in (tmp_path / "run", teacher)
    )
    own = {name for name in ours if name.startswith("blocks.1.feed_forward.")}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() - own)
    assert f"trains {sum(ours[name].numel() for name in own):,} parameters" in said
    assert last["validation_loss"] > 1  # nats per token, of the spliced model


LAYOUTS = [
    ("dense", ("parallel.zero_stage=3",)),
    ("smoe", ("parallel.expert_parallel_size=2", "parallel.zero_stage=2")),
    ("mumoe", ("parallel.tensor_parallel_size=2", "parallel.zero_stage=1")),
    ("smoe", ("parallel.tensor_parallel_size=2", "parallel.zero_stage=1")),
    ("mumoe", ("parallel.zero_stage=3",)),
]


@everyday(("kind", "layout"), LAYOUTS, keep=[LAYOUTS[3]])
def test_processes_learn_what_one_learns(workers, student, kind, layout):
    config = student(kind, (0, 2), evaluation__every=2)
    keys = ("loss", "grad_norm", "routing/nmse")
    assert_two_train_as_one(workers, config, SGD, layout, keys, rel=2e-5)


@everyday(("precision", "compiled"), [("bf16", "false"), ("fp32", "true")], [("bf16", "false")])
def test_it_is_finite_in_bf16_and_the_same_compiled(workers, student, precision, compiled):
    config = student("smoe", (0, 2), train__precision=precision)
    losses = []
    for value in ("false", compiled):
        words = (f"run.folder={config.parent / value}", f"model.compile={value}", *SGD)
        assert workers(1).run(run, config, *words) == [3]
        losses.append([each["loss"] for each in records(config.parent / value)])
    assert all(torch.tensor(losses[0]).isfinite())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_an_uninterrupted_one_though_its_teacher_went_on(
    workers, tmp_path, student, teacher
):
    place = tmp_path / "teacher"
    shutil.copytree(teacher, place)
    config = student("mumoe", checkpoint__every=2, distill__teacher=str(place))
    workers(1).run(run, config, f"run.folder={tmp_path / 'whole'}", "train.steps=4")
    workers(1).run(run, config, "train.steps=2")
    longer = (f"run.folder={place}", "train.steps=21")
    assert workers(1).run(run, place / "config.yaml", *longer) == [21]
    assert workers(1).run(run, config, "train.steps=4") == [4]
    folders = [tmp_path / name for name in ("whole", "run")]
    one, two = ([each["loss"] for each in records(folder)] for folder in folders)
    assert one == two
    assert_equal_state(*(folder / "checkpoints" / "step-00000004" for folder in folders))
    shutil.rmtree(place / "checkpoints" / "step-00000020")
    said = refusal(workers(1), config, "train.steps=5")
    assert "step-00000020, from which this run started, no longer" in said


def test_a_small_layout_of_it_can_be_tried(student):
    config = load_config(student("smoe", (0, 2)))
    small = small_config(config, 2)
    assert small.model.replaced.blocks == [1]
    assert small.distill.blocks is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("distill.teacher=null", "distill.teacher: null is not allowed with distill.blocks"),
        ("model.replaced=null", "model.replaced: null is not allowed with distill.blocks"),
        ("model.recompute=block", "model.recompute: block is not allowed"),
        ("checkpoint.init_from=runs/x", "checkpoint.init_from: runs/x is not allowed"),
        ("adapt.lora={rank: 2, alpha: 2.0}", "adapt.lora: "),
        ("train.cuda_graph=true", "train.cuda_graph: true is not allowed"),
        ("model.num_heads=2", "has model.num_heads: 4, not 2"),
        ("model.layer_norm_epsilon=1.0e-3", "has model.layer_norm_epsilon: 1e-05, not 0.001"),
        ("model.num_layers=2", "distill.teacher: "),
    ],
)
def test_what_cannot_be_is_refused(workers, student, change, said):
    assert said in refusal(workers(1), student(), change)


def test_a_plan_counts_the_feed_forwards_that_teach(student):
    config = student()
    memory = describe_run(config, (), 1)["memory_bytes_per_process"]
    assert memory["teacher"] == 4 * (2 * 32 * 128 + 128 + 32)
