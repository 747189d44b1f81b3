"""The report of a classifier of sequences, against plain loops over its rows without padding."""

import shutil

import numpy as np
import pytest
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score

from polyad.parallel.checkpoint.load import best_checkpoint
from polyad.train.experts.knockout import Change
from polyad.train.experts.probing import RoutedLayer
from polyad.train.report.command import report
from polyad.train.report.experts import Effect, ExpertRow
from polyad.train.report.held_out import ReportData
from polyad.train.report.page import Training, render_report
from polyad.train.report.top_tokens import Context
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import KINDS, NAMES, counted, one_by_one, table, trainer
from tests.helpers.pages import Page
from tests.helpers.runs import counts_of, frame_of

pytestmark = pytest.mark.distributed
CONTENT = {
    "run": "run", "model": "gpt2", "parameters": 1, "active_parameters": 1, "checkpoint": "run",
    "checkpoint_is_best": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def train(workers, tmp_path_factory):
    return trainer(workers, tmp_path_factory)


@pytest.fixture(scope="module")
def runs(train):
    result = {}

    def make(kind):
        if kind not in result:
            result[kind] = train(kind, table(60, 0), table(20, 1))
        return result[kind]

    return make


@everyday("kind", [kind for kind in KINDS if kind != "dense"], keep=["mumoe"])
def test_numbers_are_those_of_a_loop_over_rows(runs, tmp_path, kind):
    folder, rows = runs(kind), table(20, 1)
    result = report(folder, output=tmp_path / "page.html")
    results = result["specialization"]
    names = sorted(NAMES.values())
    labels = [names.index(row["label"]) for row in rows]
    _, tokens = one_by_one(folder, [row["text"] for row in rows])
    levels = frame_of(results, "levels")
    assert list(levels["module"].unique()) == list(tokens[0])
    by_place = {(row["layer"], row["expert"]): row for row in result["experts"]}
    for layer, of_layer in levels.groupby("module", sort=False):
        counts = counted(tokens, layer, labels, 3)
        tables = [counts_of(results, layer, "class", names, level) for level in of_layer["level"]]
        ours = np.concatenate(tables)
        np.testing.assert_allclose(ours, counts, rtol=1e-4, atol=1e-4)
        if kind != "mumoe":
            length = sum(len(row["text"].encode()) for row in rows)
            assert ours.sum() == 2 * length  # top-2, and padding is no token
        for level, table_SY in enumerate(tables):
            (measures,) = frame_of(results, "labels", module=layer, level=level).to_dict("records")
            parts = (table_SY.sum(1), table_SY.sum(0), table_SY.flatten())
            of_experts, of_classes, of_both = (entropy(part, base=2) for part in parts)
            bits = of_experts + of_classes - of_both
            assert measures["information_bits"] == pytest.approx(bits, abs=1e-9)
            if kind != "mumoe":  # scikit-learn rounds what is no whole number
                nats = mutual_info_score(None, None, contingency=table_SY)
                assert measures["information_bits"] == pytest.approx(nats / np.log(2), abs=1e-9)
            for expert, share in enumerate(table_SY.sum(1)):
                name = f"{level}.{expert}" if len(tables) > 1 else str(expert)
                row = by_place.pop((layer, name))
                assert row["share"] == pytest.approx(share / table_SY.sum())
    assert not by_place


def test_classes_and_contexts_that_look_like_markup_are_text():
    read = ReportData(
        data="d", split="validation", unit="sequence", units=1, of_units=1,
        labels=None, specialization=None, knockout=None,
    )  # fmt: skip
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(1,))
    effect = Effect("class", "<i>bad</i>", Change(2.0, 1.5, 2.5), 0.5)
    row = ExpertRow(layer, "0", 1.0, effect, [Context(0.5, 0, 0, 0, "<b>", "</code>", "<i>")])
    text = render_report(CONTENT, Training(), SequenceTask, "", [layer], [row], read)
    assert not Page(text).tags & {"i", "u"}
    for part in ("class &lt;i&gt;bad&lt;/i&gt;", "&lt;b&gt;", "&lt;/code&gt;"):
        assert part in text


@pytest.mark.slow
def test_the_best_checkpoint_is_read_and_named(train, tmp_path):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    folder = train(
        "best", table(20, 0), table(8, 1), optimizer={"learning_rate": 1e-12},
        checkpoint={"every": 2, "keep_best": True},
    )  # fmt: skip
    assert best_checkpoint(folder).name == "step-00000002"
    output = tmp_path / "page.html"
    result = report(folder, output=output)
    assert (result["checkpoint_step"], result["checkpoint_is_best"]) == (2, True)
    assert "step-00000002 (the best by validation score)" in output.read_text()
    result = report(folder / "checkpoints" / "step-00000004", output=output)
    assert (result["checkpoint_step"], result["checkpoint_is_best"]) == (4, False)
    assert "the best by validation" not in output.read_text()
    unmarked = tmp_path / "unmarked"
    shutil.copytree(folder, unmarked)
    (unmarked / "checkpoints" / "best").unlink()
    assert report(unmarked)["checkpoint_step"] == 4
