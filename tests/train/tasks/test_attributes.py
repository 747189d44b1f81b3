"""Attribute classification as a task, and rewriting one of its outputs."""

import math

import pytest
import torch
import yaml

from polyad.data.images.config import AttributeDataConfig, ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import EvaluationImages
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.measures.rewriting import read_rewrite
from tests.helpers import images as made
from tests.helpers.runs import (
    counts_of,
    evaluation,
    frame_of,
    measured,
    records,
    refusal,
    rewriting,
    run,
    specialization,
    weights_of,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("attributes")
    return made.celeba(root / "celeba", 150)


@pytest.fixture
def config(tmp_path, data):
    path = tmp_path / "attributes.yaml"
    path.write_text(yaml.safe_dump(TREE | {
        "run": {"folder": str(tmp_path / "run")},
        "data": {
            "kind": "attributes", "path": str(data), "normalization": "half",
            "label_smoothing": 0.1,
            "augmentation": {"mixup": 0.2, "crop_scale": None, "flip": False},
        },
    }))  # fmt: skip
    return path


TREE = {
    "seed": 3,
    "model": {
        "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 16,
        "num_heads": 2, "head": {"kind": "mumoe", "num_experts": [4], "rank": 4},
    },
    "train": {"steps": 30, "global_batch_size": 20, "micro_batch_size": 10, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "checkpoint": {"every": 15},
    "evaluation": {"every": 15},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.mark.slow
def test_it_trains_at_two_processes_as_at_one_and_is_scored(workers, config, tmp_path):
    assert workers(1).run(run, config) == [30]
    two = f"run.folder={tmp_path / 'two'}"
    sgd = ("optimizer.kind=sgd", "optimizer.learning_rate=0.01")
    assert workers(2).run(run, config, two, *sgd) == [30, 30]
    assert workers(1).run(run, config, f"run.folder={tmp_path / 'one'}", *sgd) == [30]
    ours, theirs = (
        weights_of(tmp_path / name / "checkpoints" / "step-00000030") for name in ("one", "two")
    )
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    scores = [r for r in records(tmp_path / "run") if "validation_accuracy" in r]
    assert scores[-1]["validation_accuracy"] >= scores[-1]["validation_all_right"] > 0.5
    assert set(scores[-1]) >= {"validation_loss"}


def test_scores_and_rewriting_equal_a_computation_by_hand(workers, config, data):
    """At one process and at two, against numpy over all images at once."""
    assert workers(1).run(run, config, "train.steps=6") == [6]
    folder = config.parent / "run"
    logits, a, labels = (each.numpy() for each in _outputs(folder, data, "test"))
    _, a_train, train = (each.numpy() for each in _outputs(folder, data, "train"))
    right = (logits > 0) == labels
    of = "class=Bright,of=Bright:0+Red,by=30"
    mean = a_train[(train[:, 1] == 0) & (train[:, 0] == 1)].mean(0)
    after = (logits[:, 1] + 30 * a @ mean > 0) == labels[:, 1]
    for size in (1, 2):
        scores, *others = workers(size).run(evaluation, folder, split="test")
        for found in others:
            assert found["per_attribute"] == scores["per_attribute"]
        assert scores["accuracy"] == pytest.approx(right.mean())
        assert scores["all_right"] == pytest.approx(right.all(1).mean())
        for number, name in enumerate(made.ATTRIBUTES):
            has = labels[:, number] == 1
            assert scores["per_attribute"][name] == {
                "accuracy": pytest.approx(right[:, number].mean()), "images": int(has.sum()),
                "true_positive_rate": pytest.approx(right[has, number].mean()),
            }  # fmt: skip
        result = workers(size).run(rewriting, folder, of, split="test")[0]
        assert result["by"] == 30
        assert result["of"] == "Bright:0+Red"
        coefficients = [row["mean_coefficient"] for row in result["experts"]]
        assert coefficients == pytest.approx(mean.tolist(), abs=1e-6)
        _check_fairness(result, "before", right[:, 1], labels)
        _check_fairness(result, "after", after, labels)
        assert (after != right[:, 1]).any()
        changes = {
            (each["has_class"], each["has_others"]): each["after"] - each["before"]
            for each in result["subpopulations"]
        }
        gain = changes.pop((False, True))
        expected = gain - sum(abs(change) for change in changes.values())
        assert result["rewrite_score"] == pytest.approx(expected)


def _check_fairness(result, when, right, labels):
    measured = {row["measure"]: row[when] for row in result["measures"]}
    of = {
        (bright, red): right[(labels[:, 1] == bright) & (labels[:, 0] == red)]
        for bright in (0, 1)
        for red in (0, 1)
    }
    accuracy = {place: float(each.mean()) for place, each in of.items()}
    said = {
        (int(each["has_class"]), int(each["has_others"])): (each["images"], each[when])
        for each in result["subpopulations"]
    }
    assert said == {p: (len(of[p]), pytest.approx(accuracy[p])) for p in of}
    mean = sum(accuracy.values()) / 4
    assert measured["accuracy"] == pytest.approx(right.mean())
    assert measured["target_accuracy"] == pytest.approx(accuracy[0, 1])
    assert measured["equality_of_opportunity"] == pytest.approx(
        abs(accuracy[0, 1] - accuracy[0, 0])
    )
    assert measured["standard_deviation"] == pytest.approx(
        math.sqrt(sum((each - mean) ** 2 for each in accuracy.values()) / 4)
    )
    assert measured["lowest_accuracy"] == pytest.approx(min(accuracy.values()))


def _outputs(folder, data, split):
    """Logits, the head's coefficients and labels, from the model's parts one by one."""
    model = load_model(folder / "checkpoints" / "step-00000006", "cpu")
    images = EvaluationImages(
        ImageData.open(AttributeDataConfig(path=str(data))).split(split),
        AttributeDataConfig(path=str(data)),
        8,
    )
    batch = [images[number] for number in range(len(images))]
    x = (torch.stack([each.images_BCHW for each in batch]).float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        tokens = model.embed(x)
        for block in model.blocks:
            tokens, _ = block(tokens)
        z = model.final_norm(tokens[:, 0])
        a = torch.cat(model.head.gate(z).coefficients, -1)
        logits = model.head(z)[0]
    return logits, a, torch.stack([each.labels_B for each in batch])


@pytest.mark.slow
def test_the_experts_of_a_head_are_those_of_whole_images(workers, tmp_path):
    data = {"kind": "images", "path": str(made.class_folders(tmp_path / "all", 20))}
    data |= {"held_out": 0.3}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(TREE | {
        "run": {"folder": str(tmp_path / "run")},
        "data": data,
    }))  # fmt: skip
    assert workers(1).run(run, config, "train.steps=15") == [15]
    found = workers(1).run(specialization, tmp_path / "run")[0]
    assert [(row["module"], row["experts"]) for row in found["levels"]] == [("head", 4)]
    classes = made.CLASSES
    labels = ImageData.open(ImageDataConfig(**data)).split("validation").labels
    held = [int((labels == number).sum()) for number in range(len(classes))]
    given = counts_of(found, "head", "class", classes).sum(0).tolist()
    assert given == pytest.approx(held)  # a head's coefficients of an image add up to 1
    assert found["images_scored"] == sum(held)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("Bright", "class=NAME"),
        ("class=Bright,to=3", "to=3"),
        ("class=Blue,of=Red+Blue", "'Blue'"),
        ("class=Red,of=Red", "of=Red"),
        ("class=Red,of=Bright+Wide", "of=Bright+Wide"),
        ("class=Red,of=Red+Bright,by=much", "by=much"),
    ],
)
def test_a_rewrite_that_cannot_be_is_one_line(option, key):
    with pytest.raises(ConfigError, match="--move") as caught:
        read_rewrite(option, ["Red", "Bright", "Wide"])
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.kind=images", "data.kind: images is not allowed with data.path"),
        ("data.loss=softmax", "data.loss"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(workers, config, override, message):
    assert message in refusal(workers(1), config, override)


def test_without_one_class_each_only_the_entropies_of_the_gate_are_known(workers, config):
    folder = config.parent / "run"
    assert workers(1).run(run, config, "train.steps=1", "checkpoint.every=1") == [1]
    found, table = workers(1).run(measured, folder, "specialize")[0]
    (level,) = frame_of(found, "levels", module="head").to_dict("records")
    assert "polysemanticity" not in found
    assert found["labels"] == []
    assert 0 <= level["entropy_bits"] <= level["usage_entropy_bits"] <= 2
    assert "they need one class per image" in table
