"""BERT from and to transformers: folders that transformers saved, and that it reads back."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.model.bert import BertConfig
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import load_model, open_weights
from polyad.train.exchange.convert import convert
from tests.helpers.bert import padded_input, their_bert, word_pieces
from tests.helpers.parity import assert_equal_files

KINDS = {
    "BertModel": "none",
    "BertForMaskedLM": "language",
    "BertForSequenceClassification": "classification",
}
WORDS = "the cat sat on the mat; a dog ran to the other cats and dogs in a house"


@pytest.fixture
def saved(tmp_path):
    """Saves a model of transformers, with a WordPiece tokenizer; returns model and folder."""

    def save(kind: str, **keys):
        model = their_bert(kind, **keys)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        pieces = word_pieces(tmp_path / "pieces", [WORDS], 61)
        load_tokenizer(pieces).save(folder / "tokenizer.json")
        return model, folder

    return save


@pytest.mark.parametrize(
    ("kind", "keys"), [*((kind, {}) for kind in KINDS), ("BertForMaskedLM", {"hidden_act": "relu"})]
)
def test_round_trip_through_a_checkpoint_is_bitwise(saved, tmp_path, kind, keys):
    import transformers

    theirs, folder = saved(kind, **keys)
    convert(folder, tmp_path / "ours", "polyad")
    there = convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    assert there["tokenizer"]
    assert_equal_files(tmp_path / "back", folder)
    again = getattr(transformers, kind).from_pretrained(tmp_path / "back").eval()
    ids, mask, segments = padded_input(3)
    given = {"attention_mask": mask.long(), "token_type_ids": segments}
    assert torch.equal(again(ids, **given)[0], theirs(ids, **given)[0])
    ours = load_model(tmp_path / "ours")
    assert ours.config.head.kind == KINDS[kind]
    close = {"atol": 1e-5, "rtol": 0}
    found, expected = ours(ids, mask, segments).logits, theirs(ids, **given)[0]
    if kind != "BertForSequenceClassification":
        found, expected = found[mask], expected[mask]
    torch.testing.assert_close(found, expected, **close)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.mask_token == "[MASK]"
    encoded = tokenizer("a cat", "the dogs")
    text = tokenizer.decode(encoded["input_ids"])
    assert text == "[CLS] a cat [SEP] the dogs [SEP]"
    assert encoded["token_type_ids"] == [0] * 4 + [1] * (len(encoded["input_ids"]) - 4)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (["yes", "no", "maybe"], ["yes", "no", "maybe"]),
        (["LABEL_0", "LABEL_1", "LABEL_2"], None),
        (["a", "a", "b"], ["a (0)", "a (1)", "b"]),
    ],
)
def test_classes_have_the_names_of_the_folder_in_its_order(tmp_path, names, known):
    theirs = their_bert("BertForSequenceClassification", num_labels=3)
    theirs.config.id2label = dict(enumerate(names))
    theirs.save_pretrained(tmp_path / "theirs")
    assert open_weights(tmp_path / "theirs").class_names == known
    convert(tmp_path / "theirs", tmp_path / "ours", "polyad")
    file = tmp_path / "ours" / "classes.json"
    assert (json.loads(file.read_text()) == known) if known else not file.exists()


def rewritten(folder: Path, change) -> Path:
    """Changes the tensors of a folder, in place."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def test_names_of_the_first_release_are_read(saved):
    # `gamma` and `beta`, positions as a buffer, and the head for the next sentence.
    theirs, folder = saved("BertForPreTraining")
    expected = theirs.state_dict()

    def old_name(name):
        name = re.sub("LayerNorm.weight$", "LayerNorm.gamma", name)
        return re.sub("LayerNorm.bias$", "LayerNorm.beta", name)

    def older(tensors):
        extra = {"bert.embeddings.position_ids": torch.arange(16)}
        return {old_name(name): value for name, value in tensors.items()} | extra

    weights = open_weights(rewritten(folder, older))
    assert isinstance(weights, FamilyWeights)
    assert weights.config.head.kind == "language"
    assert torch.equal(
        weights.whole("blocks.1.attention_norm.bias"),
        expected["bert.encoder.layer.1.attention.output.LayerNorm.bias"],
    )
    assert "cls.seq_relationship.weight, pooler.dense" in weights.note


def test_a_class_is_learned_from_a_folder_without_one(saved):
    theirs, folder = saved("BertForPreTraining")
    weights = FamilyWeights(folder)
    head = {"kind": "classification", "num_classes": 9}
    weights.check_config(BertConfig.model_validate(weights.config.model_dump() | {"head": head}))
    pooler = theirs.state_dict()["bert.pooler.dense.weight"]
    assert torch.equal(weights.whole("head.pooler.dense.weight"), pooler)
    fresh = weights.whole("head.classifier.weight")
    assert fresh.shape == (9, 32)
    assert 0.01 < fresh.std() < 0.03
    assert "head.classifier.weight, head.classifier.bias: random, as" in weights.note
    with pytest.raises(WeightsError, match=r"model\.num_layers 2 there, 3 here"):
        weights.check_config(weights.config.model_copy(update={"num_layers": 3}))


def test_experts_have_no_place_in_transformers():
    config = BertConfig.model_validate({"vocab_size": 61, "feed_forward": {"kind": "smoe"}})
    with pytest.raises(WeightsError, match=r"'smoe'.*`--to safetensors`"):
        family_of_model(config)
