"""Labelled sequences with BERT: it learns, two texts are segments, and padding does nothing."""

import json

import numpy as np
import pytest
import torch
import yaml

from polyad.data.text.tokenizers.files import VOCABULARY_FILE, load_tokenizer
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers import sequences as made
from tests.helpers.bert import SPECIAL, their_bert
from tests.helpers.everyday import everyday
from tests.helpers.runs import (
    evaluation,
    records,
    refusal,
    run,
    run_and_listen,
    weights_of,
)

pytestmark = pytest.mark.distributed

CUES = [word for words in made.WORDS.values() for word in words.split()]
TREE = {
    "seed": 3,
    "model": {
        "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
        "num_segments": 3, "layer_norm_epsilon": 1e-12,
        "feed_forward": {
            "kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 32,
            "graph": "similarity",
        },
        "head": {"kind": "classification"},
    },
    "train": {"steps": 60, "global_batch_size": 16, "micro_batch_size": 8, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.003, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "loss": {"load_balance": 0.01},
    "evaluation": {"every": 0},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("sequences")
    vocabulary = [*SPECIAL, *made.FILLING, *CUES]
    padding = [f"[unused{number}]" for number in range(61 - len(vocabulary))]
    (root / VOCABULARY_FILE).write_text("\n".join([*vocabulary, *padding]) + "\n")
    made.folder_of(root / "table")
    draw = np.random.default_rng(0)
    pairs = []
    for number in range(48):
        one, other = draw.choice(CUES, 2, replace=False)
        second = " ".join([one if number % 2 else other, *draw.choice(made.FILLING, number % 4)])
        pairs.append({"s1": one, "s2": second, "label": "same" if number % 2 else "other"})
    made.write(root / "pairs" / "train.csv", pairs[:32])
    made.write(root / "pairs" / "dev.csv", pairs[32:])
    return root


@pytest.fixture
def config(tmp_path, data):
    path = tmp_path / "sequences.yaml"
    section = {"kind": "sequences", "path": str(data / "table"), "tokenizer": str(data)}
    tree = TREE | {"run": {"folder": str(tmp_path / "run")}, "data": section}
    path.write_text(yaml.safe_dump(tree))
    return path


def logits_alone(folder, inputs):
    """Answers for sequences one at a time, without a mask."""
    model, found = load_model(folder), []
    for ids, segments in inputs:
        with torch.no_grad():
            found.append(model(torch.tensor([ids]), None, torch.tensor([segments])).logits[0])
    return torch.stack(found)


@pytest.mark.slow
def test_it_learns_classes_and_padding_changes_nothing(workers, config, tmp_path, data):
    workers(1).run(run, config)
    checkpoint = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000060")
    result = workers(1).run(evaluation, tmp_path / "run")[0]
    assert result["accuracy"] > 0.9  # a third of the rows are of each class
    vocabulary = load_tokenizer(str(data)).vocabulary()
    inputs, labels = [], []
    for row in made.rows(21, 1):
        ids = [vocabulary[word] for word in ["[CLS]", *row["text"].split(), "[SEP]"]]
        inputs.append((ids, [0] * len(ids)))
        labels.append(sorted(made.WORDS).index(row["label"]))
    assert len({len(ids) for ids, _ in inputs}) > 5
    logits = logits_alone(checkpoint.folder, inputs)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert result["loss"] == pytest.approx(float(loss), abs=1e-5)
    right = (logits.argmax(-1) == torch.tensor(labels)).double().mean()
    assert result["accuracy"] == pytest.approx(float(right))
    assert records(tmp_path / "run")[-1]["sequences"] == 960


@pytest.mark.slow
def test_two_texts_are_two_segments(workers, config, tmp_path, data):
    keys = (
        f"data.path={data / 'pairs'}", "data.columns={text: s1, pair: s2}", "train.steps=4",
    )  # fmt: skip
    workers(1).run(run, config, *keys)
    result = workers(1).run(evaluation, tmp_path / "run")[0]
    checkpoint = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004")
    names = json.loads((checkpoint.folder / "classes.json").read_text())
    vocabulary = load_tokenizer(str(data)).vocabulary()
    lines = (data / "pairs" / "dev.csv").read_text().splitlines()[1:]
    inputs, labels = [], []
    for first, second, label in (line.split(",") for line in lines):
        parts = ["[CLS]", *first.split(), "[SEP]"], [*second.split(), "[SEP]"]
        ids = [vocabulary[word] for part in parts for word in part]
        inputs.append((ids, [0] * len(parts[0]) + [1] * len(parts[1])))
        labels.append(names.index(label))
    loss = torch.nn.functional.cross_entropy(
        logits_alone(checkpoint.folder, inputs), torch.tensor(labels)
    )
    assert result["loss"] == pytest.approx(float(loss), abs=1e-5)
    other = (f"run.folder={tmp_path / 'other'}", "model.num_segments=1")
    text = refusal(workers(1), config, *keys, *other)
    assert "model.num_segments: 1 is not allowed" in text


SGD = "optimizer={kind: sgd, learning_rate: 0.1}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [(), ("parallel.tensor_parallel_size=2",)], ids=["data", "tensor"]
)
def test_two_processes_are_one(workers, config, tmp_path, layout):
    keys = ("train.steps=4", "train.micro_batch_size=4", SGD)
    workers(1).run(run, config, f"run.folder={tmp_path / 'one'}", *keys)
    workers(2).run(run, config, f"run.folder={tmp_path / 'two'}", *keys, *layout)
    one, two = (
        weights_of(tmp_path / name / "checkpoints" / "step-00000004") for name in ("one", "two")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)


@everyday(
    "kind",
    ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"],
    keep=["BertForSequenceClassification"],
)
def test_it_begins_from_a_folder_of_transformers(workers, config, tmp_path, kind):
    theirs = their_bert(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    workers(1).run(
        run, config, f"checkpoint.init_from={tmp_path / 'theirs'}", "train.steps=1",
        "model.feed_forward={kind: dense, hidden_size: 96}", "optimizer.learning_rate=1e-20",
        "model.vocab_size=61",
    )  # fmt: skip
    begun = weights_of(tmp_path / "run" / "checkpoints" / "step-00000001")
    held = {name.removeprefix("bert."): value for name, value in theirs.state_dict().items()}
    assert torch.equal(begun["token_embedding.weight"], held["embeddings.word_embeddings.weight"])
    if kind != "BertForMaskedLM":  # which has none
        assert torch.equal(begun["head.pooler.dense.weight"], held["pooler.dense.weight"])
    assert begun["head.classifier.weight"].shape == (3, 32)
    assert begun["head.classifier.bias"].abs().max() < 1e-10


def test_numbers_begin_with_the_encoder_of_a_classifier_whose_classes_have_no_names(
    workers, config, tmp_path
):
    their_bert("BertForSequenceClassification", num_labels=3).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "polyad")
    rows = [{"text": cue, "label": number / 4} for number, cue in enumerate(CUES)]
    made.write(tmp_path / "numbers" / "train.csv", rows)
    made.write(tmp_path / "numbers" / "dev.csv", rows)
    ((_, said),) = workers(1).run(
        run_and_listen, config, f"checkpoint.init_from={tmp_path / 'ours'}", "train.steps=1",
        f"data.path={tmp_path / 'numbers'}", "data.task=regression",
        "model.feed_forward={kind: dense, hidden_size: 96}", "model.vocab_size=61",
    )  # fmt: skip
    assert "; initialized from the seed: head.classifier.*" in said
    begun = weights_of(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert begun["head.classifier.weight"].shape == (1, 32)
