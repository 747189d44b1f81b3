"""Feed-forwards that learn from those in whose place they are (`distill.blocks`): the loss by hand,
what is trained and what stays, layouts, resuming, and what is refused."""

import shutil

import pytest
import torch

from polyad.data.text.samples import TrainingData
from polyad.model.build import build_model, place
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import DenseFeedForward
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.describe import describe_run
from polyad.train.tasks.distillation import BlockTeacher, feed_forward_losses
from polyad.train.verify_layout import small_config
from tests.helpers.everyday import everyday
from tests.helpers.runs import records, refusal, run, run_and_listen, weights_of, write_config

pytestmark = pytest.mark.distributed

KINDS = {
    "dense": {"kind": "dense", "hidden_size": 48},
    "mumoe": {"kind": "mumoe", "num_experts": [4], "rank": 8},
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16},
}
SGD = ("optimizer.kind=sgd", "optimizer.learning_rate=0.5", "train.steps=3")


def replaced(kind, blocks=(1,)):
    return {"blocks": list(blocks), "feed_forward": KINDS[kind]}


@pytest.fixture(scope="module")
def teacher(workers, tmp_path_factory, prepared_path):
    """A run of three blocks, with dropout that would show in a teacher that was training."""
    folder = tmp_path_factory.mktemp("teacher")
    config = write_config(
        folder / "config.yaml", prepared_path, train__steps=20, model__num_layers=3,
        model__dropout=0.3, evaluation__every=0, checkpoint__every=0, log__trackers=[],
    )  # fmt: skip
    assert workers(1).run(run, config) == [20]
    return folder / "run"


def student(folder, data, teacher, kind="dense", blocks=(1,), **changes):
    folder.mkdir(exist_ok=True)
    given = {"model__num_layers": 3, "model__replaced": replaced(kind, blocks)}
    given |= {"distill__teacher": str(teacher), "distill__blocks": "normalized"}
    given |= {"evaluation__every": 0, "checkpoint__every": 0, "log__trackers": []}
    return write_config(folder / "config.yaml", data, **given | changes)


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
def test_the_loss_of_a_run_is_that_by_hand(workers, tmp_path, prepared_path, teacher, kind, loss):
    """Of two blocks, from the true activations: block 2 does not see what block 1 gives."""
    config = student(tmp_path, prepared_path, teacher, kind, (2, 1), distill__blocks=loss)
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
    workers, tmp_path, prepared_path, teacher
):
    config = student(tmp_path, prepared_path, teacher, "smoe", train__steps=40)
    ((_, said),) = workers(1).run(run_and_listen, config)
    found = records(tmp_path / "run")
    assert found[-1]["loss"] < 0.3 * found[0]["loss"]
    assert found[-1]["routing/nmse"] < 0.5
    ours, theirs = (
        weights_of(next(p.glob("checkpoints/step-*"))) for p in (tmp_path / "run", teacher)
    )
    for name, weight in ours.items():
        if not name.startswith("blocks.1.feed_forward."):
            assert torch.equal(weight, theirs[name]), name
    trained = sum(w.numel() for n, w in ours.items() if n.startswith("blocks.1.feed_forward."))
    assert f"trains {trained:,} parameters" in said
    assert found[-1]["validation_loss"] > 1  # nats per token, of the spliced model


