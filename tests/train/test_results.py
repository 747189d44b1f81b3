"""The two forms of a result: values that JSON can write, and aligned lines."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from polyad.train.results import aligned, json_value


class Pair(NamedTuple):
    low: float
    high: float | None


@dataclass(frozen=True)
class Inner:
    pair: Pair
    table: np.ndarray


class Named:
    def to_json(self):
        return {"class": Pair(1.0, float("inf"))}


def test_a_value_is_what_json_can_write_however_deep_it_is():
    nan = float("nan")
    inner = Inner(Pair(nan, None), np.array([[1.5, np.nan], [np.inf, 2.0]]))
    result = json_value({"inner": [inner], "named": (Named(), torch.tensor([1, 2]), True, "x")})
    assert result == {
        "inner": [{"pair": {"low": None, "high": None}, "table": [[1.5, None], [None, 2.0]]}],
        "named": [{"class": {"low": 1.0, "high": None}}, [1, 2], True, "x"],
    }
    json.dumps(result, allow_nan=False)


def test_columns_have_one_width_and_a_side_each():
    rows = [("name", "n", "more"), ("a", "1", ""), ("bb", "22", "three")]
    assert aligned(rows, ">><") == ["name   n  more", "   a   1", "  bb  22  three"]
    assert aligned(rows, "<>") == ["name   n   more", "a      1", "bb    22  three"]
    assert aligned([]) == []
