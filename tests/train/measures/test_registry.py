"""A measure is one file and one line: a plugin's is taken and shown on a page.

`tests/helpers/even.py` is that measure; no file of Polyad names it.
"""

import json
import textwrap
from pathlib import Path

import pytest

from polyad.launch.cli import run as polyad
from polyad.train.experts.interventions import parse_intervention
from polyad.train.measures.atlas import Atlas
from polyad.train.measures.comparison import Comparison
from polyad.train.measures.registry import MEASURES
from polyad.train.measures.steer import Steer
from tests.helpers.runs import both_forms

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[3]
LAYER = "blocks.1.feed_forward"
"""The only feed-forward with experts of the sparse run."""


STEERED = parse_intervention("layer=1,expert=2,how=steer,value=40")
ANALYSES = {
    "atlas": (Atlas, {"tokens": 32 * 13, "how": "renormalize"}),
    "compare": (Comparison, {"tokens": 32 * 13}),
    "steer": (Steer, {"tokens": 32 * 13, "changes": [STEERED]}),
    "specialize": (MEASURES["specialize"], {}),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_two_processes_find_what_one_finds(workers, trained, name):
    """Of windows that neither the batch size nor the processes divide."""
    (kind, options), folder = ANALYSES[name], trained("smoe")
    if name == "compare":
        options = options | {"other": folder / "checkpoints" / "step-00000003"}
    options = options | {"overrides": ("evaluation.batch_size=3",)}
    results = [workers(size).run(both_forms, folder, kind, **options)[0][0] for size in (1, 2)]
    assert [result["processes"] for result in results] == [1, 2]
    # Correlations jump where two experts change the loss alike.
    left_out = {"processes", "seconds", "correlations", "predictive"}
    kept = [
        json.dumps({key: result[key] for key in sorted(result.keys() - left_out)})
        for result in results
    ]
    near = json.loads(kept[0], parse_float=lambda x: pytest.approx(float(x), abs=2e-6, rel=1e-4))
    assert json.loads(kept[1]) == near


@pytest.mark.slow
def test_commands_know_it_by_its_name(even, trained, tmp_path, capfd, refused):
    words = ["experts", "even", str(trained("smoe"))]
    file = tmp_path / "a.json"
    assert polyad([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    share = result["layers"][0]["even"]
    assert f"{LAYER}  {share:.4f}" in capfd.readouterr().out
    assert "experts odd: " in refused("experts", "odd")


def test_the_page_shows_this_measure():
    page = (ROOT / "docs" / "recipes" / "README.md").read_text()
    source = (ROOT / "tests" / "helpers" / "even.py").read_text()
    assert textwrap.indent(source[source.index("import pandas") :], "    ") in page
