"""The notebooks in docs/notebooks/, on a small run, and their pages on the site.

Their cells are plain Python, so they run here in one namespace, one after the other. A kernel would
run them as well, but needs 25 packages more.
"""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from docs.site import NOTEBOOKS, notebook_page
from tests.helpers.written import SITE, pages_of
from tests.test_written_links import links

HERE = Path(__file__).resolve().parents[2] / NOTEBOOKS
FILES = sorted(HERE.glob("*.ipynb"))


@pytest.fixture
def beside_a_run(trained, tmp_path, monkeypatch) -> None:
    """Goes to where Jupyter would start the kernel, below a folder with a run of a mixture."""
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/run").symlink_to(trained("smoe"))
    (tmp_path / NOTEBOOKS).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / NOTEBOOKS)


def executed(name: str) -> tuple[dict[str, Any], list[str]]:
    """Runs the cells of a notebook.

    Returns:
        The names that they have defined, and what the last expression of each cell shows.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in json.loads((HERE / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        place = f"{name}, cell {cell['id']}"
        tree = ast.parse("".join(cell["source"]), place)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, place, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    return names, shown


@pytest.mark.distributed
def test_the_notebook_of_a_token_shows_what_a_pruned_expert_changes(beside_a_run, capsys):
    names, shown = executed("experts-of-a-token.ipynb")
    found, view, expert = names["found"], names["view"], names["expert"]
    name, model = names["name"], names["run"].model
    ids_T = found.token_ids
    with torch.inference_mode():
        logits_TV = model(ids_T[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits_TV[:-1], ids_T[1:])
    used_T = (found.layers[name].experts == expert).any(1)
    assert used_T[0]
    assert not (view.changed.layers[name].experts == expert).any()
    printed = capsys.readouterr().out
    assert str(found) in printed
    *_, loss_line, moved_line = printed.partition("mean loss ")[2].splitlines()[:2]
    assert loss_line == f"{loss:.4f}, without expert {expert} {view.changed.loss:.4f}"
    place, tokens = moved_line.split(" ", 1)
    assert place == name
    assert set(ast.literal_eval(tokens)) >= {found.tokens[row] for row in used_T.nonzero()}
    likely = logits_TV[-1].softmax(-1).max()
    assert f"comes next: {likely:.3f}, now " in printed
    assert "how=prune</code>" in shown[-1]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_notebook_of_the_atlas_takes_away_the_expert_that_it_ranks_first(beside_a_run, capsys):
    names, _ = executed("atlas.ipynb")
    ranking, run, own = names["ranking"], names["run"], names["own"]
    assert len(ranking) == 4
    assert ranking.change.is_monotonic_decreasing
    assert ranking.frequency.sum() == pytest.approx(2)  # a token uses two of four
    without = names["atlas"].frames["experts"]["change"].tolist()
    first = ranking.expert.iloc[0]
    assert without[first] == max(without) == ranking.change.iloc[0]
    assert set(own.expert) == {first}
    assert names["loss"] == run.evaluate()["loss"]
    layer = run.model.blocks[1].feed_forward
    with torch.no_grad():  # the same by other means: an expert whose output is 0
        layer.experts.down[first].zero_()
        layer.output_bias[first].zero_()
    expected = run.evaluate()["loss"]
    assert expected != names["loss"]
    assert names["loss_without"] == pytest.approx(expected, abs=1e-7)
    said = f"change {expected - names['loss']:+.4f}, in the atlas {max(without):+.4f}"
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_is_short_has_no_outputs_and_a_page_on_the_site(path: Path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 13
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    page = notebook_page(path)
    assert all("".join(cell["source"]) in page for cell in cells)
    assert page.count("```python\n") == len(code)
    for target in links(page):
        assert os.path.exists(path.parent / target.partition("#")[0]), target
    nav = yaml.safe_load(SITE.read_text(encoding="utf-8"))["nav"]
    assert f"{NOTEBOOKS}/{path.stem}.md" in pages_of(nav)
