"""The bench of the loader of images."""

from tests.benchmarks.images import bench_images, images, images_table
from tests.benchmarks.script import run
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


def test_a_folder_without_images_is_one_line(tmp_path, capfd):
    assert run(images, [str(tmp_path)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "has no folders of classes" in line
