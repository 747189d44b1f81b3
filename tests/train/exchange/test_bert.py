"""A BERT in groups of units, with copied experts, and with adapters: what it was, it computes."""

import pytest
import torch
import yaml

from data.text.tokenizers.wordpiece import SPECIAL, VOCABULARY_FILE
from parallel.weights import load_model
from tests.helpers import sequences as made
from tests.helpers.bert import padded_input, their_bert
from tests.helpers.runs import evaluation, records, run_and_listen
from train.exchange.convert import convert
from train.exchange.split import Splitting
from train.exchange.upcycle import Upcycling

CLASSES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
CUES = [word for words in made.WORDS.values() for word in words.split()]
TREE = {
    "seed": 3,
    "model": {
        "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
        "num_segments": 3, "layer_norm_epsilon": 1e-12, "vocab_size": 61,
        "feed_forward": {"kind": "dense", "hidden_size": 96}, "head": {"kind": "classification"},
    },
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32"},
    "optimizer": {"kind": "sgd", "learning_rate": 0.05, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "evaluation": {"every": 0},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Folders of transformers' BERT by class, with a vocabulary."""
    root = tmp_path_factory.mktemp("theirs")
    vocabulary = [*SPECIAL, *made.FILLING, *CUES]
    padding = [f"[unused{number}]" for number in range(61 - len(vocabulary))]
    for name in CLASSES:
        their_bert(name).save_pretrained(root / name)
        (root / name / VOCABULARY_FILE).write_text("\n".join([*vocabulary, *padding]) + "\n")
    made.folder_of(root / "table")
    return root


@pytest.fixture
def config(tmp_path, theirs):
    """Fine-tuning to three classes."""
    section = {"kind": "sequences", "path": str(theirs / "table")}
    tree = TREE | {"run": {"folder": str(tmp_path / "run")}, "data": section}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "config.yaml"


def output_of(folder, dtype=torch.float64):
    """What a model gives for padded sequences, of the tokens that mean something."""
    ids, mask, segments = padded_input()
    model = load_model(folder).to(dtype)
    with torch.no_grad():
        output = model(ids, mask, segments).logits
    return output[mask] if output.dim() == 3 else output


@pytest.mark.parametrize("name", CLASSES)
def test_split_and_copied_experts_give_the_dense_output_and_merged_ones_its_weights(
    theirs, tmp_path, name
):
    dense = theirs / name
    changes = {
        "split": Splitting("num_experts=8,top_k=8,blocks=[1]"),
        "grouped": Splitting("num_experts=4,top_k=4,experts=grouped"),
        "copies": Upcycling("num_experts=4,top_k=2,graph=similarity"),
    }
    for each, change in changes.items():
        notes = convert(dense, tmp_path / each, "polyad", change)["notes"]
        assert any(note.endswith("the dense model's, but for rounding") for note in notes)
        for dtype, close in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
            found, expected = output_of(tmp_path / each, dtype), output_of(dense, dtype)
            torch.testing.assert_close(found, expected, rtol=close, atol=close)
    convert(tmp_path / "split", tmp_path / "merged", "huggingface", merge=True)
    expected, merged = (load_model(p).state_dict() for p in (dense, tmp_path / "merged"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[each], value) for each, value in expected.items())
    fewer = Splitting("num_experts=8,top_k=2")
    convert(dense, tmp_path / "fewer", "polyad", fewer)
    assert (output_of(tmp_path / "fewer") - output_of(dense)).abs().max() > 1e-3


def begun(workers, config, start, folder, *keys):
    """A run with the weights of a folder; gives the losses of its steps, and what it said."""
    words = [f"checkpoint.init_from={start}", f"run.folder={folder}", *keys]
    saved = start / "config.yaml"
    if saved.exists():  # of ours, with the feed-forward that it has become
        section = yaml.safe_load(saved.read_text())["model"]["feed_forward"]
        words.append(f"model.feed_forward={yaml.safe_dump(section, default_flow_style=True)}")
    ((_, said),) = workers(1).run(run_and_listen, config, *words)
    return [line["loss"] for line in records(folder)], said


@pytest.mark.distributed
def test_a_run_with_a_new_head_begins_from_them_where_it_begins_from_the_dense_one(
    workers, theirs, config, tmp_path
):
    dense = theirs / "BertModel"
    convert(dense, tmp_path / "split", "polyad", Splitting("num_experts=8,top_k=8,blocks=[1]"))
    convert(dense, tmp_path / "copies", "safetensors", Upcycling("num_experts=4,placement=[1]"))
    of_dense, _ = begun(workers, config, dense, tmp_path / "dense-run")
    for name in ("split", "copies"):
        losses, said = begun(workers, config, tmp_path / name, tmp_path / f"{name}-run")
        assert "; new from the seed: head.classifier.*" in said
        assert losses[0] == pytest.approx(of_dense[0], rel=1e-6)
        # With all units the gradients are the dense model's; each copy has a part of the tokens.
        assert (losses[1] == pytest.approx(of_dense[1], rel=1e-6)) == (name == "split")
    # A language model has no pooler to begin with.
    masked = tmp_path / "masked"
    convert(theirs / "BertForMaskedLM", masked, "polyad", Splitting("num_experts=8,top_k=4"))
    _, said = begun(workers, config, masked, tmp_path / "masked-run")
    assert "; new from the seed: head.*" in said
    result = workers(1).run(evaluation, tmp_path / "masked-run")[0]
    assert result["sequences_scored"] == 21
