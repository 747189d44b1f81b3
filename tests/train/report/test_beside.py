"""Two runs on one page: pairs of experts against NumPy and SciPy, and what does not go together."""

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.report.beside import Alike
from polyad.train.report.command import report
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import TextSamples
from tests.helpers.pages import Page
from tests.helpers.prepared import silent
from tests.helpers.runs import run, write_config

SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32}


@pytest.fixture(scope="module")
def runs(workers, tmp_path_factory, prepared_path, texts):
    """Two runs of the same data; one of other data with the same tokenizer; a longer context."""
    other = tmp_path_factory.mktemp("other") / "data"
    silent(str(texts), str(prepared_path / "tokenizer.json"), other, validation_fraction=0.2)
    found = {}
    for name, data, changes in (
        ("one", prepared_path, {}),
        ("two", prepared_path, {"seed": 4, "train__steps": 9}),
        ("data", other, {"train__steps": 1}),
        ("length", prepared_path, {"model__sequence_length": 16, "train__steps": 1}),
    ):
        folder = tmp_path_factory.mktemp(name)
        changes = {"model__feed_forward": SMOE, "log": {"every": 2}} | changes
        workers(1).run(run, write_config(folder / "config.yaml", data, **changes))
        found[name] = folder / "run"
    return found


def test_experts_in_another_order_are_found_again_level_by_level():
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(5, 3))
    order = [3, 0, 4, 1, 2, 6, 7, 5]
    generator = torch.Generator().manual_seed(0)
    a_NS = torch.rand(300, 8, generator=generator) * (torch.arange(8) != 2)  # one is never used
    noisy_NS = a_NS + 0.3 * torch.rand(300, 8, generator=generator)
    alike = Alike([layer], None, None, [layer])
    for own, other in zip(a_NS.split(70), noisy_NS[:, order].split(70), strict=True):
        alike.count(layer.name, own, other)
    (pairs,) = alike.result().values()
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.corrcoef(a_NS.T, noisy_NS[:, order].T))[:8, 8:]
    columns = {layer.expert_name(column): column for column in range(8)}
    for pair in pairs:
        row, column = columns[pair.expert], columns[pair.other]
        assert order[column] == row
        assert pair.similarity == pytest.approx(expected[row, column], abs=1e-6)
        level = expected[row, :5] if row < 5 else expected[row, 5:]
        rest = np.delete(level, column if row < 5 else column - 5)
        assert pair.next_best == pytest.approx(rest.max(), abs=1e-6)
    assert len(pairs) == 8


@pytest.mark.distributed
def test_pairs_are_those_of_correlations_of_what_both_give_the_same_tokens(runs, tmp_path):
    result = report(runs["one"], runs["two"], output=tmp_path / "page.html", tokens=700)
    task = LanguageModelling.open(load_config(runs["one"] / "config.yaml").for_task())
    text = TextSamples(task, "validation", 700, with_first=False)
    coefficients = []
    for name in ("one", "two"):
        model, rows = load_model(runs[name]), {}
        layers = [RoutedLayer(name=f"blocks.{b}.feed_forward", levels=(4,)) for b in (0, 1)]
        for number_R, batch in text.batches(1, 0, 1, torch.device("cpu")):
            with torch.no_grad(), deciding(model, layers) as decisions:
                model(batch.ids_BT)
            skip = int(number_R[0] == 0)  # the end of text before the split
            for layer, decision in decisions.items():
                rows.setdefault(layer, []).append(decision.coefficients()[skip:])
        coefficients.append({layer: torch.cat(each).numpy() for layer, each in rows.items()})
    for layer, pairs in result["other"]["pairs"].items():
        with np.errstate(invalid="ignore"):
            both = np.corrcoef(coefficients[0][layer].T, coefficients[1][layer].T)
        alike = np.nan_to_num(both)[:4, 4:]
        rows, columns = linear_sum_assignment(-alike)
        found = [pair["similarity"] for pair in pairs]
        assert sum(found) == pytest.approx(alike[rows, columns].sum(), abs=1e-4)
        for pair in pairs:
            expected = alike[int(pair["expert"]), int(pair["other"])]
            assert pair["similarity"] == pytest.approx(expected, abs=1e-4)
    html = (tmp_path / "page.html").read_text()
    page = Page(html)
    page.check_scripts()
    assert len(set(page.ids)) == len(page.ids)
    (section,) = [part for part in html.split("<section") if part.startswith(' id="beside"')]
    assert section.count(f"</i>{runs['two']}</li>") >= 3  # legends of losses and of loads
    assert "Experts that get the same tokens" in section
    report(runs["one"], runs["two"], output=tmp_path / "again.html", tokens=700)
    assert html == (tmp_path / "again.html").read_text()


@pytest.mark.distributed
def test_a_run_beside_itself_has_the_same_experts(runs, tmp_path):
    result = report(runs["one"], runs["one"], output=tmp_path / "page.html", tokens=700)
    pairs = [pair for layer in result["other"]["pairs"].values() for pair in layer]
    used = [pair for pair in pairs if pair["similarity"]]
    assert len(used) > 2
    assert all(pair["expert"] == pair["other"] for pair in used)
    assert [pair["similarity"] for pair in used] == pytest.approx([1.0] * len(used))


@pytest.mark.distributed
def test_without_text_only_curves_stand_beside_one_another(runs, tmp_path):
    result = report(runs["one"], runs["two"], output=tmp_path / "page.html", tokens=0)
    assert result["other"]["pairs"] == {}
    assert "No experts were compared" in (tmp_path / "page.html").read_text()


@pytest.mark.distributed
def test_runs_that_do_not_go_together_are_refused_in_one_line(runs, tmp_path, capfd):
    def refused(*words):
        assert polyad(["report", *map(str, words)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert f"{runs['data']}: has a different data than" in refused(runs["one"], runs["data"])
    line = refused(runs["one"], runs["length"])
    assert "a different model.sequence_length" in line
    assert ": 16, not 32" in line
    assert "there is no such folder" in refused(runs["one"], tmp_path / "none")
    line = refused(runs["one"], runs["two"], "--stream", tmp_path / "stream")
    assert "--stream: is not allowed with two runs" in line
