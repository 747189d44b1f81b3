"""Mixtures of whole networks learn real digits, are distilled, and teach other models."""

import math

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import entropy
from torch.nn.functional import cross_entropy, kl_div

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.parallel.weights import load_model
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.tasks.distillation import distillation_loss
from tests.helpers import images as made
from tests.helpers.runs import (
    compare,
    evaluation,
    frame_of,
    records,
    refusal,
    run,
    run_and_listen,
    specialization,
    weights_of,
)

pytestmark = pytest.mark.distributed

NETWORK = {"convolutions": [4], "batch_norm": [0], "hidden_sizes": [24, 16]}
TREE = {
    "seed": 3,
    "model": {
        "kind": "mixture", "image_size": 8, "grey": True, "num_experts": 4, "expert": NETWORK,
        "gate_network": NETWORK,
    },
    "data": {
        "kind": "images", "normalization": "half", "evaluation_resize": 1.0,
        "augmentation": {"crop_scale": None, "flip": False},
    },
    "train": {"steps": 80, "global_batch_size": 64, "micro_batch_size": 64, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "weight_decay": 0.0},
    "schedule": {"kind": "constant"},
    "log": {"trackers": []},
}  # fmt: skip
ATTENTIVE = "model.gate=attentive"
FREEZE = "optimizer.groups=[{match: mixture.experts.*, freeze: true}]"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    tree = TREE | {"run": {"folder": str(root / "run")}}
    tree["data"] = tree["data"] | {"path": "digits", "held_out": 0.2}
    path = root / "digits.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def attentive(workers, config):
    folder = config.parent / "attentive"
    assert workers(1).run(run, config, ATTENTIVE, f"run.folder={folder}") == [80]
    return folder


@pytest.mark.slow
def test_a_mixture_with_an_attentive_gate_learns_digits(workers, attentive):
    assert workers(1).run(evaluation, attentive)[0]["top1"] > 0.8
    last = records(attentive)[-1]
    assert last["routing/mixture/load_max"] >= 1
    assert sum(last["routing/mixture/load"]) == pytest.approx(1, abs=1e-4)
    assert "routing/mixture/norm_mean" not in last


def shares_of_held_out(config, path):
    """What the gate of a checkpoint gives each expert [N, M], of one held-out image at a time."""
    data = ImageData.open(ImageDataConfig(path="digits", held_out=0.2)).split("validation")
    model, shares = load_model(path), []
    with torch.inference_mode():
        for number in range(len(data)):
            pixels_HWC = torch.from_numpy(data.decode(number))
            x_BCHW = (pixels_HWC.permute(2, 0, 1).unsqueeze(0) / 255 - 0.5) / 0.5
            with deciding(model, routed_layers(model)) as decisions:
                model(x_BCHW)
            shares.append(decisions["mixture"].coefficients().squeeze(0).numpy())
    return np.stack(shares).astype(float)


@pytest.mark.slow
def test_the_gate_of_a_mixture_is_measured(workers, config, attentive):
    (found,) = workers(1).run(specialization, attentive)
    assert "polysemanticity" not in found  # whole networks are not left out
    (level,) = frame_of(found, "levels", module="mixture").to_dict("records")
    data = ImageData.open(ImageDataConfig(path="digits", held_out=0.2)).split("validation")
    labels = [int(data.labels[number]) for number in range(len(data))]
    p_NM = shares_of_held_out(config, attentive)
    assert level["entropy_bits"] == pytest.approx(entropy(p_NM, base=2, axis=1).mean())
    mean_M = p_NM.mean(0)
    assert level["usage_entropy_bits"] == pytest.approx(entropy(mean_M, base=2), rel=1e-5)
    joint_MY = np.stack([p_NM[np.array(labels) == y].sum(0) for y in range(10)], axis=1)
    joint_MY /= joint_MY.sum()
    information = entropy(joint_MY.sum(0), base=2) + entropy(joint_MY.sum(1), base=2)
    information -= entropy(joint_MY.flatten(), base=2)
    (known,) = frame_of(found, "labels", module="mixture", by="class")["information_bits"]
    assert known == pytest.approx(information, rel=1e-4)


