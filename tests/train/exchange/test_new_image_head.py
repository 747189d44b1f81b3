"""A ViT in groups of units or with copied experts is tuned to images of other classes."""

import json

import pytest
import torch

from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import evaluate
from polyad.train.exchange.change import Splitting, Upcycling
from polyad.train.exchange.convert import convert
from polyad.train.reading import open_evaluated
from tests.helpers import images as made
from tests.helpers.everyday import everyday
from tests.helpers.runs import evaluation, refusal, run, run_and_listen

pytestmark = pytest.mark.distributed

VIT = {
    "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 2, "hidden_size": 16,
    "num_heads": 2, "feed_forward": {"kind": "dense"},
}  # fmt: skip
SGD = {"kind": "sgd", "learning_rate": 0.01, "clip_grad_norm": 1.0}
CHANGES = {
    "split": Splitting("num_experts=8,top_k=8,blocks=[1]"),
    "copies": Upcycling("num_experts=4,top_k=2,score=cosine,placement=[1]"),
    "adapted": Splitting("num_experts=8,top_k=4,blocks=[0]"),
    "dense": None,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Images of three and of four classes."""
    root = tmp_path_factory.mktemp("images")
    for name, more in (("three", ()), ("four", ("dog",))):
        source = made.class_folders(root / name, 8)
        for label, other in enumerate(more, len(made.CLASSES)):
            (source / other).mkdir()
            for number in range(8):
                picture = made.encoded(made.picture(label, number))
                (source / other / f"{number}.jpg").write_bytes(picture)
    return {name: root / name for name in ("three", "four")}


@pytest.fixture(scope="module")
def finished(run_of, folders):
    return run_of(
        data__path=str(folders["three"]), data__kind="images", data__held_out=0.3,
        data__normalization="half", model=VIT, optimizer=SGD, train__steps=2,
    )  # fmt: skip


def test_a_converted_run_is_scored_as_the_run_itself(workers, finished, tmp_path):
    """Its pixels are normalized as they were, and its classes have their names."""
    convert(finished, tmp_path / "same", "safetensors")
    convert(tmp_path / "same", tmp_path / "back", "polyad")
    convert(finished, tmp_path / "split", "polyad", CHANGES["split"])
    convert(finished, tmp_path / "theirs", "huggingface")
    for name in ("back", "split", "theirs"):
        assert json.loads((tmp_path / name / "classes.json").read_text()) == list(made.CLASSES)
    (ours,) = workers(1).run(evaluation, finished)
    (split,) = workers(1).run(evaluation, tmp_path / "split")
    assert split["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert split["images_scored"] == ours["images_scored"]


def begun(workers, finished, start, folder, data, *words):
    """A run of one step that begins from weights; gives its first line and what it was asked."""
    words = (f"checkpoint.init_from={start}", f"run.folder={folder}", f"data.path={data}", *words)
    config = finished.parent / "config.yaml"
    ((steps, message),) = workers(1).run(run_and_listen, config, *words, "train.steps=1")
    assert steps == 1
    return message, (config, *words)


@everyday("name", ["split", "adapted", "copies", "dense"], keep=["split"])
def test_the_head_starts_from_the_seed_and_all_else_from_the_weights(
    workers, finished, folders, tmp_path, name
):
    start, change = finished, CHANGES[name]
    if change is not None:
        start = tmp_path / "start"
        convert(finished, start, "polyad", change)
    theirs = load_model(start)
    section = json.dumps(theirs.config.feed_forward.model_dump(mode="json"))
    words = (f"model.feed_forward={section}",)
    if name == "adapted":
        words += ("adapt.lora={rank: 4, trained: [head.*]}",)
    message, asked = begun(workers, finished, start, tmp_path / "run", folders["four"], *words)
    assert "; initialized from the seed: head.*" in message
    ours = load_model(tmp_path / "run").state_dict()
    assert ours["head.weight"].shape == (4, 16)
    for each, value in theirs.named_parameters():
        if not each.startswith("head."):
            torch.testing.assert_close(ours[each], value.detach(), rtol=0, atol=0.02, msg=each)
    assert workers(1).run(evaluation, tmp_path / "run")[0]["images_scored"] > 4
    # It goes on with the head that it has.
    assert workers(1).run(run, *asked) == [2]
    again = load_model(tmp_path / "run").get_parameter("head.weight")
    torch.testing.assert_close(again.detach(), ours["head.weight"], rtol=0, atol=0.05)
    assert not torch.equal(again, ours["head.weight"])


def test_a_head_of_another_kind_is_new_and_other_names_of_as_many_classes_are_refused(
    workers, finished, folders, tmp_path
):
    head = "model.head={kind: mumoe, num_experts: [3], rank: 4}"
    message, (config, *_) = begun(
        workers, finished, finished, tmp_path / "run", folders["three"], head
    )
    assert "; initialized from the seed: head.*" in message
    assert "head.gate.weight" in Checkpoint(tmp_path / "run/checkpoints/step-00000001").shapes()
    root = made.class_folders(tmp_path / "all", 8)
    (root / "cat").rename(root / "cow")
    words = (f"checkpoint.init_from={finished}", f"run.folder={tmp_path / 'other'}")
    text = refusal(workers(1), config, *words, f"data.path={root}")
    assert "class 2 is 'cow', not 'cat'" in text
    # A head of zeros that stays so would give every adapter a gradient of 0.
    words = (*words, f"data.path={folders['four']}", "adapt.lora={rank: 2}")
    assert "adapt.lora.trained: head.bias starts from" in refusal(workers(1), config, *words)


@pytest.mark.slow
def test_a_head_of_another_library_is_taken_by_the_names_of_its_classes(
    workers, finished, folders, tmp_path
):
    theirs, three = tmp_path / "theirs", folders["three"]
    convert(finished, theirs, "huggingface")
    (theirs / "classes.json").unlink()
    about = json.loads((theirs / "config.json").read_text())
    assert about["id2label"] == {"0": "ant", "1": "bee", "2": "cat"}
    message, _ = begun(workers, finished, theirs, tmp_path / "a", three)
    assert "; " not in message.splitlines()[0]
    convert(theirs, tmp_path / "ours", "polyad")
    held_out = {"data": str(three), "overrides": ("data.held_out=0.3",)}
    (ours,) = workers(1).run(evaluation, tmp_path / "ours", **held_out)
    (whole,) = workers(1).run(evaluation, finished)
    assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-5)

    # The same head with its rows in another order, and names that say so.
    about["id2label"] = {"0": "bee", "1": "ant", "2": "cat"}
    (theirs / "config.json").write_text(json.dumps(about))
    convert(theirs, tmp_path / "swapped", "polyad")
    with pytest.raises(ConfigError, match="class 0 is 'ant', not 'bee'"):
        evaluate(open_evaluated(tmp_path / "swapped", str(three)))

    del about["id2label"]
    (theirs / "config.json").write_text(json.dumps(about))
    words = "data.normalization=imagenet"
    message, _ = begun(workers, finished, theirs, tmp_path / "c", three, words)
    assert "config.json does not name all 3 classes of its head" in message
    assert "; data.normalization: imagenet, but the weights were trained with half" in message


@pytest.mark.parametrize("content", ["[" * 100_000, '{"0": "ant"}', '["ant", "bee"]'])
def test_damaged_names_of_classes_are_one_line(finished, tmp_path, content):
    convert(finished, tmp_path / "plain", "safetensors")
    (tmp_path / "plain" / "classes.json").write_text(content)
    with pytest.raises(ConfigError, match=r"classes\.json: is not|names 2 classes"):
        convert(tmp_path / "plain", tmp_path / "theirs", "huggingface")
