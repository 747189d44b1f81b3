"""Attribute classification as a task, and rewriting one of its outputs."""

import re

import numpy as np
import pytest
import torch

from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import EvaluationImages
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from polyad.train.measures.rewriting import read_rewrite
from tests.helpers import images as made
from tests.helpers.runs import counts_of, evaluation, frame_of, measured, rewriting, run

pytestmark = pytest.mark.distributed


def test_scores_and_rewriting_equal_a_computation_by_hand(workers, task_run):
    """At one process and at two, against numpy over all images at once."""
    folder = task_run("attributes")
    logits, a, labels = outputs(folder, "test")
    _, a_train, train = outputs(folder, "train")
    right = (logits > 0) == labels
    of = "class=Bright,of=Bright:0+Red,by=30"
    mean = a_train[(train[:, 1] == 0) & (train[:, 0] == 1)].mean(0)
    after = (logits[:, 1] + 30 * a @ mean > 0) == labels[:, 1]
    for size in (1, 2):
        scores = workers(size).run(evaluation, folder, split="test")[0]
        assert scores["accuracy"] == pytest.approx(right.mean())
        assert scores["all_right"] == pytest.approx(right.all(1).mean())
        for number, name in enumerate(made.ATTRIBUTES):
            has = labels[:, number] == 1
            assert scores["per_attribute"][name] == {
                "accuracy": pytest.approx(right[:, number].mean()), "images": int(has.sum()),
                "true_positive_rate": pytest.approx(right[has, number].mean()),
            }  # fmt: skip
        result = workers(size).run(rewriting, folder, of, split="test")[0]
        assert (result["by"], result["of"]) == (30, "Bright:0+Red")
        coefficients = [row["mean_coefficient"] for row in result["experts"]]
        assert coefficients == pytest.approx(mean.tolist(), abs=1e-6)
        found = {row["measure"]: row for row in result["measures"]}
        accuracies = []
        for when, each in (("before", right[:, 1]), ("after", after)):
            accuracies.append(accuracy := by_subpopulation(result, when, each, labels))
            expected = {
                "accuracy": each.mean(), "target_accuracy": accuracy[0, 1],
                "equality_of_opportunity": abs(accuracy[0, 1] - accuracy[0, 0]),
                "standard_deviation": np.std(list(accuracy.values())),
                "lowest_accuracy": min(accuracy.values()),
            }  # fmt: skip
            assert {key: found[key][when] for key in expected} == pytest.approx(expected)
        assert (after != right[:, 1]).any()
        changes = {place: accuracies[1][place] - accuracies[0][place] for place in accuracies[0]}
        gain = changes.pop((0, 1))
        expected = gain - sum(abs(change) for change in changes.values())
        assert result["rewrite_score"] == pytest.approx(expected)


def by_subpopulation(result, when, right, labels):
    """The accuracy of each, by whether an image is bright and red."""
    of = {
        (bright, red): right[(labels[:, 1] == bright) & (labels[:, 0] == red)]
        for bright in (0, 1)
        for red in (0, 1)
    }
    said = {
        (int(each["has_class"]), int(each["has_others"])): (each["images"], each[when])
        for each in result["subpopulations"]
    }
    assert said == {place: (len(each), pytest.approx(each.mean())) for place, each in of.items()}
    return {place: float(each.mean()) for place, each in of.items()}


def outputs(folder, split):
    """Logits, the head's coefficients and labels, from the model's parts one by one."""
    model, data = load_model(folder), load_config(folder / "config.yaml").data
    images = EvaluationImages(ImageData.open(data).split(split), data, 8)
    batch = [images[number] for number in range(len(images))]
    x = (torch.stack([each.images_BCHW for each in batch]).float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        tokens = model.embed(x)
        for block in model.blocks:
            tokens, _ = block(tokens)
        z = model.final_norm(tokens[:, 0])
        a = torch.cat(model.head.gate(z).coefficients, -1)
        logits = model.head(z)[0]
    labels = torch.stack([each.labels_B for each in batch])
    return logits.numpy(), a.numpy(), labels.numpy()


@pytest.mark.slow
def test_the_experts_of_a_head_are_those_of_whole_images(workers, task_config, tmp_path):
    head = {"kind": "mumoe", "num_experts": [4], "rank": 4}
    config = task_config(tmp_path, "images", model__head=head, model__feed_forward={})
    assert workers(1).run(run, config) == [12]
    found, _ = workers(1).run(measured, tmp_path / "run", "specialize")[0]
    assert [(row["module"], row["experts"]) for row in found["levels"]] == [("head", 4)]
    labels = ImageData.open(load_config(config).data).split("validation").labels
    held = [int((labels == number).sum()) for number in range(len(made.CLASSES))]
    given = counts_of(found, "head", "class", made.CLASSES).sum(0).tolist()
    assert given == pytest.approx(held)  # a head's coefficients of an image add up to 1
    assert found["images_scored"] == sum(held)


def test_a_rewrite_that_cannot_be_is_one_line():
    for option, key in (
        ("Bright", "class=NAME"), ("class=Bright,to=3", "to=3"), ("class=Red,of=Red", "of=Red"),
        ("class=Blue,of=Red+Blue", "'Blue'"), ("class=Red,of=Bright+Wide", "of=Bright+Wide"),
        ("class=Red,of=Red+Bright,by=much", "by=much"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"--move: .*{re.escape(key)}"):
            read_rewrite(option, ["Red", "Bright", "Wide"])


def test_without_one_class_each_only_the_entropies_of_the_gate_are_known(workers, task_run):
    found, table = workers(1).run(measured, task_run("attributes"), "specialize")[0]
    (level,) = frame_of(found, "levels", module="head").to_dict("records")
    assert "polysemanticity" not in found
    assert found["labels"] == []
    assert 0 <= level["entropy_bits"] <= level["usage_entropy_bits"] <= 2
    assert "they need one class per image" in table