@pytest.mark.slow
def test_a_mixture_with_a_plain_gate_learns_digits_and_an_even_load(workers, config, attentive):
    folder = config.parent / "plain"
    words = (f"run.folder={folder}", "model.top_k=2", "loss.importance=10.0")
    assert workers(1).run(run, config, *words) == [80]
    assert workers(1).run(evaluation, folder)[0]["top1"] > 0.8
    even, free = (records(each)[-1]["routing/importance_loss"] for each in (folder, attentive))
    assert even < 0.02 < 0.1 < free  # nothing evens out the other run


@pytest.mark.slow
def test_images_that_change_experts_between_checkpoints_are_counted(workers, config):
    folder = config.parent / "two-checkpoints"
    words = ("model.top_k=2", "train.steps=20", "checkpoint.every=10", "log.fluctuation=true")
    assert workers(1).run(run, config, *words, f"run.folder={folder}") == [20]
    pair = [folder / "checkpoints" / f"step-000000{step}" for step in (20, 10)]
    (found,) = workers(1).run(compare, *pair)
    shares = [shares_of_held_out(config, path) for path in pair]
    first, chosen = [p_NM.argmax(1) for p_NM in shares], [p_NM > 0 for p_NM in shares]
    assert {tuple(row) for row in chosen[0].sum(1, keepdims=True)} == {(2,)}
    (layer,) = frame_of(found, "layers", module="mixture").to_dict("records")
    assert found["probe_images"] == len(first[0]) == 359
    assert layer["top1"] == pytest.approx((first[0] != first[1]).mean())
    assert layer["set"] == pytest.approx((chosen[0] != chosen[1]).any(1).mean())
    assert layer["entropy"] == pytest.approx(entropy(shares[0], axis=1).mean(), rel=1e-5)
    assert 0 < layer["top1"] < layer["set"] < 1
    last = records(folder)[-1]
    assert last["fluctuation/mixture/top1"] == pytest.approx(layer["top1"])
    assert last["fluctuation/set"] == pytest.approx(layer["set"])


@pytest.mark.slow
def test_a_run_goes_on_bitwise(workers, config, attentive):
    half = f"run.folder={config.parent / 'half'}"
    assert workers(1).run(run, config, ATTENTIVE, half, "train.steps=40") == [40]
    assert workers(1).run(run, config, ATTENTIVE, half) == [80]
    whole, pieces = (
        weights_of(config.parent / name / "checkpoints/step-00000080")
        for name in ("attentive", "half")
    )
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.slow
def test_a_distilled_mixture_has_the_experts_and_learns_a_plain_gate(workers, config, attentive):
    folder = config.parent / "distilled"
    words = (f"run.folder={folder}", f"checkpoint.init_from={attentive}", FREEZE)
    ((steps, said),) = workers(1).run(run_and_listen, config, *words)
    assert steps == 80
    assert "; initialized from the seed: mixture.gate.scores.*" in said
    theirs, ours = load_model(attentive).state_dict(), load_model(folder).state_dict()
    experts = [name for name in theirs if name.startswith("mixture.experts.")]
    assert any("running_mean" in name for name in experts)
    assert all(torch.equal(theirs[name], ours[name]) for name in experts)
    gate = [n for n in theirs.keys() & ours.keys() if n.startswith("mixture.gate.network.")]
    assert not any(torch.equal(theirs[name], ours[name]) for name in gate)
    assert workers(1).run(evaluation, folder)[0]["top1"] > 0.75
    # The gate begins as the trained one: the first step of one that stands still.
    still = config.parent / "still"
    words = (*words[1:], f"run.folder={still}", "train.steps=1", "optimizer.learning_rate=1.0e-9")
    workers(1).run(run, config, *words)
    begun = load_model(still).state_dict()
    for name in gate:
        if "running" not in name:
            torch.testing.assert_close(begun[name], theirs[name], rtol=0, atol=1e-7)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(workers, config, attentive):
    """Frozen, so that both read running statistics; then against KL and the loss by torch."""
    folder = config.parent / "same"
    words = (
        ATTENTIVE, f"checkpoint.init_from={attentive}", f"distill.teacher={attentive}",
        "optimizer.groups=[{match: 'mixture.experts.*', freeze: true}, "
        "{match: 'mixture.gate.network.*', freeze: true}]", "train.steps=1", "distill.weight=1.0",
    )  # fmt: skip
    assert workers(1).run(run, config, *words, f"run.folder={folder}") == [1]
    assert abs(records(folder)[0]["loss"]) < 1e-6


