"""Parts of a model that a plugin adds by a line in a registry: `tests/helpers/plugged.py`."""

import json
from functools import partial

import pytest
import yaml

from tests.helpers import started
from tests.helpers.runs import write_config
from tests.helpers.started import ROOT

SECTIONS = [
    {"kind": "scaled", "factor": 0.5},
    {"kind": "smoe", "num_experts": 4, "score": "halved", "graph": "itself"},
]


polyad = partial(started.polyad, POLYAD_PLUGINS="tests.helpers.plugged", PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=["feed-forward", "score and graph"])
def test_a_run_trains_resumes_and_is_evaluated(section, tmp_path, prepared_path):
    config = write_config(
        tmp_path / "config.yaml", prepared_path, model__feed_forward=section, train__steps=2
    )
    assert (done := polyad("train", config)).returncode == 0, done.stderr
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["model"]["feed_forward"].items() >= section.items()
    assert "3 steps done" in polyad("train", tmp_path / "run", "train.steps=3").stdout
    found = json.loads(polyad("evaluate", tmp_path / "run", "--json", "-").stdout)
    assert found["loss"] > 0


@pytest.mark.parametrize(
    ("section", "named"), [(SECTIONS[0], "kind: 'scaled'"), (SECTIONS[1], "score: 'halved'")]
)
def test_without_the_plugin_the_names_are_refused(section, named, tmp_path, prepared_path, refused):
    config = write_config(tmp_path / "config.yaml", prepared_path, model__feed_forward=section)
    assert f"model.feed_forward.{named} is not allowed: " in refused("validate", config)
