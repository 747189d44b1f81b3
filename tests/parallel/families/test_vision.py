"""ViT, DINO and CLIP from transformers, and back, bitwise."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.images.augmentation import evaluation_image, transforms
from polyad.data.images.config import ImageDataConfig
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import load_model, open_weights
from polyad.train.config.run import load_config
from polyad.train.exchange.convert import convert
from polyad.train.tasks.pixels import normalization_of, normalize, read_pixels, transformers_file
from tests.helpers.parity import assert_equal_files
from tests.helpers.random_model import draw_anew

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 40, "image_size": 16, "patch_size": 4}  # fmt: skip
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def transformers():
    with contextlib.suppress(DataError):
        transforms()  # where torchvision is installed, transformers needs its door
    return pytest.importorskip("transformers")


@pytest.fixture
def vit(transformers):
    """transformers' model of images with five classes."""
    config = transformers.ViTConfig(**SIZES, num_labels=5, layer_norm_eps=1e-6)
    return transformers.ViTForImageClassification(config)


def saved(model, folder):
    draw_anew(model, 0.3, seed=4).eval().save_pretrained(folder)
    return folder


def test_a_vit_is_the_same_and_comes_back_bitwise(vit, tmp_path):
    folder = saved(vit, tmp_path / "vit")
    model = load_model(folder)
    with torch.no_grad():
        expected = vit(IMAGES).logits
        torch.testing.assert_close(model(IMAGES).logits, expected, rtol=0, atol=1e-5)
    result = convert(folder, tmp_path / "ours", "polyad")
    assert result["parameters"] == sum(p.numel() for p in vit.parameters())
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    assert_equal_files(tmp_path / "back", folder)
    again = type(vit).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(again(IMAGES).logits, expected)


NORMALIZED = [
    ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, "half"),
    ({"image_mean": [0.4815, 0.4578, 0.4082], "image_std": [0.2686, 0.2613, 0.2758]}, "clip"),
    ({"image_mean": [0.1] * 3, "image_std": [0.5] * 3}, None),
    ({"image_mean": 0.5}, None),
    ({"do_rescale": False, "image_mean": [0.5] * 3}, None),
    (None, None),
]


@pytest.mark.parametrize(("said", "expected"), NORMALIZED)
def test_pixels_are_normalized_as_the_folder_says(vit, tmp_path, said, expected):
    folder = saved(vit, tmp_path / "vit")
    if said is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    assert normalization_of(open_weights(folder), 16) == expected
    result = convert(folder, tmp_path / "ours", "polyad")
    written = load_config(tmp_path / "ours" / "config.yaml").data.normalization
    assert written == (expected or "imagenet")
    guessed = any("assuming data.normalization: imagenet" in note for note in result["notes"])
    assert guessed == (expected is None)


