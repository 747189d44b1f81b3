"""The page of a run on images: real pixels, the right images, where patches go, and its size."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.report.command import report
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.pixels import normalize
from tests.helpers import images as made
from tests.helpers.runs import counts_of, run, write_config

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


def train(workers, root, model, **changes):
    """A run on images of the model's own size."""
    source = made.class_folders(root / "all", 20)
    config = write_config(
        root / "config.yaml", source, model=model, data__kind="images", data__held_out=0.4,
        data__normalization="half", data__evaluation_resize=1.0, evaluation__batch_size=8,
        **changes,
    )  # fmt: skip
    workers(1).run(run, config)
    return root / "run"


@pytest.fixture(scope="module", params=[pytest.param("vit", marks=pytest.mark.slow), "mixer"])
def trained(request, workers, tmp_path_factory):
    changes = {"train__steps": 8, "optimizer__learning_rate": 0.02}
    return train(workers, tmp_path_factory.mktemp("images"), MODELS[request.param], **changes)


def test_a_head_of_experts_is_named_and_read(workers, tmp_path):
    head = {"kind": "mumoe", "num_experts": [6], "rank": 4}
    model = MODELS["vit"] | {"feed_forward": {"kind": "dense"}, "head": head}
    folder = train(workers, tmp_path, model, train__steps=1)
    result = report(folder, top=2)
    words = "feed_forward: dense; head: mumoe"
    assert result["model"].endswith(words)
    assert words in (folder / "report.html").read_text()
    assert [row["module"] for row in result["specialization"]["levels"]] == ["head"]
    assert {row["layer"] for row in result["experts"] if row["top"]} == {"head"}


@torch.no_grad()
def read_by_hand(folder):
    """The images of the validation split, their classes, and by layer the coefficients
    [images, tokens, experts]."""
    task = ImageClassification.open(load_config(folder / "config.yaml").for_task())
    images, labels = [], []
    for sample in task.held_out("validation"):
        images.append(sample.images_BCHW)
        labels.append(int(sample.labels_B))
    model = load_model(find_checkpoint(folder))
    with deciding(model, routed_layers(model)) as decisions:
        model(normalize(torch.stack(images), (0.5,) * 3, (0.5,) * 3))
    coefficients = {name: each.coefficients() for name, each in decisions.items()}
    return (
        images,
        labels,
        {name: a_MS.view(len(images), -1, a_MS.shape[-1]) for name, a_MS in coefficients.items()},
    )


def test_images_and_numbers_of_a_page_are_those_of_a_loop(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", top=3)
    page, results = (tmp_path / "page.html").read_text(), result["specialization"]
    images, labels, coefficients = read_by_hand(trained)
    assert result["units_read"] == len(images) == 24
    tables, shown = {}, set()
    for name in [row["module"] for row in results["levels"]]:
        a_BTS = coefficients[name]
        given_BS = (a_BTS if "channel" in name else (a_BTS > 0)).double().sum(1)
        counts = np.zeros((given_BS.shape[1], len(made.CLASSES)))
        for given_S, label in zip(given_BS, labels, strict=True):
            counts[:, label] += given_S.numpy()
        tables[name] = counts_of(results, name, "class", made.CLASSES)
        np.testing.assert_allclose(tables[name], counts, rtol=1e-4, atol=1e-4)
    assert len(result["experts"]) == sum(map(len, tables.values()))
    for row in result["experts"]:
        column, counts_SY = int(row["expert"]), tables[row["layer"]]
        a_BT = coefficients[row["layer"]][:, :, column]
        highest = a_BT.max(1).values
        expected = highest[highest > 0].topk(min(3, int((highest > 0).sum()))).values
        assert [top["weight"] for top in row["top"]] == pytest.approx(expected.tolist())
        for top in row["top"]:
            shown.add(top["number"])
            of_image = a_BT[top["number"]]
            if top["patch"] is not None:
                before = len(of_image) - 4
                assert of_image[before + top["patch"]] == of_image.max()
        if "token" in row["layer"]:
            assert all(top["patch"] is None for top in row["top"])
            assert row["layer"] not in result["maps"]
        assert page.count(f'id="{row["anchor"]}"') == 1
        assert row["share"] == pytest.approx(counts_SY.sum(1)[column] / counts_SY.sum())
        if row["class"]:
            of_class = counts_SY[:, list(made.CLASSES).index(row["class"])]
            times = of_class[column] / of_class.sum() / row["share"]
            assert row["value"] == pytest.approx(times)
            assert f">class {row['class']}</td>" in page
    # Maps are of each patch's first expert.
    for name, maps in result["maps"].items():
        for each in maps:
            of_patches = coefficients[name][each["number"]][-4:]
            assert each["first"] == of_patches.argmax(-1).tolist()
    uris = dict(re.findall(r"\.picture\.n(\d+) \{ background-image: url\((data:[^)]+)\)", page))
    assert shown <= {int(number) for number in uris}
    for number, uri in uris.items():
        content = base64.b64decode(uri.partition(",")[2])
        pixels = np.asarray(Image.open(io.BytesIO(content)))
        assert np.array_equal(pixels, images[int(number)].permute(1, 2, 0).numpy())
    assert "http" not in page.replace("http-equiv", "")
    assert len(page) < 5_000_000


def test_named_experts_and_no_images(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", experts=["2"], layers=["0"])
    assert {row["expert"] for row in result["experts"] if row["top"]} == {"2"}
    assert {row["layer"].split(".")[1] for row in result["experts"]} == {"0"}
    result = report(trained, output=tmp_path / "page.html", tokens=0)
    assert result["experts"] == []
    assert "picture n" not in (tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="no such file or folder"):
        report(trained, output=tmp_path / "page.html", data=str(tmp_path / "none"))
