"""The report of a classifier of sequences, against plain loops over its rows without padding."""

import json
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import confusion_matrix, mutual_info_score, precision_recall_fscore_support
from torch.nn.functional import cross_entropy

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.load import best_checkpoint
from polyad.train.errors import ConfigError
from polyad.train.report.command import report
from tests.helpers import sequences as made
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import KINDS, NAMES, counted, one_by_one, table, trainer
from tests.helpers.pages import Page
from tests.helpers.runs import evaluation, records

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def train(workers, tmp_path_factory):
    return trainer(workers, tmp_path_factory)


@pytest.fixture(scope="module")
def runs(train):
    found = {}

    def make(kind):
        if kind not in found:
            found[kind] = train(kind, table(60, 0), table(20, 1))
        return found[kind]

    return make


@everyday("kind", KINDS, keep=["mumoe"])
def test_numbers_are_those_of_a_loop_over_rows(runs, workers, tmp_path, kind):
    folder, rows = runs(kind), table(20, 1)
    result = report(folder, output=tmp_path / "page.html", top=5)
    found = result["classes"]
    names = sorted(NAMES.values())
    labels = [names.index(row["label"]) for row in rows]
    logits, tokens = one_by_one(folder, [row["text"] for row in rows])
    predicted = logits.argmax(-1).tolist()
    matrix = confusion_matrix(labels, predicted, labels=range(3))
    assert found["confusion_matrix"] == matrix.tolist()
    expected = precision_recall_fscore_support(labels, predicted, labels=range(3), zero_division=0)
    assert list(found["per_class"]) == names
    for scores, *theirs in zip(found["per_class"].values(), *expected, strict=True):
        ours = [scores[key] or 0.0 for key in ("precision", "recall", "f1", "sequences")]
        assert ours == pytest.approx(theirs)
    frequent = {(c["true"], c["predicted"]): c["samples"] for c in found["confusions"]}
    assert frequent == {
        (names[t], names[p]): matrix[t, p]
        for t in range(3)
        for p in range(3)
        if t != p and matrix[t, p]
    }
    losses = cross_entropy(logits, torch.tensor(labels), reduction="none")
    shown = found["largest_losses"]
    assert [each["loss"] for each in shown] == pytest.approx(losses.topk(5).values.tolist())
    for each in shown:
        row = each["number"]
        assert each["texts"] == [rows[row]["text"]]
        assert (each["true"], each["predicted"]) == (rows[row]["label"], names[predicted[row]])
        probabilities = logits[row].softmax(-1)
        assert each["probability"] == pytest.approx(probabilities.max().item(), abs=1e-5)
        of_true = probabilities[labels[row]].item()
        assert each["probability_of_true"] == pytest.approx(of_true, abs=1e-5)
    assert list(found["experts"]) == list(tokens[0])
    for layer, levels in found["experts"].items():
        counts = counted(tokens, layer, labels, 3)
        ours = np.concatenate([level["counts"] for level in levels])
        np.testing.assert_allclose(ours, counts, rtol=1e-4, atol=1e-4)
        if kind != "mumoe":
            length = sum(len(row["text"].encode()) for row in rows)
            assert ours.sum() == 2 * length  # top-2, and padding is no token
        for level in levels:
            table_SY = np.array(level["counts"])
            parts = (table_SY.sum(1), table_SY.sum(0), table_SY.flatten())
            of_experts, of_classes, of_both = (entropy(part, base=2) for part in parts)
            bits = of_experts + of_classes - of_both
            assert level["information_bits"] == pytest.approx(bits, abs=1e-9)
            if kind != "mumoe":  # scikit-learn rounds what is no whole number
                nats = mutual_info_score(None, None, contingency=table_SY)
                assert level["information_bits"] == pytest.approx(nats / np.log(2), abs=1e-9)
    scored = workers(1).run(evaluation, folder)[0]
    assert found["loss"] == pytest.approx(scored["loss"])
    assert found["accuracy"] == pytest.approx(scored["accuracy"])
    assert found["per_class"] == scored["per_class"]


