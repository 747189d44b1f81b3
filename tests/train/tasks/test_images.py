"""Image classification as a task: scores by hand, and what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from polyad.data.images.augmentation import GaussianNoise
from polyad.data.images.dataset import ImageData
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.tasks.registry import open_task
from tests.helpers import images as made
from tests.helpers.runs import evaluated, evaluation, records, refusal, run

pytestmark = pytest.mark.distributed


@pytest.fixture
def config(tmp_path, task_config):
    return task_config(tmp_path, "images")


def by_hand(folder, files):
    """The scores of each domain, and of all, by a plain loop over the files."""
    model, groups = load_model(folder), {}
    for file in files:
        pixels = torch.tensor(np.asarray(Image.open(file).convert("RGB")))
        x_BCHW = (pixels.permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5
        with torch.no_grad():
            logits = model(x_BCHW).logits[0]
        for domain in ("all", file.parent.parent.name):
            row = logits, made.CLASSES.index(file.parent.name)
            groups.setdefault(domain, []).append(row)
    return {domain: scores_of(rows) for domain, rows in groups.items()}


def scores_of(rows):
    logits, labels = torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])
    right, confidence = logits.argmax(-1) == labels, logits.softmax(-1).amax(-1)
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


def test_scores_of_all_and_of_each_domain_are_those_by_hand(workers, task_run, task_data):
    """Of validation, and of the domain that is left out."""
    folder = task_run("images")
    split = ImageData.open(load_config(folder / "config.yaml").data).split("validation")
    held = [Path(split.name_of(number)) for number in range(len(split))]
    left_out = sorted((task_data / "domains" / "grey").rglob("*.png"))
    for name, files in (("test", left_out), ("validation", held)):
        options = {"split": name, "overrides": ("evaluation.batch_size=5",)}
        ((result, text),) = workers(1).run(evaluated, folder, **options)
        expected = by_hand(folder, files)
        assert result["per_domain"].keys() == expected.keys() - {"all"}
        for domain, scores in expected.items():
            ours = result if domain == "all" else result["per_domain"][domain]
            assert {key: ours[key] for key in scores} == pytest.approx(scores, abs=1e-5), domain
        assert (result["images_scored"], result["left_out"]) == (len(files), ["grey"])
        right = sum(each["recall"] * each["images"] for each in result["per_class"].values())
        assert right / len(files) == pytest.approx(result["top1"])
    # What training tells of its validation is what evaluation finds.
    last = records(folder)[-1]
    for domain in ("blurred", "inverted", "plain"):
        for score in ("top1", "loss"):
            ours = last[f"validation_{score}/{domain}"]
            assert ours == pytest.approx(expected[domain][score], abs=1e-5)
    assert "grey (the test split)" in text
    names = json.loads((folder / "checkpoints/step-00000012/classes.json").read_text())
    assert names == list(made.CLASSES)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.micro_batch_size=1", "train.micro_batch_size: 1 is not allowed"),
        ("evaluation.stride=1", "data.kind: images is not allowed with evaluation.stride: 1"),
        ("model.num_classes=7", "model.num_classes: 7 is not the number of classes of data.path"),
        ("model.channels=1", "model.channels: 1 is not allowed"),
        ("model={kind: gpt2}", "data.kind: images is not allowed with model.kind: gpt2"),
        ("data.augmentation.crop_scale=[0.5]", "data.augmentation.crop_scale.1: is missing"),
        ("data.leave_out=[]", "data.leave_out: "),
        ("data.leave_out=grey", "data.leave_out: "),
        ("attributes: data.loss=softmax", "data.loss"),
        ("attributes: data.kind=images", "data.kind: images is not allowed with data.path"),
    ],
)
def test_what_does_not_fit_is_one_line(workers, task_config, tmp_path, override, message):
    name = "attributes" if override.startswith("attributes") else "images"
    config = task_config(tmp_path, name)
    assert message in refusal(workers(1), config, override.removeprefix("attributes: "))


def test_the_sigmoid_loss_by_hand(tmp_path, task_config):
    task = open_task(load_config(task_config(tmp_path, "images", data__loss="sigmoid")).for_task())
    logits, targets = torch.tensor([[0.0, 2.0, -1.0]]), torch.tensor([[0.25, 0.75, 0.0]])
    p = torch.sigmoid(logits)
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(-1)
    torch.testing.assert_close(task._loss(logits, targets), expected)


@pytest.mark.slow
def test_fluctuation_and_some_of_validation_are_told(workers, config, tmp_path):
    words = ("log.fluctuation=true", "evaluation.max_windows=4")
    assert workers(1).run(run, config, *words) == [12]
    last = records(tmp_path / "run")[-1]
    assert 0 <= last["fluctuation/top1"] <= 1
    assert 0 < len([key for key in last if key.startswith("validation_top1/")]) <= 3


@pytest.mark.slow
def test_noisy_images_are_scored_alike_in_parallel(workers, task_run):
    def scored(processes, attack):
        return workers(processes).run(evaluation, task_run("images"), attack=attack)[0]

    clean, still, noise = scored(1, None), scored(1, GaussianNoise(0)), GaussianNoise(0.3, seed=2)
    assert still["attack"] == {"kind": "gaussian-noise", "rate": 0, "seed": 0}
    assert still["loss"] == clean["loss"]
    one, two = (scored(processes, noise) for processes in (1, 2))
    assert one["per_class"] == two["per_class"]
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    assert abs(one["loss"] - clean["loss"]) > 1e-4
