"""The report of pairs, numbers and choices, of a BERT, of adapters, of two processes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch.nn.functional import cross_entropy

from polyad.data.text.tokenizers.vocabularies import SPECIAL, VOCABULARY_FILE
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from polyad.train.exchange.convert import convert
from polyad.train.exchange.experts import Splitting
from polyad.train.reading import read
from polyad.train.report.classes import Predictions
from polyad.train.report.command import report
from polyad.train.tasks.samples import SequenceSamples
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import (
    KINDS,
    NAMES,
    SETTINGS,
    counted,
    one_by_one,
    others,
    table,
    trainer,
)
from tests.helpers.pages import Page
from tests.helpers.runs import evaluation

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def train(workers, tmp_path_factory):
    return trainer(workers, tmp_path_factory)


@everyday("name", SETTINGS, keep=["choices"])
def test_pairs_numbers_and_choices(train, tmp_path, name):
    rows = others()[name]
    train_rows, held_out = rows[:16], rows[16:]
    folder = train(name, train_rows, held_out, steps=2, data=SETTINGS[name])
    found = report(folder, output=tmp_path / "page.html", top=3)["classes"]
    Page((tmp_path / "page.html").read_text())
    first = [row["s1"] for row in held_out]
    labels = [row["label"] for row in held_out]
    if name == "choices":
        seconds = [(row["c0"], row["c1"]) for row in held_out]
        logits, tokens = one_by_one(
            folder, [text for text in first for _ in range(2)],
            second=[choice for each in seconds for choice in each],
        )  # fmt: skip
        logits = logits.view(-1, 2)
        losses = cross_entropy(logits, torch.tensor(labels), reduction="none")
        groups = [int(choice == label) for label in labels for choice in range(2)]
        assert found["expert_classes"] == ["wrong choices", "right choices"]
        predicted = logits.argmax(-1).tolist()
        assert found["confusion_matrix"] == confusion_matrix(labels, predicted).tolist()
        for each in found["largest_losses"]:
            row = each["number"]
            assert each["true"] == f"{labels[row]}: {seconds[row][labels[row]]}"
            assert each["predicted"] == f"{predicted[row]}: {seconds[row][predicted[row]]}"
            assert each["texts"] == [first[row]]
    else:
        seconds = [row["s2"] for row in held_out]
        logits, tokens = one_by_one(folder, first, second=seconds)
        for each in found["largest_losses"]:
            assert each["texts"] == [first[each["number"]], seconds[each["number"]]]
    if name == "pairs":
        groups = ["ab".index(label) for label in labels]
        losses = cross_entropy(logits, torch.tensor(groups), reduction="none")
        assert found["expert_classes"] == ["a", "b"]
    elif name == "numbers":
        losses = (logits[:, 0] - torch.tensor(labels)).square()
        groups = thirds(labels)
        assert found["expert_classes"] == ["up to 5.25", "5.25 to 6.5", "above 6.5"]
        assert found["per_class"] == {}
        assert {"pearson", "spearman"} <= found.keys()
        assert all(each["probability"] is None for each in found["largest_losses"])
    shown = [each["loss"] for each in found["largest_losses"]]
    assert shown == pytest.approx(losses.topk(3).values.tolist(), rel=1e-4)
    for layer, (level,) in found["experts"].items():
        counts = counted(tokens, layer, groups, len(found["expert_classes"]))
        np.testing.assert_array_equal(level["counts"], counts)


def thirds(labels):
    """Thirds of 16 different numbers: the edges are the 6th and the 11th in order."""
    edges = sorted(labels)[5], sorted(labels)[10]
    return [(label > edges[0]) + (label > edges[1]) for label in labels]


def test_a_bert_shows_both_texts_without_its_own_tokens(train, workers, tmp_path):
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
    found = report(folder, output=tmp_path / "page.html", top=16)["classes"]
    assert {each["number"] for each in found["largest_losses"]} == set(range(16))
    for each in found["largest_losses"]:
        row = rows[16 + each["number"]]
        assert each["texts"] == [row["s1"], row["s2"]]
    scored = workers(1).run(evaluation, folder)[0]
    assert found["loss"] == pytest.approx(scored["loss"])
    (levels,) = found["experts"].values()
    assert np.sum(levels[0]["counts"]) == 2 * 16 * 5  # [CLS] one [SEP] other [SEP], top-2


@everyday("start", ["dense", "split"], keep=["dense"])
def test_adapters_of_a_dense_model_and_of_a_split_one(
    train, workers, trained, tmp_path_factory, tmp_path, start
):
    base = trained("dense")
    theirs = load_config(base / "config.yaml").model
    if start == "split":
        base = tmp_path_factory.mktemp("split") / "start"
        convert(trained("dense"), base, "polyad", Splitting("num_experts=8,top_k=4,blocks=[1]"))
        theirs = Checkpoint(base).model_config()
    folder = train(
        "lora", table(20, 0), table(8, 1), steps=2, data={"tokenizer": None},
        model=theirs.model_dump(mode="json") | {"head": {"kind": "classification"}},
        checkpoint={"init_from": str(base)},
        adapt={"lora": {"rank": 4, "trained": ["head.*"]}},
        optimizer={"learning_rate": 0.02, "weight_decay": 0.0},
    )  # fmt: skip
    found = report(folder, output=tmp_path / "page.html")["classes"]
    scored = workers(1).run(evaluation, folder)[0]
    assert found["loss"] == pytest.approx(scored["loss"])
    assert found["per_class"] == scored["per_class"]
    layers = {"split": ["blocks.1.feed_forward"], "dense": []}[start]
    assert list(found["experts"]) == layers


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_read_on_one(train, tmp_path):
    rows = table(20, 1)
    folder = train(
        "parallel", table(60, 0), rows, processes=2, parallel={"expert_parallel_size": 2}
    )
    found = report(folder, output=tmp_path / "page.html")["classes"]
    names = sorted(NAMES.values())
    labels = [names.index(row["label"]) for row in rows]
    logits, tokens = one_by_one(folder, [row["text"] for row in rows])
    matrix = confusion_matrix(labels, logits.argmax(-1).tolist(), labels=range(3))
    assert found["confusion_matrix"] == matrix.tolist()
    for layer, (level,) in found["experts"].items():
        np.testing.assert_array_equal(level["counts"], counted(tokens, layer, labels, 3))


def test_weights_that_are_not_finite_are_one_line(train):
    folder = train("smoe", table(8, 0), table(8, 1), steps=1)
    config = load_config(folder / "config.yaml")
    task = SequenceTask.open(config.for_task())
    model = load_model(find_checkpoint(folder))
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    samples = SequenceSamples(task, "validation")
    predictions = Predictions(samples)
    read(model, [], samples, [predictions], batch_size=4)
    with pytest.raises(ConfigError, match="the outputs of the model are not finite"):
        predictions.result(examples=1)
