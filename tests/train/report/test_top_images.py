"""The page of a run on images: real pixels, the right images, where patches go, and its size."""

import base64
import io
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import confusion_matrix

from polyad.data.images.prepare import prepare_images
from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.report.command import report
from polyad.train.tasks.pixels import normalize
from tests.helpers import images as made
from tests.helpers.runs import run

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
    prepare_images(str(source), root / "out", held_out=0.4, report=lambda x: None)
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"folder": str(root / "run")}, "model": MODELS[request.param],
        "data": {
            "kind": "images", "path": str(root / "out"), "normalization": "half",
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
    prepare_images(str(source), tmp_path / "out", held_out=0.4, report=lambda x: None)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({
        "run": {"folder": str(tmp_path / "run")}, "model": MODELS["vit"] | changes,
        "data": {"kind": "images", "path": str(tmp_path / "out")},
        "train": {
            "steps": 1, "global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32",
        },
        "log": {"trackers": []},
    }))  # fmt: skip
    workers(1).run(run, config)


def test_a_dense_model_has_scores_of_classes_alone(workers, tmp_path):
    train_one_step(workers, tmp_path, feed_forward={"kind": "dense"})
    result = report(tmp_path / "run", top=2)
    assert result["classes"]["experts"] == {}
    assert sum(each["images"] for each in result["classes"]["per_class"].values()) == 10
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('class="picture n') == 2
    assert 'id="by-class"' not in page
    assert 'id="layers"' not in page


def test_a_head_of_experts_is_named_and_read(workers, tmp_path):
    head = {"kind": "mumoe", "num_experts": [6], "rank": 4}
    train_one_step(workers, tmp_path, feed_forward={"kind": "dense"}, head=head)
    result = report(tmp_path / "run", top=2)
    words = "head: muMoE of 6 experts, cp of rank 4, entmax15 gate; dense"
    assert result["model"].endswith(words)
    assert words in (tmp_path / "run" / "report.html").read_text()
    assert list(result["classes"]["experts"]) == list(result["images"]["layers"]) == ["head"]


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
    assert result["images"]["images"] == 24
    shown = set()
    for name, experts in result["images"]["layers"].items():
        a_BTS, images = coefficients(trained, name)
        for expert in experts:
            column = int(expert["expert"])
            highest = a_BTS[:, :, column].max(1).values
            expected = highest[highest > 0].topk(min(3, int((highest > 0).sum()))).values
            assert [t["coefficient"] for t in expert["top"]] == pytest.approx(expected.tolist())
            for top in expert["top"]:
                shown.add(top["number"])
                of_image = a_BTS[top["number"], :, column]
                if top["patch"] is not None:
                    before = len(of_image) - 4
                    assert of_image[before + top["patch"]] == of_image.max()
        if "token" in name:
            assert all(t["patch"] is None for e in experts for t in e["top"])
            assert name not in result["images"]["maps"]
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
    for name, maps in result["images"]["maps"].items():
        a_BTS, _ = coefficients(trained, name)
        for each in maps:
            of_patches = a_BTS[each["number"]][-4:]
            assert each["first"] == of_patches.argmax(-1).tolist()


def test_scores_and_experts_of_each_class(trained, tmp_path):
    from polyad.train.config.run import load_config
    from polyad.train.tasks.images import ImageClassification

    result = report(trained, output=tmp_path / "page.html", top=4)["classes"]
    task = ImageClassification.open(load_config(trained / "config.yaml").for_task())
    images = [sample.images_BCHW for sample in task.held_out("validation")]
    labels = [int(sample.labels_B) for sample in task.held_out("validation")]
    model = load_model(find_checkpoint(trained))
    with torch.no_grad():
        logits = torch.cat([
            model(normalize(each[None], (0.5,) * 3, (0.5,) * 3)).logits for each in images
        ])  # fmt: skip
    found = logits.argmax(-1).tolist()
    assert result["confusion_matrix"] == confusion_matrix(labels, found).tolist()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="none")
    shown = result["largest_losses"]
    assert [e["loss"] for e in shown] == pytest.approx(losses.topk(4).values.tolist(), rel=1e-4)
    page = (tmp_path / "page.html").read_text()
    assert all(f".picture.n{each['number']} " in page for each in shown)
    for name, (level,) in result["experts"].items():
        a_BTS, _ = coefficients(trained, name)
        given_BS = (a_BTS if "channel" in name else (a_BTS > 0)).double().sum(1)
        counts = np.zeros((given_BS.shape[1], len(made.CLASSES)))
        for given_S, label in zip(given_BS, labels, strict=True):
            counts[:, label] += given_S.numpy()
        np.testing.assert_allclose(level["counts"], counts, rtol=1e-4, atol=1e-4)


def test_named_experts_and_no_images(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", experts=["2"], layers=["0"])
    layers = result["images"]["layers"]
    assert all([e["expert"] for e in experts] == ["2"] for experts in layers.values())
    assert {name.split(".")[1] for name in layers} == {"0"}
    result = report(trained, output=tmp_path / "page.html", tokens=0)
    assert result["images"] is None
    assert "picture n" not in (tmp_path / "page.html").read_text()
    with pytest.raises(ConfigError, match="name another folder with --data"):
        report(trained, output=tmp_path / "page.html", data=str(tmp_path / "none"))


def test_lines_of_images_say_which_class_an_expert_gets_most_of(trained, tmp_path):
    result = report(trained, output=tmp_path / "page.html", top=2)
    text = (tmp_path / "page.html").read_text()
    lines = {line["anchor"]: line for line in result["experts"]}
    found = result["classes"]["experts"]
    names = dict(zip(result["classes"]["expert_classes"], range(100), strict=False))
    seen = 0
    for name, levels in found.items():
        _, block, which = name.split(".")
        which = which.removesuffix("feed_forward").rstrip("_")
        place = f"b{block}-{which}-" if which else f"b{block}"
        for expert, share, counts in zip(
            levels[0]["experts"], levels[0]["share"], levels[0]["counts"], strict=True
        ):
            line = lines[f"{place}e{expert}"]
            seen += 1
            assert text.count(f'id="{line["anchor"]}"') == 1
            assert line["share"] == share
            assert line["change"] is None
            if most := line["gets_most_of"]:
                of_class = np.array(levels[0]["counts"])[:, names[most["class"]]].sum()
                times = counts[names[most["class"]]] / of_class / share
                assert most["times"]["value"] == pytest.approx(times)
                assert f"Its share of <b>class {most['class']}</b> is {times:.2f} [" in text
    assert seen == len(lines)
