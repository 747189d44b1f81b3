"""Labelled sequences with BERT: it learns, two texts are segments, and padding does nothing."""

import json

import pytest
import torch

from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from tests.helpers.bert import their_bert
from tests.helpers.everyday import everyday
from tests.helpers.runs import evaluation, refusal, run_and_listen, weights_of

pytestmark = pytest.mark.distributed


@pytest.fixture
def config(tmp_path, task_config):
    return task_config(tmp_path, "pairs")


@pytest.mark.slow
def test_two_texts_are_two_segments_and_padding_changes_nothing(workers, task_run, task_data):
    """Against the answers for sequences one at a time, without a mask."""
    (result,) = workers(1).run(evaluation, task_run("pairs"))
    folder = find_checkpoint(task_run("pairs"))
    names, model = json.loads((folder / "classes.json").read_text()), load_model(folder)
    vocabulary = load_tokenizer(str(task_data / "words")).vocabulary()
    lines = (task_data / "pairs" / "dev.csv").read_text().splitlines()[1:]
    logits, labels, lengths = [], [], set()
    for first, second, label in (line.split(",") for line in lines):
        parts = ["[CLS]", *first.split(), "[SEP]"], [*second.split(), "[SEP]"]
        ids = torch.tensor([[vocabulary[word] for part in parts for word in part]])
        segments = torch.tensor([[0] * len(parts[0]) + [1] * len(parts[1])])
        with torch.no_grad():
            logits.append(model(ids, None, segments).logits[0])
        labels.append(names.index(label))
        lengths.add(ids.shape[1])
    assert len(lengths) > 3
    logits, labels = torch.stack(logits), torch.tensor(labels)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert result["loss"] == pytest.approx(float(loss), abs=1e-5)
    right = (logits.argmax(-1) == labels).double().mean()
    assert result["accuracy"] == pytest.approx(float(right))


def test_two_texts_need_two_segments(workers, config):
    assert "model.num_segments: 1 is not" in refusal(workers(1), config, "model.num_segments=1")


@everyday(
    ("kind", "classes"),
    [("BertModel", 2), ("BertForMaskedLM", 2), ("BertForSequenceClassification", 2),
     ("BertForSequenceClassification", 3)],
    keep=[("BertForSequenceClassification", 3)],
)  # fmt: skip
def test_it_begins_from_a_folder_of_transformers(workers, config, tmp_path, kind, classes):
    """A head of classes without names is another one, though a task has as many."""
    theirs = their_bert(kind, num_labels=classes)
    theirs.save_pretrained(tmp_path / "theirs")
    ((_, said),) = workers(1).run(
        run_and_listen, config, f"checkpoint.init_from={tmp_path / 'theirs'}", "train.steps=1",
        "model.feed_forward={kind: dense, hidden_size: 96}", "optimizer.learning_rate=1e-20",
        "model.hidden_size=32", "model.num_heads=4", "model.layer_norm_epsilon=1e-12",
    )  # fmt: skip
    assert "; initialized from the seed: head." in said
    begun = weights_of(tmp_path / "run" / "checkpoints" / "step-00000001")
    held = {name.removeprefix("bert."): value for name, value in theirs.state_dict().items()}
    assert torch.equal(begun["token_embedding.weight"], held["embeddings.word_embeddings.weight"])
    if kind != "BertForMaskedLM":  # which has none
        assert torch.equal(begun["head.pooler.dense.weight"], held["pooler.dense.weight"])
    assert begun["head.classifier.weight"].shape == (2, 32)
    assert begun["head.classifier.bias"].abs().max() < 1e-10
