"""Image classification as a task: it trains, resumes, is scored, and refuses what does not fit."""

import json

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from polyad.data.images.augmentation import GaussianNoise
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.task import Sections
from tests.helpers import images as made
from tests.helpers.runs import (
    evaluation,
    records,
    refusal,
    run,
    weights_of,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    return made.class_folders(root / "all", 20)


@pytest.fixture
def config(tmp_path, data):
    path = tmp_path / "images.yaml"
    path.write_text(yaml.safe_dump(TREE | {
        "run": {"folder": str(tmp_path / "run")},
        "data": {
            "kind": "images", "path": str(data), "held_out": 0.3, "normalization": "half",
            "augmentation": {"mixup": 0.2, "cutmix": 0.5, "crop_scale": [0.5, 1.0]},
        },
    }))  # fmt: skip
    return path


TREE = {
    "seed": 3,
    "model": {
        "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 2, "hidden_size": 16,
        "num_heads": 2, "feed_forward": {"kind": "smoe", "num_experts": 4, "placement": [1]},
    },
    "train": {"steps": 12, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "checkpoint": {"every": 6},
    "evaluation": {"every": 6},
    "log": {"trackers": [], "fluctuation": True},
}  # fmt: skip


def test_it_trains_resumes_bitwise_and_is_scored(workers, config, tmp_path):
    one = workers(1)
    assert one.run(run, config, "train.ema=0.9") == [12]
    half = f"run.folder={tmp_path / 'half'}"
    assert one.run(run, config, half, "train.ema=0.9", "train.steps=6") == [6]
    assert one.run(run, config, half, "train.ema=0.9") == [12]
    whole, pieces = (
        weights_of(tmp_path / name / "checkpoints" / "step-00000012") for name in ("run", "half")
    )
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    log = records(tmp_path / "run")
    assert log[-1]["images"] == 96
    assert {"validation_top1", "validation_top5", "validation_loss"} <= log[-1].keys()
    assert log[-1]["loss"] < log[0]["loss"]
    assert 0 <= log[-1]["fluctuation/top1"] <= 1
    # Scores against a plain loop over the images.
    result = one.run(evaluation, tmp_path / "run", overrides=("evaluation.batch_size=5",))[0]
    checkpoint = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000012")
    assert json.loads((checkpoint.folder / "classes.json").read_text()) == list(made.CLASSES)
    expected = scored_by_hand(tmp_path / "run", config)
    for name in ("top1", "top5", "loss", "calibration_error"):
        assert result[name] == pytest.approx(expected[name], abs=1e-6), name
    assert result["images_scored"] == 18
    assert sum(each["images"] for each in result["per_class"].values()) == 18
    right = sum(each["recall"] * each["images"] for each in result["per_class"].values())
    assert right / 18 == pytest.approx(result["top1"])
    averaged = one.run(evaluation, tmp_path / "run", weights="ema")[0]
    assert averaged["loss"] != result["loss"]
    assert workers(2).run(evaluation, tmp_path / "run")[0]["loss"] == pytest.approx(result["loss"])


def scored_by_hand(run_folder, config):
    from polyad.train.config.run import load_config

    parsed = load_config(run_folder / "config.yaml")
    checkpoint = Checkpoint(run_folder / "checkpoints" / "step-00000012")
    task = ImageClassification.open_held_out(parsed.for_task(), checkpoint)
    model = load_model(checkpoint.folder)
    rows = []
    with torch.no_grad():
        for sample in task.held_out("validation"):
            image = (sample.images_BCHW.unsqueeze(0).float() / 255 - 0.5) / 0.5
            rows.append((model(image).logits[0], int(sample.labels_B)))
    logits, labels = torch.stack([r for r, _ in rows]), torch.tensor([y for _, y in rows])
    right = logits.argmax(-1) == labels
    confidence = logits.softmax(-1).amax(-1)
    gap = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            share = float(inside.float().mean())
            gap += share * abs(float(right[inside].float().mean() - confidence[inside].mean()))
    return {
        "top1": float(right.float().mean()),
        "top5": 1.0,  # of three classes
        "loss": float(cross_entropy(logits, labels)),
        "calibration_error": gap,
    }


@pytest.mark.slow
def test_two_processes_are_one(workers, config, tmp_path):
    sgd = ("optimizer={kind: sgd, learning_rate: 0.1}", "log.fluctuation=false")
    for processes, micro in ((1, 4), (2, 2)):
        folder = f"run.folder={tmp_path / str(processes)}"
        workers(processes).run(run, config, folder, f"train.micro_batch_size={micro}", *sgd)
    one, two = ([r["loss"] for r in records(tmp_path / n)] for n in ("1", "2"))
    assert two == pytest.approx(one, rel=1e-5)
    ours, theirs = (weights_of(tmp_path / n / "checkpoints" / "step-00000012") for n in "12")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.micro_batch_size=1", "train.micro_batch_size: 1 is not allowed"),
        (
            "evaluation.stride=1",
            "data.kind: images is not allowed with evaluation.stride: 1",
        ),
        ("model.num_classes=7", "model.num_classes: 7 is not the number of classes of data.path"),
        ("model.channels=1", "model.channels: 1 is not allowed"),
        (
            "model={kind: gpt2, feed_forward: {kind: smoe}}",
            "data.kind: images is not allowed with model.kind: gpt2",
        ),
        ("data.augmentation.crop_scale=[0.5]", "data.augmentation.crop_scale.1: is missing"),
        ("data.path=/nothing", "/nothing: there is no such file or folder"),
    ],
)
def test_what_does_not_fit_is_one_line(workers, config, override, message):
    assert message in refusal(workers(1), config, override)


def test_other_classes_than_the_checkpoints_are_refused(workers, config, tmp_path):
    workers(1).run(run, config, "train.steps=1")
    root = made.class_folders(tmp_path / "all", 5)
    (root / "cat").rename(root / "dog")
    # Also those of weights that were converted, whose folder names the classes.
    convert(tmp_path / "run", tmp_path / "plain", "safetensors")
    words = (f"data.path={root}", f"run.folder={tmp_path / 'new'}")
    for start in ("run", "plain"):
        text = refusal(workers(1), config, *words, f"checkpoint.init_from={tmp_path / start}")
        assert "class 2 is 'dog', not 'cat'" in text


def opened(data, **settings):
    from polyad.data.images.config import ImageDataConfig
    from polyad.model.build import read_model_config
    from polyad.train.tasks.task import EvaluationConfig

    return ImageClassification.open(Sections(
        data=ImageDataConfig(path=str(data), **settings),
        model=read_model_config(TREE["model"]), evaluation=EvaluationConfig(), seed=0,
    ))  # fmt: skip


def test_the_sigmoid_loss_by_hand(data):
    task = opened(data, loss="sigmoid")
    logits, targets = torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    p = torch.sigmoid(logits)
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(-1)
    torch.testing.assert_close(task._loss(logits, targets), expected)


@pytest.mark.slow
def test_noisy_images_are_scored_alike_in_parallel(workers, config):
    assert workers(1).run(run, config) == [12]
    folder = config.parent / "run"
    clean, still = (
        workers(1).run(evaluation, folder, attack=attack)[0] for attack in (None, GaussianNoise(0))
    )
    assert still["attack"] == {"kind": "gaussian-noise", "rate": 0, "seed": 0}
    assert still["loss"] == clean["loss"]
    noise = GaussianNoise(0.3, seed=2)
    one, two = (workers(n).run(evaluation, folder, attack=noise)[0] for n in (1, 2))
    assert one["per_class"] == two["per_class"]
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    assert abs(one["loss"] - clean["loss"]) > 1e-4
