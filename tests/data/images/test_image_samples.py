"""Decoding, augmentation, and which images a step sees."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from polyad.data.errors import DataError
from polyad.data.images import source
from polyad.data.images.augmentation import (
    evaluation_image,
    mixing,
    random_crop,
    training_image,
    transforms,
)
from polyad.data.images.config import AugmentationConfig, ImageDataConfig, RandAugmentConfig
from polyad.data.images.dataset import ImageData
from polyad.data.images.samples import ImageSamples
from polyad.data.images.source import decode
from polyad.data.sampler import micro_batches
from tests.helpers import images as made
from tests.helpers.refusals import line_of

MODES = ("L", "LA", "P", "RGBA", "CMYK", "1", "RGB", "YCbCr")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_any_mode_is_what_pillow_makes_of_it(mode, kind):
    image = made.picture(1, 2, (17, 13)).convert(mode)
    try:
        content = made.encoded(image, kind)
    except (OSError, KeyError):
        return  # the format has no such mode
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(decode(content, "a"), expected)


def test_simplejpeg_and_pillow_agree(monkeypatch, shared):
    import zipfile

    with zipfile.ZipFile(shared / "cifar10" / "cifar10_subset_6k.zip") as archive:
        files = [archive.read(name) for name in archive.namelist()[:40]]
    assert source.simplejpeg is not None
    fast = [decode(content, "a") for content in files]
    monkeypatch.setattr(source, "simplejpeg", None)
    assert all(np.array_equal(a, decode(c, "a")) for a, c in zip(fast, files, strict=True))


@pytest.mark.parametrize("values", [np.uint16, np.int32, np.float32])
def test_grey_of_more_than_8_bits_is_refused(values):
    """Pillow would make it nearly white, or black."""
    file = io.BytesIO()
    Image.fromarray((np.arange(12) * 20).reshape(3, 4).astype(values)).save(file, "TIFF")
    with pytest.raises(DataError, match="a: holds grey of more than 8 bits"):
        decode(file.getvalue(), "a")


def bomb():
    """A PNG of a few bytes that says it has 60,000 x 60,000 pixels."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


JPEG = made.encoded(made.picture(0, 0, (64, 48)))


@pytest.mark.parametrize(
    "content",
    [b"", JPEG[: len(JPEG) // 2], b"hello, world", bomb(), b"\xff\xd8\xff" + bytes(30)],
    ids=["empty", "truncated", "text", "bomb", "zeros"],
)
def test_what_is_no_image_is_one_line(content):
    line = line_of(DataError, decode, content, "a")
    assert line.startswith(("a: is empty", "a: cannot be decoded"))


def test_the_central_crop_by_hand():
    # 8 x 4 pixels, to 4 x 2 with the shorter side 2: columns 1 and 2 of 4 are the middle.
    row = np.repeat(np.array([0, 50, 100, 150], dtype=np.uint8), 2)
    pixels = np.broadcast_to(row[None, :, None], (4, 8, 3))
    out = evaluation_image(np.ascontiguousarray(pixels), 2, 1.0)
    assert out.shape == (3, 2, 2)
    assert abs(int(out[0, 0, 0]) - 50) < 12
    assert abs(int(out[0, 0, 1]) - 100) < 12


def test_crops_have_the_share_and_aspect_that_were_asked_for():
    generator = np.random.default_rng(0)
    crops = [random_crop((300, 400), (0.2, 0.5), generator) for _ in range(500)]
    shares = np.array([h * w / 120_000 for _, _, h, w in crops])
    assert shares.min() > 0.19
    assert shares.max() < 0.51
    assert all(0 <= t <= 300 - h and 0 <= left <= 400 - w for t, left, h, w in crops)
    aspects = np.array([w / h for *_, h, w in crops])
    assert aspects.min() > 0.73
    assert aspects.max() < 1.36


def test_mixing_draws_a_pairs_share_and_box():
    both = AugmentationConfig(mixup=0.8, cutmix=1.0)
    drawn = [mixing(both, 32, (0, pair)) for pair in range(400)]
    boxes = [box for _, box in drawn if any(box)]
    assert 120 < len(boxes) < 280  # half of the pairs, but for boxes of no pixel
    for share, (top, left, bottom, right) in drawn:
        assert 0 <= share <= 1
        if bottom > top and right > left:
            assert share == pytest.approx(1 - (bottom - top) * (right - left) / 32**2)
    assert drawn[7] == mixing(both, 32, (0, 7))
    assert mixing(AugmentationConfig(), 32, (0, 7)) == (1.0, (0, 0, 0, 0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    path = str(made.class_folders(root / "all"))
    return ImageData.open(ImageDataConfig(path=path, held_out=0.3))


def samples(data, **changes):
    chosen = AugmentationConfig(mixup=0.2, erasing=0.3)
    settings = ImageDataConfig(path="x", augmentation=chosen, **changes)
    return ImageSamples(data.split("train"), settings, 8, seed=5)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_epoch_has_every_image_once_in_another_order(data):
    images = samples(data)
    count = len(data.split("train"))
    epochs = [[images.number_of(e * count + n) for n in range(count)] for e in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_sample_is_the_same_whenever_it_is_read_and_other_in_the_next_epoch(data):
    forwards = [samples(data)[g] for g in range(40)]
    again = samples(data)
    backwards = {g: again[g] for g in reversed(range(40))}
    assert all(same(forwards[g], backwards[g]) for g in range(40))
    count = len(data.split("train"))
    first = {samples(data).number_of(g): g for g in range(count)}
    later = {samples(data).number_of(g): g for g in range(count, 2 * count)}
    changed = [not torch.equal(again[first[n]][0], again[later[n]][0]) for n in range(count)]
    assert sum(changed) > count * 0.8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_ends_training_with_its_name(tmp_path, workers):
    root = made.class_folders(tmp_path / "all")
    path = root / "ant" / "000.jpg"
    path.write_bytes(path.read_bytes()[:100])
    read = samples(ImageData.open(ImageDataConfig(path=str(root), held_out=0.05)))
    options = {"global_batch_size": 8, "micro_batch_size": 8, "num_workers": workers}
    line = line_of(DataError, list, micro_batches(read, start_step=0, num_steps=9, **options))
    assert line.startswith(f"{path}: cannot be decoded: ")


def test_randaugment_depends_on_its_seeds_alone_or_says_what_is_missing():
    chosen = AugmentationConfig(randaugment=RandAugmentConfig())
    settings = ImageDataConfig(path="x", augmentation=chosen)
    pixels = np.asarray(made.picture(0, 1, (40, 30)))
    try:
        transforms()
    except DataError:
        with pytest.raises(DataError, match=r"data\.augmentation\.randaugment: needs torchvision"):
            training_image(pixels, 16, settings, (0, 0, 0))
        return
    torch.manual_seed(0)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    first = training_image(pixels, 16, settings, (0, 0, 0))
    assert torch.rand(1) == drawn  # the global generator was left as it was
    assert torch.equal(first, training_image(pixels, 16, settings, (0, 0, 0)))
    others = [training_image(pixels, 16, settings, (0, 0, n)) for n in range(1, 6)]
    assert sum(not torch.equal(first, other) for other in others) >= 4
