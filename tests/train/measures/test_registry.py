"""A measure is one file and one line: a plugin's is taken and shown on a page.

`tests/helpers/even.py` is that measure; no file of Polyad names it.
"""

import json
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.experts.interventions import parse_intervention
from polyad.train.measures.atlas import Atlas
from polyad.train.measures.comparison import Comparison
from polyad.train.measures.registry import MEASURES
from polyad.train.measures.steer import Steer
from tests.helpers.fine_tuned import table, trainer
from tests.helpers.prepared import windows_of
from tests.helpers.runs import both_forms, frame_of, measured, newest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[3]
LAYER = "blocks.1.feed_forward"
"""The only feed-forward with experts of the sparse run."""


def even_measured(path, **options):
    """In a worker: the plugin is imported there."""
    import tests.helpers.even  # noqa: F401

    return measured(path, "even", **options)


STEERED = parse_intervention("layer=1,expert=2,how=steer,value=40")
ANALYSES = {
    "atlas": (Atlas, {"tokens": 32 * 13, "how": "route-around"}),
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


@torch.inference_mode()
def by_hand(folder, windows):
    """The share of the routing weights of even experts, from the router itself."""
    model, result = load_model(newest(folder)), []
    router = model.blocks[1].feed_forward.router
    router.register_forward_hook(lambda _, given, output: result.append(output.selected))
    for read, _ in windows:
        model(torch.tensor([read]))
    even = sum(float(s.weights_NK[s.expert_ids_NK % 2 == 0].sum()) for s in result)
    return even / sum(float(s.weights_NK.sum()) for s in result)


@pytest.mark.slow
def test_one_process_and_two_say_what_the_router_says(workers, trained, prepared_path):
    windows, options = windows_of(prepared_path), {"overrides": ("evaluation.batch_size=3",)}
    expected = by_hand(trained("smoe"), windows)
    for size in (1, 2):
        result, text = workers(size).run(even_measured, trained("smoe"), **options)[0]
        assert result["layers"] == [{"module": LAYER, "even": pytest.approx(expected, rel=1e-6)}]
        assert result["rows_read"] == len(windows)
        assert f"{LAYER}  {expected:.4f}" in text
    assert 0 < expected < 1


@pytest.mark.slow
def test_sequences_are_read_too(workers, tmp_path_factory):
    held_out, options = table(10, 2), {"overrides": ("evaluation.batch_size=3",)}
    folder = trainer(workers, tmp_path_factory)("smoe", table(24, 1), held_out, steps=1)
    result = [workers(size).run(even_measured, folder, **options)[0][0] for size in (1, 2)]
    assert result[0]["rows_read"] == result[1]["rows_read"] == len(held_out)
    one, two = (frame_of(each, "layers") for each in result)
    pd.testing.assert_frame_equal(one, two)


@pytest.mark.slow
def test_commands_know_it_by_its_name(even, trained, tmp_path, capfd):
    words = ["experts", "even", str(trained("smoe"))]
    file = tmp_path / "a.json"
    assert polyad([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    share = result["layers"][0]["even"]
    assert f"{LAYER}  {share:.4f}" in capfd.readouterr().out
    assert polyad(["experts", "odd"]) == 2
    assert "experts odd: " in capfd.readouterr().err


def test_the_page_shows_this_measure():
    page = (ROOT / "docs" / "recipes" / "README.md").read_text()
    source = (ROOT / "tests" / "helpers" / "even.py").read_text()
    assert textwrap.indent(source[source.index("import pandas") :], "    ") in page