def test_the_page_says_the_same_and_what_looks_like_markup_is_text(runs, tmp_path):
    result = report(runs("smoe"), output=tmp_path / "page.html", top=21)
    again = report(runs("smoe"), output=tmp_path / "again.html", top=21)
    text = (tmp_path / "page.html").read_text()
    assert text == (tmp_path / "again.html").read_text()
    assert result["classes"] == again["classes"]
    page = Page(text)
    page.check_scripts()
    assert not page.tags & {"iframe", "object", "link", "img"}
    assert "<i>bad" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; it was awful" in text
    assert "&lt;i&gt;bad&lt;/i&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    for heading in ("Scores of each class", "Confusion", "Experts by class", "Validation score"):
        assert f">{heading}<" in text
    for layer in result["classes"]["experts"].values():
        assert f"<td>{layer[0]['information_bits']:.4f}</td>" in text
    for scores in result["classes"]["per_class"].values():
        assert f"<td>{scores['f1']:.3f}</td>" in text
    log = records(runs("smoe"))
    assert result["validation_score"] == log[-1]["validation_score"]


@pytest.mark.slow
def test_one_layer_or_nothing_is_read_if_it_is_asked_for(runs, tmp_path):
    output = tmp_path / "page.html"
    found = report(runs("smoe"), output=output, layers=["1"])["classes"]
    assert list(found["experts"]) == ["blocks.1.feed_forward"]
    assert report(runs("smoe"), output=output, tokens=0)["classes"] is None
    assert 'id="classes"' not in output.read_text()
    assert report(runs("smoe"), output=output, tokens=300)["classes"]["sequences"] < 15
    (dense,) = [report(runs("dense"), output=output)]
    assert dense["classes"]["experts"] == {}
    assert "Experts by class" not in output.read_text()
    with pytest.raises(
        ConfigError, match=r"has no split 'test'.*use --tokens 0 to read no sequences"
    ):
        report(runs("smoe"), output=output, split="test")


@pytest.mark.slow
def test_the_best_checkpoint_is_read_and_named(train, tmp_path, capfd):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    folder = train(
        "best", table(20, 0), table(8, 1), optimizer={"learning_rate": 1e-12},
        checkpoint={"every": 2, "keep_best": True},
    )  # fmt: skip
    assert best_checkpoint(folder).name == "step-00000002"
    output = tmp_path / "page.html"
    found = report(folder, output=output)
    assert (found["checkpoint_step"], found["checkpoint_is_best"]) == (2, True)
    assert "step 2 (the best by validation score)" in output.read_text()
    found = report(folder, output=output, checkpoint=4)
    assert (found["checkpoint_step"], found["checkpoint_is_best"]) == (4, False)
    assert "the best by validation" not in output.read_text()
    command = ["report", str(folder), "--output", str(output)]
    assert polyad([*command, "--best", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["checkpoint_step"] == 2
    assert polyad([*command, "--best", "--checkpoint", "4"]) == 2
    assert "--best: is not allowed with --checkpoint 4" in capfd.readouterr().err
    unmarked = tmp_path / "unmarked"
    shutil.copytree(folder, unmarked)
    (unmarked / "checkpoints" / "best").unlink()
    assert report(unmarked)["checkpoint_step"] == 4
    capfd.readouterr()
    assert polyad(["report", str(unmarked), "--best"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no checkpoint is marked as the best" in line


@pytest.mark.slow
def test_many_classes_stand_with_the_worst_first(train, tmp_path):
    rows = [row | {"label": n % 25} for n, row in enumerate(made.rows(100, 0))]
    folder = train("many", rows[:50], rows[50:], steps=2)
    found = report(folder, output=tmp_path / "page.html")["classes"]
    assert found["confusion_matrix"] is None
    assert [c["samples"] for c in found["confusions"]] == sorted(
        (c["samples"] for c in found["confusions"]), reverse=True
    )
    text = (tmp_path / "page.html").read_text()
    Page(text)
    assert "the other 5 classes" in text
    assert "Most frequent confusions" in text
    assert "The expert most specialized in each class" in text
    for level in (levels[0] for levels in found["experts"].values()):
        counts = np.array(level["counts"])
        expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
        lift = np.where(expected >= 5, counts / expected, 0).max(0)
        ours = {each["class"]: each["lift"] for each in level["of_each_class"]}
        names = found["expert_classes"]
        assert ours == pytest.approx({n: x for n, x in zip(names, lift, strict=True) if x})
    (body,) = [part for part in text.split("<figure") if "Scores of each class" in part]
    shown = [cell.partition("<")[0] for cell in body.split('<td class="name">')[1:]]
    f1 = [found["per_class"][name]["f1"] for name in shown]
    assert len(f1) == 25
    assert f1 == sorted(f1)
