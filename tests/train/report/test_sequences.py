"""The report of pairs, numbers and choices, of a BERT, of adapters, of two processes."""

import numpy as np
import pytest

from polyad.data.text.tokenizers.files import VOCABULARY_FILE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.train.exchange.convert import convert
from polyad.train.exchange.experts import Splitting
from polyad.train.report.command import report
from tests.helpers.bert import SPECIAL
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import (
    KINDS,
    SETTINGS,
    counted,
    one_by_one,
    others,
    table,
    trainer,
)
from tests.helpers.pages import Page
from tests.helpers.runs import counts_of, frame_of

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def train(workers, tmp_path_factory):
    return trainer(workers, tmp_path_factory)


@everyday("name", SETTINGS, keep=["choices"])
def test_pairs_numbers_and_choices(train, tmp_path, name):
    rows = others()[name]
    train_rows, held_out = rows[:16], rows[16:]
    folder = train(name, train_rows, held_out, steps=2, data=SETTINGS[name])
    result = report(folder, output=tmp_path / "page.html")["specialization"]
    Page((tmp_path / "page.html").read_text())
    first, labels = ([row[key] for row in held_out] for key in ("s1", "label"))
    if name == "choices":
        choices = [(row["c0"], row["c1"]) for row in held_out]
        first = [text for text in first for _ in range(2)]
        second = [choice for each in choices for choice in each]
        groups = [int(choice == label) for label in labels for choice in range(2)]
        classes = ["wrong choices", "right choices"]
    else:
        second = [row["s2"] for row in held_out]
        groups = ["ab".index(label) for label in labels] if name == "pairs" else thirds(labels)
        classes = ["a", "b"] if name == "pairs" else ["up to 5.25", "5.25 to 6.5", "above 6.5"]
    _, tokens = one_by_one(folder, first, second=second)
    assert set(frame_of(result, "counts", by="class")["class"]) == set(classes)
    for layer in tokens[0]:
        ours = counts_of(result, layer, "class", classes)
        np.testing.assert_array_equal(ours, counted(tokens, layer, groups, len(classes)))


def thirds(labels):
    """Thirds of 16 different numbers: the edges are the 6th and the 11th in order."""
    edges = sorted(labels)[5], sorted(labels)[10]
    return [(label > edges[0]) + (label > edges[1]) for label in labels]


def test_a_bert_counts_its_own_tokens(train, tmp_path):
    rows = others()["pairs"]
    words = sorted({word for row in rows for word in (row["s1"], row["s2"])})
    (tmp_path / VOCABULARY_FILE).write_text("\n".join([*SPECIAL, *words]) + "\n")
    folder = train(
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
def test_adapters_of_a_split_model(train, trained, tmp_path_factory, tmp_path):
    base = tmp_path_factory.mktemp("split") / "start"
    convert(trained("dense"), base, "polyad", Splitting("num_experts=8,top_k=4,blocks=[1]"))
    model = Checkpoint(base).model_config().model_dump(mode="json")
    folder = train(
        "lora", table(20, 0), table(8, 1), steps=2, data={"tokenizer": None},
        model=model | {"head": {"kind": "classification"}},
        checkpoint={"init_from": str(base)},
        adapt={"lora": {"rank": 4, "trained": ["head.*"]}},
        optimizer={"learning_rate": 0.02, "weight_decay": 0.0},
    )  # fmt: skip
    result = report(folder, output=tmp_path / "page.html")["specialization"]
    assert [row["module"] for row in result["levels"]] == ["blocks.1.feed_forward"]