@pytest.mark.parametrize(
    ("said", "resize", "notes"),
    [
        ({"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}, 1.25, []),
        ({"size": 18, "crop_size": 16, "do_center_crop": True, "resample": 3}, 1.125, []),
        ({"size": {"height": 16, "width": 16}, "resample": 2}, 1.0, ["resample: 2", "size: "]),
        ({"size": {"shortest_edge": 32}}, 1.0, ["size: "]),
        ({"do_resize": False}, None, ["do_resize: False"]),
        ({"size": "x", "image_mean": [None], "image_std": 3}, None, ["image_mean: "]),
    ],
)
def test_images_are_resized_as_the_folder_says_or_a_line_says_what_differs(
    tmp_path, said, resize, notes
):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    keys, lines = read_pixels(tmp_path, 16)
    assert keys.get("evaluation_resize") == resize
    assert len(lines) == bool(notes)
    for note in notes:
        assert note in lines[0]


@pytest.mark.parametrize("normalization", ["half", "imagenet", "none"])
def test_an_exported_folder_processes_images_as_the_run_did(transformers, tmp_path, normalization):
    """transformers' own processor, by the file that is written, makes the same input of an image.
    Both are bicubic: a pixel may differ by a few of 255 levels at edges."""
    numpy = pytest.importorskip("numpy")
    settings = ImageDataConfig(path="x", normalization=normalization, evaluation_resize=1.25)
    about = transformers_file(settings, 32)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    pixels = numpy.random.default_rng(0).integers(0, 255, (9, 10, 3)).astype(numpy.uint8)
    pixels = numpy.kron(pixels, numpy.ones((8, 8, 1), dtype=numpy.uint8))  # 72 x 80, plain areas
    expected = theirs(pixels, return_tensors="pt")["pixel_values"]
    ours = normalize(evaluation_image(pixels, 32, 1.25)[None], settings.mean, settings.std)
    assert ours.shape == expected.shape
    scale = torch.tensor(settings.std).view(3, 1, 1) * 255
    assert ((ours - expected) * scale).abs().max() < 4
    assert read_pixels(tmp_path, 32) == (
        {"normalization": normalization, "evaluation_resize": 1.25}, [],
    )  # fmt: skip


SAID = {"id2label": {"0": "ant", "1": "bee", "2": "cat", "3": "dog", "4": "eel"}}


def test_names_of_classes_come_in_and_go_out(vit, tmp_path):
    folder = saved(vit, tmp_path / "vit")
    assert open_weights(folder).class_names is None
    assert "does not name all 5 classes of its head" in open_weights(folder).note
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | SAID))
    weights = open_weights(folder)
    assert weights.class_names == ["ant", "bee", "cat", "dog", "eel"]
    assert weights.note is None
    convert(folder, tmp_path / "ours", "polyad")
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    assert open_weights(tmp_path / "back").class_names == ["ant", "bee", "cat", "dog", "eel"]
    convert(folder, tmp_path / "plain", "safetensors")
    assert json.loads((tmp_path / "plain/classes.json").read_text())[3] == "dog"
    fewer = {"id2label": {"0": "ant"}}
    (folder / "config.json").write_text(json.dumps(tree | fewer))
    assert "does not name all 5 classes" in open_weights(folder).note


@pytest.mark.parametrize("pooler", [False, True])
def test_a_backbone_gets_a_new_head(transformers, tmp_path, pooler):
    """DINO's weights are those of a ViT without a head."""
    theirs = transformers.ViTModel(
        transformers.ViTConfig(**SIZES, layer_norm_eps=1e-6), add_pooling_layer=pooler
    )
    weights = open_weights(saved(theirs, tmp_path / "dino"))
    assert isinstance(weights, FamilyWeights)
    assert "it starts from random values" in weights.note
    wanted = weights.config.model_copy(update={"num_classes": 7, "head_bias": -2.0})
    weights.check_config(wanted)
    assert torch.equal(weights.whole("head.bias"), torch.full((7,), -2.0))
    experts = {"kind": "mumoe", "num_experts": [4], "rank": 3}
    other = wanted.model_dump() | {"head": experts, "head_bias": 0.0}
    weights.check_config(type(wanted).model_validate(other))
    factor = "head.layer.output_factor"
    starts = [weights.whole(factor)]
    weights.seed = 1  # of the run
    starts.append(weights.whole(factor))
    assert not torch.equal(*starts)
    model = load_model(tmp_path / "dino")
    x = model.embed(IMAGES)
    for block in model.blocks:
        x, _ = block(x)
    with torch.no_grad():
        expected = theirs.eval()(IMAGES).last_hidden_state
        torch.testing.assert_close(model.final_norm(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_a_clip_tower_has_the_activation_that_its_weights_say(transformers, tmp_path, activation):
    theirs = transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**SIZES, hidden_act=activation)
    )
    folder = saved(theirs, tmp_path / "clip")
    model = load_model(folder)
    assert model.config.activation == activation
    assert model.config.pre_norm
    x = model.embed(IMAGES)
    with torch.no_grad():
        for block in model.blocks:
            x, _ = block(x)
        expected = theirs.eval()(IMAGES).pooler_output
        torch.testing.assert_close(model.final_norm(x[:, 0]), expected, rtol=0, atol=1e-5)
    convert(folder, tmp_path / "ours", "polyad")
    with pytest.raises(WeightsError, match=r"ViT has model\.pre_norm: False in"):
        convert(tmp_path / "ours", tmp_path / "back", "huggingface")


def test_a_factorized_head_is_not_written_as_transformers_vit():
    config = load_config(Path("finetune/dino-s16-mumoe-cp"), ["model.num_classes=1000"])
    with pytest.raises(WeightsError, match=r"ViT has model\.head\."):
        family_of_model(config.model)
