"""The report of labelled sequences, against plain loops over its rows without padding."""

import json
import shutil

import numpy as np
import pytest
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score

from polyad.data.text.tokenizers.files import VOCABULARY_FILE
from polyad.parallel.checkpoint.load import Checkpoint, best_checkpoint
from polyad.train.exchange.change import Splitting
from polyad.train.exchange.convert import convert
from polyad.train.experts.knockout import Change
from polyad.train.experts.probing import RoutedLayer
from polyad.train.report.command import render_report, report
from polyad.train.report.held_out import Effect, ExpertRow, ReportData
from polyad.train.report.top_tokens import Context
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers.bert import SPECIAL
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import KINDS, NAMES, SETTINGS, counted, one_by_one, others, table
from tests.helpers.pages import Page
from tests.helpers.runs import counts_of, frame_of

pytestmark = pytest.mark.distributed
CONTENT = {
    "run": "run", "model": "gpt2", "parameters": 1, "active_parameters": 1, "checkpoint": "run",
    "checkpoint_is_best": False,
}  # fmt: skip


def inputs_of(name, rows):
    """The texts that are read, those beside them, the class of each by number, and all classes."""
    if name in KINDS:
        names = sorted(NAMES.values())
        texts = [row["text"] for row in rows]
        return texts, None, [names.index(row["label"]) for row in rows], names
    first, labels = ([row[key] for row in rows] for key in ("s1", "label"))
    if name == "choices":
        first = [text for text in first for _ in range(2)]
        second = [row[choice] for row in rows for choice in ("c0", "c1")]
        groups = [int(choice == label) for label in labels for choice in range(2)]
        return first, second, groups, ["wrong choices", "right choices"]
    second = [row["s2"] for row in rows]
    if name == "pairs":
        return first, second, ["ab".index(label) for label in labels], ["a", "b"]
    # Thirds of 16 different numbers: the edges are the 6th and the 11th in order.
    edges = sorted(labels)[5], sorted(labels)[10]
    groups = [(label > edges[0]) + (label > edges[1]) for label in labels]
    return first, second, groups, ["up to 5.25", "5.25 to 6.5", "above 6.5"]


CASES = [*(kind for kind in KINDS if kind != "dense"), *SETTINGS]


@everyday("name", CASES, keep=["mumoe", "choices"])
def test_numbers_are_those_of_a_loop_over_rows(fine_tuned, tmp_path, name):
    if name in KINDS:
        rows = table(20, 1)
        folder = fine_tuned(name, table(60, 0), rows)
    else:
        rows = others()[name][16:]
        folder = fine_tuned(name, others()[name][:16], rows, steps=2, data=SETTINGS[name])
    result = report(folder, output=tmp_path / "page.html")
    Page((tmp_path / "page.html").read_text())
    first, second, groups, classes = inputs_of(name, rows)
    _, tokens = one_by_one(folder, first, second=second)
    results = result["specialization"]
    assert set(frame_of(results, "counts", by="class")["class"]) == set(classes)
    levels = frame_of(results, "levels")
    assert list(levels["module"].unique()) == list(tokens[0])
    by_place = {(row["layer"], row["expert"]): row for row in result["experts"]}
    for layer, of_layer in levels.groupby("module", sort=False):
        tables = [counts_of(results, layer, "class", classes, level) for level in of_layer["level"]]
        # By hand every token of each row, and no padding.
        counts = counted(tokens, layer, groups, len(classes))
        np.testing.assert_allclose(np.concatenate(tables), counts, rtol=1e-4, atol=1e-4)
        for level, table_SY in enumerate(tables):
            (measures,) = frame_of(results, "labels", module=layer, level=level).to_dict("records")
            parts = (table_SY.sum(1), table_SY.sum(0), table_SY.flatten())
            of_experts, of_classes, of_both = (entropy(part, base=2) for part in parts)
            bits = of_experts + of_classes - of_both
            assert measures["information_bits"] == pytest.approx(bits, abs=1e-9)
            if name != "mumoe":  # scikit-learn rounds what is no whole number
                nats = mutual_info_score(None, None, contingency=table_SY)
                assert measures["information_bits"] == pytest.approx(nats / np.log(2), abs=1e-9)
            for expert, share in enumerate(table_SY.sum(1)):
                title = f"{level}.{expert}" if len(tables) > 1 else str(expert)
                row = by_place.pop((layer, title))
                assert row["share"] == pytest.approx(share / table_SY.sum())
    assert not by_place


