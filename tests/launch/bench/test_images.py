"""The bench of the loader of images."""

import pytest

from polyad.data.errors import DataError
from polyad.launch.bench.images import bench_images, images_table
from polyad.launch.cli import run as polyad
from tests.helpers import images as made


def test_it_compares_loaders_of_the_same_images(tmp_path, capsys):
    folder = made.class_folders(tmp_path / "all", 8)
    result = bench_images(folder, images=32, repeats=2)
    assert result["images"] == 32
    peers = result["peers"]
    assert "pillow" in peers
    assert all(peer["images_per_second"] > 0 for peer in peers.values())
    assert result["reached"] == all(peer["times_as_fast"] >= 1.3 for peer in peers.values())
    assert "pillow" in images_table(result)


def test_what_is_of_text_is_refused_beside_images(capfd):
    for word, value in (("--tokenizer", "gpt2"), ("--consumption", "100.0")):
        assert polyad(["bench", "data", "--images", "x", word, value]) == 2
        assert f"{word}: {value} is not allowed with --images" in capfd.readouterr().err
    assert polyad(["bench", "data", "train.steps=3", "--images"]) == 2
    assert "train.steps=3: is not allowed with --images" in capfd.readouterr().err


def test_a_folder_without_images_is_one_line(tmp_path):
    with pytest.raises(DataError, match="has no folders of classes"):
        bench_images(tmp_path)
