"""The published sets of shifted images, in small copies of their layouts made here."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.measures.robustness import ALEXNET_ERRORS, check_order, imagenet_classes
from tests.helpers.images import encoded, picture
from tests.helpers.runs import run, scored_set, write_config

pytestmark = pytest.mark.distributed
IDS = imagenet_classes()
SIZE = 8


def write(path, label, number, size=(SIZE, SIZE)):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(label, number, size), "PNG"))


@pytest.fixture(scope="module")
def trained(workers, tmp_path_factory):
    """A run of some steps on 1,000 classes with two images each, and one that is validated with:
    without a labelled test, as ImageNet is, so 1% of the training images becomes the validation
    split, and the data set's own is the test."""
    root = tmp_path_factory.mktemp("imagenet")
    for split, each in (("train", 2), ("val", 1)):
        for label, name in enumerate(IDS):
            for number in range(each):
                file = f"ILSVRC2012_val_{label + 1:08}.PNG" if split == "val" else f"{number}.PNG"
                write(root / "all" / split / name / file, label, number + 10 * (split == "val"))
    model = {
        "kind": "vit", "image_size": SIZE, "patch_size": 4, "num_layers": 1, "hidden_size": 16,
        "num_heads": 2,
    }  # fmt: skip
    config = write_config(
        root / "config.yaml", root / "all", seed=1, model=model, data__kind="images",
        data__normalization="half", train__steps=20, train__global_batch_size=64,
        train__micro_batch_size=64, optimizer__learning_rate=0.02, evaluation__max_windows=64,
    )  # fmt: skip
    workers(1).run(run, config)
    return root / "run"


def logits_of(trained, files):
    """By Pillow's pixels and the model alone; the images have the model's size."""
    model = load_model(find_checkpoint(trained))
    rows = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    pixels = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        return model((pixels / 255 - 0.5) / 0.5).logits


EXACT = ("data.evaluation_resize=1.0",)


def images_of(folder, labels, numbers, further=0):
    """Files of images of classes, which show classes so much further on."""
    files = [folder / IDS[label] / f"{number}.png" for label in labels for number in numbers]
    for file in files:
        write(file, IDS.index(file.parent.name) + further, int(file.stem))
    return files


@pytest.mark.slow
def test_c_is_the_mean_of_errors_over_alexnets(workers, trained, tmp_path):
    expected = {}
    for place, name in enumerate(ALEXNET_ERRORS):
        wrong = []
        for severity in range(1, 6):
            folder = tmp_path / "c" / name / str(severity)
            files = images_of(folder, (3, 700), [place + severity])
            hits = logits_of(trained, files).argmax(-1) == torch.tensor([3, 700])
            wrong.append(1 - float(hits.float().mean()))
        expected[name] = sum(wrong) / 5
    for size in (1, 2):
        result, *_ = workers(size).run(scored_set, trained, "c", tmp_path / "c")
        errors = {row["corruption"]: row["error"] for row in result["corruptions"]}
        assert errors == pytest.approx(expected)
        mce = sum(error / ALEXNET_ERRORS[name] for name, error in expected.items()) / 15
        assert result["mce"] == pytest.approx(mce)
        assert result["top1"] == pytest.approx(1 - sum(expected.values()) / 15)


def test_a_and_r_choose_among_their_own_classes(workers, trained, tmp_path):
    labels = [5, 17, 900]
    logits = logits_of(trained, images_of(tmp_path / "a", labels, range(4)))[:, labels]
    truth = torch.arange(3).repeat_interleave(4)
    expected = float((logits.argmax(-1) == truth).float().mean())
    for name in ("a", "r"):
        result = workers(1).run(scored_set, trained, name, tmp_path / "a", overrides=EXACT)[0]
        assert (result["top1"], result["classes"]) == (pytest.approx(expected), 3)


@pytest.mark.slow
def test_o_ranks_its_images_among_those_that_belong(workers, trained, tmp_path):
    labels = [4, 60, 333]
    files = images_of(tmp_path / "o", labels, range(5), further=1)
    folders = [trained.parent / "all" / "val" / IDS[label] for label in labels]
    files += [next(folder.iterdir()) for folder in folders]
    scores = -logits_of(trained, files)[:, labels].softmax(-1).amax(-1)
    expected = average_precision_score([1] * 15 + [0] * 3, scores.numpy())
    result = workers(1).run(scored_set, trained, "o", tmp_path / "o", overrides=EXACT)[0]
    assert result["aupr"] == pytest.approx(expected)
    assert (result["images_scored"], result["images_inside"]) == (15, 3)


def test_classes_in_another_order_are_refused():
    words = [f"word {number}" for number in range(1000)]
    for known in (list(IDS), words):  # the hub's are words, in an order of their own
        check_order(known, "data.path: x")
    for other in (sorted(words), [*IDS[1:], IDS[0]], [*IDS[:-1], "n99999999"]):
        with pytest.raises(ConfigError, match=r"^robustness: data\.path: x has 1,000"):
            check_order(other, "data.path: x")


@pytest.mark.parametrize(
    ("name", "folder", "part"),
    [
        ("c", "", "gaussian_noise/1: there is no such folder"),
        ("a", "", "dog is not the folder of a class"),
        ("o", "nothing", "nothing: there is no such folder"),
    ],
)
def test_what_is_no_such_set_is_one_line(trained, tmp_path, refused, name, folder, part):
    (tmp_path / "dog").mkdir()
    assert part in refused("robustness", trained, "--set", name, "--images", tmp_path / folder)
