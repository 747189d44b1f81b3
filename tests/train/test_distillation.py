"""Mixtures of whole networks learn real digits, are distilled, and teach other models."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch.nn.functional import cross_entropy, kl_div

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.parallel.weights import load_model
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.tasks.distillation import distillation_loss
from tests.helpers import images as made
from tests.helpers.parity import assert_two_train_as_one
from tests.helpers.runs import (
    evaluation,
    frame_of,
    measured,
    records,
    refusal,
    run,
    run_and_listen,
    write_config,
)

pytestmark = pytest.mark.distributed

NETWORK = {"convolutions": [4], "batch_norm": [0], "hidden_sizes": [24, 16]}
ATTENTIVE = "model.gate=attentive"
FREEZE = "optimizer.groups=[{match: mixture.experts.*, freeze: true}]"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    made.class_folders(root / "colours", 8)
    model = {"kind": "mixture", "image_size": 8, "grey": True, "num_experts": 4}
    return write_config(
        root / "digits.yaml", "digits", model=model | {"expert": NETWORK, "gate_network": NETWORK},
        data__kind="images", data__held_out=0.2, data__normalization="half",
        data__evaluation_resize=1.0, data__augmentation={"crop_scale": None, "flip": False},
        train__steps=80, train__global_batch_size=64, train__micro_batch_size=64,
        optimizer__weight_decay=0.0, evaluation={}, checkpoint={}, log__trackers=[],
    )  # fmt: skip


@pytest.fixture(scope="module")
def attentive(workers, config):
    folder = config.parent / "attentive"
    assert workers(1).run(run, config, ATTENTIVE, f"run.folder={folder}") == [80]
    return folder


@pytest.fixture(scope="module")
def teacher(workers, config):
    folder = config.parent / "teacher"
    workers(1).run(run, config, ATTENTIVE, f"run.folder={folder}", "train.steps=8")
    return folder


@pytest.mark.slow
def test_the_gate_of_a_mixture_is_measured(workers, attentive):
    """Beside what it gives each expert, of one held-out image at a time."""
    ((found, _),) = workers(1).run(measured, attentive, "specialize")
    assert "polysemanticity" not in found  # whole networks are not left out
    (level,) = frame_of(found, "levels", module="mixture").to_dict("records")
    data = ImageData.open(ImageDataConfig(path="digits", held_out=0.2)).split("validation")
    model, shares = load_model(attentive), []
    for number in range(len(data)):
        x_CHW = (torch.from_numpy(data.decode(number)).permute(2, 0, 1) / 255 - 0.5) / 0.5
        with torch.inference_mode(), deciding(model, routed_layers(model)) as decisions:
            model(x_CHW[None])
        shares.append(decisions["mixture"].coefficients().squeeze(0).numpy())
    p_NM = np.stack(shares).astype(float)
    assert level["entropy_bits"] == pytest.approx(entropy(p_NM, base=2, axis=1).mean())
    used = entropy(p_NM.mean(0), base=2)
    assert level["usage_entropy_bits"] == pytest.approx(used, rel=1e-5)
    labels = np.array([int(data.labels[number]) for number in range(len(data))])
    joint_MY = np.stack([p_NM[labels == y].sum(0) for y in range(10)], axis=1) / len(data)
    of_both = [joint_MY.sum(0), joint_MY.sum(1)]
    information = sum(entropy(p, base=2) for p in of_both) - entropy(joint_MY.flatten(), base=2)
    (known,) = frame_of(found, "labels", module="mixture", by="class")["information_bits"]
    assert known == pytest.approx(information, rel=1e-4)


@pytest.mark.slow
def test_mixtures_learn_digits_and_a_plain_gate_an_even_load(workers, config, attentive):
    folder = config.parent / "plain"
    words = (f"run.folder={folder}", "model.top_k=2", "loss.importance=10.0")
    assert workers(1).run(run, config, *words) == [80]
    for each in (folder, attentive):
        assert workers(1).run(evaluation, each)[0]["top1"] > 0.8
    even, free = (records(each)[-1] for each in (folder, attentive))
    assert sum(free["routing/mixture/load"]) == pytest.approx(1, abs=1e-4)
    # Nothing evens out the attentive run.
    assert even["routing/importance_loss"] < 0.02 < 0.1 < free["routing/importance_loss"]


@pytest.mark.slow
def test_a_distilled_mixture_has_the_experts_and_learns_a_plain_gate(workers, config, attentive):
    folder, still = config.parent / "distilled", config.parent / "still"
    words = (f"checkpoint.init_from={attentive}", FREEZE)
    ((steps, said),) = workers(1).run(run_and_listen, config, *words, f"run.folder={folder}")
    assert steps == 80
    assert "; initialized from the seed: mixture.gate.scores.*" in said
    assert workers(1).run(evaluation, folder)[0]["top1"] > 0.75
    # The gate begins as the trained one: the first step of one that stands still.
    one = (f"run.folder={still}", "train.steps=1", "optimizer.learning_rate=1.0e-9")
    workers(1).run(run, config, *words, *one)
    theirs, ours, begun = (load_model(each).state_dict() for each in (attentive, folder, still))
    experts = [name for name in theirs if name.startswith("mixture.experts.")]
    assert any("running_mean" in name for name in experts)
    assert all(torch.equal(theirs[name], ours[name]) for name in experts)
    for name in (n for n in theirs.keys() & ours.keys() if n.startswith("mixture.gate.network.")):
        assert not torch.equal(theirs[name], ours[name])
        if "running" not in name:
            torch.testing.assert_close(begun[name], theirs[name], rtol=0, atol=1e-7)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(workers, config, teacher):
    """Frozen, so that both read running statistics; then against KL and the loss by torch."""
    folder = config.parent / "same"
    words = (
        ATTENTIVE, f"checkpoint.init_from={teacher}", f"distill.teacher={teacher}",
        "optimizer.groups=[{match: 'mixture.experts.*', freeze: true}, "
        "{match: 'mixture.gate.network.*', freeze: true}]", "train.steps=1", "distill.weight=1.0",
    )  # fmt: skip
    assert workers(1).run(run, config, *words, f"run.folder={folder}") == [1]
    assert abs(records(folder)[0]["loss"]) < 1e-6


@pytest.mark.slow
def test_a_mixture_teaches_another_kind_of_model(workers, config, attentive):
    """Two processes learn what one does."""
    vit = ("model={kind: vit, image_size: 8, patch_size: 2, num_layers: 1, hidden_size: 16, "
           "num_heads: 2}")  # fmt: skip
    words = (vit, f"distill.teacher={attentive}", "distill.weight=0.75", "distill.temperature=2.0",
             "train.steps=2", "optimizer={kind: sgd, learning_rate: 0.1}")  # fmt: skip
    of_two = ("train.micro_batch_size=32",)
    folder, _ = assert_two_train_as_one(workers, config, words, of_two)
    # The head of a ViT starts at zero: its first probabilities are even, its loss ln 10.
    assert 0 < (records(folder)[0]["loss"] - 0.25 * math.log(10)) / 0.75 < 4 * math.log(10)


def test_the_loss_is_the_divergence_that_torch_computes():
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator)
    for t in (1.0, 3.0):
        p, log_q = (teacher / t).softmax(-1), (student / t).log_softmax(-1)
        expected = kl_div(log_q, p, reduction="none").sum(-1) * t**2
        torch.testing.assert_close(distillation_loss(teacher, student, t), expected)
    # Cross-entropy less the entropy of a teacher that is sure is the loss of its class.
    sure = torch.eye(5, dtype=torch.float64)[[0, 3]] * 1e4
    expected = cross_entropy(student[:2], torch.tensor([0, 3]), reduction="none")
    torch.testing.assert_close(distillation_loss(sure, student[:2], 1.0), expected)


TEACHER = "distill.teacher={teacher}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.num_experts=1",), "model.num_experts: 1"),
        (("model.top_k=5",), "model.top_k: 5 is more than model.num_experts: 4"),
        ((TEACHER, "data.path={colours}"), "has 3 classes, the distill.teac"),
        (
            ("checkpoint.init_from={teacher}", ATTENTIVE, "data.path={colours}"),
            "a different model",
        ),
        ((TEACHER, "data.normalization=none"), "data.normalization: half"),
        ((TEACHER, "model.image_size=10"), "model.image_size: 8, not 10"),
        (("distill.teacher={colours}",), "distill.teacher: "),
        ((TEACHER, "data.loss=sigmoid"), "data.loss: sigmoid is not allowed with distill.teacher"),
        (("data.loss=sigmoid",), "data.loss: sigmoid"),
        (("parallel.tensor_parallel_size=2",), "model.kind: mixture is not allowed with parallel"),
    ],
)
def test_what_does_not_fit_is_refused(workers, config, teacher, words, message):
    places = {"teacher": teacher, "colours": config.parent / "colours"}
    processes = 2 if "tensor" in words[0] else 1
    words = [word.format(**places) for word in words]
    folder = f"run.folder={config.parent / 'refused'}"
    assert message in refusal(workers(processes), config, *words, folder)
