"""The page of a run on images: real pixels, the right images, where patches go, and its size."""

import base64
import io
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.report.command import report
from polyad.train.tasks.pixels import normalize
from tests.helpers import images as made
from tests.helpers.runs import counts_of, run

pytestmark = pytest.mark.distributed
MODELS = {
    "vit": {
        "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 2, "hidden_size": 16,
        "num_heads": 2, "feed_forward": {"kind": "smoe", "num_experts": 4},
    },
    "mixer": {
        "kind": "mixer", "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 16,
        "token_feed_forward": {"kind": "smoe", "num_experts": 3},
        "channel_feed_forward": {"kind": "mumoe", "num_experts": [5], "rank": 4},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("vit", marks=pytest.mark.slow), "mixer"])
def trained(request, workers, tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    source = made.class_folders(root / "all", 20)
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"folder": str(root / "run")}, "model": MODELS[request.param],
        "data": {
            "kind": "images", "path": str(source), "held_out": 0.4, "normalization": "half",
            "evaluation_resize": 1.0,
        },
        "train": {
            "steps": 8, "global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32",
        },
        "optimizer": {"learning_rate": 0.02}, "log": {"trackers": []},
    }))  # fmt: skip
    workers(1).run(run, config)
    return root / "run"


def train_one_step(workers, tmp_path, **changes):
    source = made.class_folders(tmp_path / "all", 8)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"folder": str(tmp_path / "run")}, "model": MODELS["vit"] | changes,
        "data": {"kind": "images", "path": str(source), "held_out": 0.4},
        "train": {
            "steps": 1, "global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32",
        },
        "log": {"trackers": []},
    }))  # fmt: skip
    workers(1).run(run, config)


def test_a_head_of_experts_is_named_and_read(workers, tmp_path):
    head = {"kind": "mumoe", "num_experts": [6], "rank": 4}
    train_one_step(workers, tmp_path, feed_forward={"kind": "dense"}, head=head)
    result = report(tmp_path / "run", top=2)
    words = "feed_forward: dense; head: mumoe"
    assert result["model"].endswith(words)
    assert words in (tmp_path / "run" / "report.html").read_text()
    assert [row["module"] for row in result["specialization"]["levels"]] == ["head"]
    assert {row["layer"] for row in result["experts"] if row["top"]} == {"head"}


def coefficients(trained, layer_name):
    """[images, tokens, experts] of the validation split, and the images themselves."""
    from polyad.train.config.run import load_config
    from polyad.train.tasks.images import ImageClassification

    config = load_config(trained / "config.yaml")
    task = ImageClassification.open(config.for_task())
    images = [sample.images_BCHW for sample in task.held_out("validation")]
    model = load_model(find_checkpoint(trained))
    with deciding(model, routed_layers(model)) as decisions, torch.no_grad():
        model(normalize(torch.stack(images), (0.5,) * 3, (0.5,) * 3))
        a = decisions[layer_name].coefficients()
    return a.view(len(images), -1, a.shape[-1]), images


def test_top_images_are_those_of_a_loop_and_their_pixels_are_in_the_page(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", top=3)
    page = (tmp_path / "page.html").read_text()
    assert result["units_read"] == 24
    shown = set()
    for row in result["experts"]:
        a_BTS, images = coefficients(trained, row["layer"])
        column = int(row["expert"])
        highest = a_BTS[:, :, column].max(1).values
        expected = highest[highest > 0].topk(min(3, int((highest > 0).sum()))).values
        assert [top["weight"] for top in row["top"]] == pytest.approx(expected.tolist())
        for top in row["top"]:
            shown.add(top["number"])
            of_image = a_BTS[top["number"], :, column]
            if top["patch"] is not None:
                before = len(of_image) - 4
                assert of_image[before + top["patch"]] == of_image.max()
        if "token" in row["layer"]:
            assert all(top["patch"] is None for top in row["top"])
            assert row["layer"] not in result["maps"]
    uris = dict(re.findall(r"\.picture\.n(\d+) \{ background-image: url\((data:[^)]+)\)", page))
    assert shown <= {int(number) for number in uris}
    for number, uri in uris.items():
        content = base64.b64decode(uri.partition(",")[2])
        pixels = np.asarray(Image.open(io.BytesIO(content)))
        assert np.array_equal(pixels, images[int(number)].permute(1, 2, 0).numpy())
    assert "http" not in page.replace("http-equiv", "")
    assert len(page) < 5_000_000


def test_maps_are_each_patchs_first_expert(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html")
    for name, maps in result["maps"].items():
        a_BTS, _ = coefficients(trained, name)
        for each in maps:
            of_patches = a_BTS[each["number"]][-4:]
            assert each["first"] == of_patches.argmax(-1).tolist()


def test_rows_of_images_say_which_class_an_expert_gets_most_of(trained, tmp_path):
    from polyad.train.config.run import load_config
    from polyad.train.tasks.images import ImageClassification

    result = report(trained, output=tmp_path / "page.html", top=4)
    task = ImageClassification.open(load_config(trained / "config.yaml").for_task())
    labels = [int(sample.labels_B) for sample in task.held_out("validation")]
    text = (tmp_path / "page.html").read_text()
    tables, results = {}, result["specialization"]
    for name in [row["module"] for row in results["levels"]]:
        a_BTS, _ = coefficients(trained, name)
        given_BS = (a_BTS if "channel" in name else (a_BTS > 0)).double().sum(1)
        counts = np.zeros((given_BS.shape[1], len(made.CLASSES)))
        for given_S, label in zip(given_BS, labels, strict=True):
            counts[:, label] += given_S.numpy()
        tables[name] = counts_of(results, name, "class", made.CLASSES)
        np.testing.assert_allclose(tables[name], counts, rtol=1e-4, atol=1e-4)
    assert len(result["experts"]) == sum(map(len, tables.values()))
    for row in result["experts"]:
        counts_SY, expert = tables[row["layer"]], int(row["expert"])
        assert text.count(f'id="{row["anchor"]}"') == 1
        assert row["share"] == pytest.approx(counts_SY.sum(1)[expert] / counts_SY.sum())
        if row["class"]:
            column = list(made.CLASSES).index(row["class"])
            times = counts_SY[expert, column] / counts_SY[:, column].sum() / row["share"]
            assert row["value"] == pytest.approx(times)
            assert f">class {row['class']}</td>" in text


def test_named_experts_and_no_images(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", experts=["2"], layers=["0"])
    assert {row["expert"] for row in result["experts"] if row["top"]} == {"2"}
    assert {row["layer"].split(".")[1] for row in result["experts"]} == {"0"}
    result = report(trained, output=tmp_path / "page.html", tokens=0)
    assert result["experts"] == []
    assert "picture n" not in (tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="no such file or folder"):
        report(trained, output=tmp_path / "page.html", data=str(tmp_path / "none"))
