"""What each process writes: few ranges."""

import json
import math

import pytest

from polyad.model.build import build_model
from tests.helpers.training import MODEL, Case, train

pytestmark = pytest.mark.distributed


def index_of(folder):
    return json.loads((folder / "index.json").read_text())["tensors"]


def chunks_by_file(folder):
    found = {}
    for fields in index_of(folder).values():
        for field, about in fields.items():
            for chunk in about["chunks"]:
                if field in ("master", "exp_avg", "exp_avg_sq"):
                    found.setdefault(chunk["file"], []).append(math.prod(chunk["size"]))
    return found


@pytest.mark.slow
def test_there_are_as_many_ranges_as_parameters_and_processes(workers, tmp_path):
    parameters = len(list(build_model(MODEL).parameters()))
    for stage in (1, 2):
        place = tmp_path / str(stage)
        workers(4).run(train, Case(stage=stage, save_to=str(place)))
        found = chunks_by_file(next(place.glob("step-*")))
        # Three fields; a range of a matrix is at most three boxes, and each process cuts one.
        most = 3 * (parameters + 4 * 3)
        assert len(found) == 4
        assert sum(map(len, found.values())) <= most, stage