@pytest.mark.slow
def test_a_mixture_teaches_another_kind_of_model(workers, config, attentive):
    folder = config.parent / "student"
    vit = (
        "model={kind: vit, image_size: 8, patch_size: 2, num_layers: 1, hidden_size: 16, "
        "num_heads: 2}"
    )
    words = (vit, f"distill.teacher={attentive}", "distill.weight=0.75", "distill.temperature=2.0")
    one = (f"run.folder={folder}", "train.steps=1")
    assert workers(1).run(run, config, *words, *one) == [1]
    # The head of a ViT starts at zero: its first probabilities are even, its loss ln 10.
    task_loss = math.log(10)
    teacher = records(folder)[0]["loss"]
    kl = (teacher - 0.25 * task_loss) / 0.75
    assert 0 < kl < 4 * math.log(10)
    # Two processes learn what one does.
    folders = [config.parent / f"on-{n}" for n in (1, 2)]
    more = ("train.steps=2", "optimizer.kind=sgd", "optimizer.learning_rate=0.1")
    for number, place in zip((1, 2), folders, strict=True):
        micro = f"train.micro_batch_size={64 // number}"
        workers(number).run(run, config, *words, *more, micro, f"run.folder={place}")
    losses = [[record["loss"] for record in records(place)] for place in folders]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] == pytest.approx(teacher, rel=1e-5)
    ours, theirs = (weights_of(place / "checkpoints/step-00000002") for place in folders)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_divergence_that_torch_computes():
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator)
    for temperature in (1.0, 3.0):
        expected = kl_div(
            (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1),
            reduction="none",
        ).sum(-1) * temperature**2  # fmt: skip
        torch.testing.assert_close(distillation_loss(teacher, student, temperature), expected)
    assert distillation_loss(teacher, teacher, 2.0).abs().max() < 1e-12
    # Cross-entropy less the entropy of a teacher that is sure is the loss of its class.
    sure = torch.eye(5, dtype=torch.float64)[[0, 3]] * 1e4
    torch.testing.assert_close(
        distillation_loss(sure, student[:2], 1.0),
        cross_entropy(student[:2], torch.tensor([0, 3]), reduction="none"),
    )


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    root = tmp_path_factory.mktemp("colours")
    return made.class_folders(root / "all", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.num_experts=1",), "model.num_experts: 1"),
        (("model.top_k=5",), "model.top_k: 5 is more than model.num_experts: 4"),
        (("distill.teacher={attentive}", "data.path={colours}"), "has 3 classes, the distill.teac"),
        (
            ("checkpoint.init_from={attentive}", ATTENTIVE, "data.path={colours}"),
            "a different model",
        ),
        (("distill.teacher={attentive}", "data.normalization=none"), "data.normalization: half"),
        (("distill.teacher={attentive}", "model.image_size=10"), "model.image_size: 8, not 10"),
        (("distill.teacher={colours}",), "distill.teacher: "),
        (
            ("distill.teacher={attentive}", "data.loss=sigmoid"),
            "data.loss: sigmoid is not allowed with distill.teacher",
        ),
        (("data.loss=sigmoid",), "data.loss: sigmoid"),
        (
            ("parallel.tensor_parallel_size=2",),
            "model.kind: mixture is not allowed with parallel.tensor",
        ),
    ],
)
def test_what_does_not_fit_is_refused(workers, config, attentive, colours, words, message):
    words = [word.format(attentive=attentive, colours=colours) for word in words]
    processes = 2 if "tensor" in words[0] else 1
    folder = f"run.folder={config.parent / 'refused'}"
    assert message in refusal(workers(processes), config, *words, folder)