def test_a_copy_has_nothing_to_learn():
    config = GPT2Config.model_validate(
        {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 8, "vocab_size": 20,
         "replaced": {"blocks": [0], "feed_forward": {"kind": "dense"}}}
    ).filled()  # fmt: skip
    model, other = (build_model(each) for each in (config, config.original()))
    for each in (model, other):
        values = ((n, torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
                  for n, p in each.named_parameters())  # fmt: skip
        place(each, values)
    original = other.get_submodule("blocks.0.feed_forward").eval()
    assert isinstance(original, DenseFeedForward)
    ids_BT = torch.arange(8)[None]
    spliced = model.eval()(ids_BT).logits
    teacher = BlockTeacher({0: original}, "normalized")
    teacher.teach(model.train())
    loss, (stats,) = teacher.losses(model, ids_BT)
    assert loss.item() == 0
    assert stats.name == "blocks.0.feed_forward"
    assert not model.blocks[1].training
    torch.testing.assert_close(model.eval()(ids_BT).logits, spliced)


LAYOUTS = [
    ("dense", 2, ("parallel.zero_stage=3",)),
    ("smoe", 2, ("parallel.expert_parallel_size=2", "parallel.zero_stage=2")),
    ("mumoe", 2, ("parallel.tensor_parallel_size=2", "parallel.zero_stage=1")),
    ("smoe", 2, ("parallel.tensor_parallel_size=2", "parallel.zero_stage=1")),
    ("mumoe", 2, ("parallel.zero_stage=3",)),
]


@everyday(("kind", "processes", "layout"), LAYOUTS, keep=[LAYOUTS[3]])
def test_processes_learn_what_one_learns(
    workers, tmp_path, prepared_path, teacher, kind, processes, layout
):
    config = student(tmp_path, prepared_path, teacher, kind, (0, 2), evaluation__every=2)
    folders = [tmp_path / f"on-{number}" for number in (1, processes)]
    for number, folder in zip((1, processes), folders, strict=True):
        words = (f"run.folder={folder}", *SGD, *(layout if number > 1 else ()))
        assert workers(number).run(run, config, *words) == [3] * number
    for key in ("loss", "grad_norm", "routing/nmse"):
        one, two = ([each[key] for each in records(folder)] for folder in folders)
        assert two == pytest.approx(one, rel=2e-5), key
    one, two = (weights_of(folder / "checkpoints" / "step-00000003") for folder in folders)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)


@everyday(("precision", "compiled"), [("bf16", False), ("fp32", True)], keep=[("bf16", False)])
def test_it_is_finite_in_bf16_and_the_same_compiled(
    workers, tmp_path, prepared_path, teacher, precision, compiled
):
    config = student(tmp_path, prepared_path, teacher, "smoe", (0, 2), train__precision=precision)
    plain = (f"run.folder={tmp_path / 'plain'}", *SGD)
    assert workers(1).run(run, config, *plain) == [3]
    losses = [each["loss"] for each in records(tmp_path / "plain")]
    assert all(torch.tensor(losses).isfinite())
    if compiled:
        assert workers(1).run(run, config, *SGD, "model.compile=true") == [3]
        again = [each["loss"] for each in records(tmp_path / "run")]
        assert again == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_an_uninterrupted_one_though_its_teacher_went_on(
    workers, tmp_path, prepared_path, teacher
):
    shutil.copytree(teacher, tmp_path / "teacher")
    config = student(tmp_path, prepared_path, tmp_path / "teacher", "mumoe", checkpoint__every=2)
    whole = (f"run.folder={tmp_path / 'whole'}", "train.steps=4")
    assert workers(1).run(run, config, *whole) == [4]
    assert workers(1).run(run, config, "train.steps=2") == [2]
    longer = (f"run.folder={tmp_path / 'teacher'}", "train.steps=21")
    assert workers(1).run(run, tmp_path / "teacher" / "config.yaml", *longer) == [21]
    assert workers(1).run(run, config, "train.steps=4") == [4]
    one, two = (records(tmp_path / name) for name in ("whole", "run"))
    assert [each["loss"] for each in two] == [each["loss"] for each in one]
    one, two = (
        weights_of(tmp_path / name / "checkpoints" / "step-00000004") for name in ("whole", "run")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    shutil.rmtree(tmp_path / "teacher" / "checkpoints" / "step-00000020")
    said = refusal(workers(1), config, "train.steps=5")
    assert "step-00000020, from which this run started, no longer" in said


def test_a_small_layout_of_it_can_be_tried(tmp_path, prepared_path, teacher):
    config = load_config(student(tmp_path, prepared_path, teacher, "smoe", (0, 2)))
    small = small_config(config, 2)
    assert small.model.replaced.blocks == [1]
    assert small.distill.blocks is None


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_what_cannot_be_is_refused_in_one_line(
    workers, tmp_path, prepared_path, teacher, changes, said
):
    config = student(tmp_path, prepared_path, teacher)
    assert said in refusal(workers(1), config, changes)


def test_a_plan_counts_the_feed_forwards_that_teach(tmp_path, prepared_path, teacher):
    config = student(tmp_path, prepared_path, teacher)
    memory = describe_run(config, (), 1)["memory_bytes_per_process"]
    assert memory["teacher"] == 4 * (2 * 32 * 128 + 128 + 32)
