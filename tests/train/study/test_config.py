"""The points of a study's grid and their names."""

import pytest

from polyad.model.config_yaml import load_written
from polyad.train.study.config import points


def test_points_are_all_combinations_the_last_key_fastest() -> None:
    grid = load_written(
        "{optimizer.learning_rate: [2.0e-5, 3e-5], model.feed_forward.top_k: [16, 32]}"
    )
    found = points(grid)
    assert [point.name for point in found] == [
        "learning_rate=2.0e-5,top_k=16",
        "learning_rate=2.0e-5,top_k=32",
        "learning_rate=3e-5,top_k=16",
        "learning_rate=3e-5,top_k=32",
    ]
    assert list(found[0].keys) == ["optimizer.learning_rate", "model.feed_forward.top_k"]


def test_no_grid_is_one_point_without_a_name() -> None:
    assert [point.name for point in points({})] == [""]


def test_a_name_can_be_a_folder_and_tells_keys_apart() -> None:
    grid = {"model.feed_forward.placement": [[8, 10]], "checkpoint.init_from": ["runs/a"]}
    assert points(grid)[0].name == "placement=8-10,init_from=runs-a"
    alike = {"model.head.dropout": [0.1], "model.dropout": [0.2]}
    assert points(alike)[0].name == "model.head.dropout=0.1,model.dropout=0.2"


def test_two_points_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rate=0\.1 is given twice"):
        points({"a.rate": [0.1, 0.1]})