def test_of_hidden_labels_there_is_nothing_to_tell(fine_tuned, refused):
    folder = fine_tuned("smoe", table(24, 1), table(10, 2), steps=1)
    hidden = [json.dumps(row | {"label": -1}) + "\n" for row in table(10, 2)]
    (folder.parent / "table" / "test.jsonl").write_text("".join(hidden))
    line = refused("experts", "specialize", folder, "--split", "test")
    assert "table (test): its labels are hidden" in line


def test_classes_and_contexts_that_look_like_markup_are_text():
    read = ReportData(
        data="d", split="validation", unit="sequence", units=1, of_units=1,
        labels=None, specialization=None, knockout=None,
    )  # fmt: skip
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(1,))
    effect = Effect("class", "<i>bad</i>", Change(2.0, 1.5, 2.5), 0.5)
    row = ExpertRow(layer, "0", 1.0, effect, [Context(0.5, 0, 0, 0, "<b>", "</code>", "<i>")])
    text = render_report(CONTENT, [], SequenceTask, "", [layer], [row], read)
    assert not Page(text).tags & {"i", "u"}
    for part in ("class &lt;i&gt;bad&lt;/i&gt;", "&lt;b&gt;", "&lt;/code&gt;"):
        assert part in text


@pytest.mark.slow
def test_the_best_checkpoint_is_read_and_named(fine_tuned, tmp_path):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    folder = fine_tuned(
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


def test_a_bert_counts_its_own_tokens(fine_tuned, tmp_path):
    rows = others()["pairs"]
    words = sorted({word for row in rows for word in (row["s1"], row["s2"])})
    (tmp_path / VOCABULARY_FILE).write_text("\n".join([*SPECIAL, *words]) + "\n")
    folder = fine_tuned(
        "bert", rows[:16], rows[16:], steps=2,
        data=SETTINGS["pairs"] | {"tokenizer": str(tmp_path)},
        model={
            "kind": "bert", "num_layers": 1, "hidden_size": 16, "num_heads": 2,
            "sequence_length": 8, "num_segments": 2, "head": {"kind": "classification"},
            "feed_forward": KINDS["smoe"],
        },
    )  # fmt: skip
    result = report(folder, output=tmp_path / "page.html")["specialization"]
    assert len(result["levels"]) == 1
    # [CLS] one [SEP] other [SEP], top-2
    assert frame_of(result, "counts", by="class")["tokens"].sum() == 2 * 16 * 5


@pytest.mark.slow
def test_adapters_of_a_split_model(fine_tuned, trained, tmp_path_factory, tmp_path):
    base = tmp_path_factory.mktemp("split") / "start"
    convert(trained("dense"), base, "polyad", Splitting("num_experts=8,top_k=4,blocks=[1]"))
    model = Checkpoint(base).model_config().model_dump(mode="json")
    folder = fine_tuned(
        "lora", table(20, 0), table(8, 1), steps=2, data={"tokenizer": None},
        model=model | {"head": {"kind": "classification"}},
        checkpoint={"init_from": str(base)},
        adapt={"lora": {"rank": 4, "trained": ["head.*"]}},
        optimizer={"learning_rate": 0.02, "weight_decay": 0.0},
    )  # fmt: skip
    result = report(folder, output=tmp_path / "page.html")["specialization"]
    assert [row["module"] for row in result["levels"]] == ["blocks.1.feed_forward"]
