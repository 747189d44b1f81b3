"""Tokenizers from the hub, its cache, and SentencePiece's files."""

import json
import shutil

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import (
    SentencePieceTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from tests.helpers.prepared import open_source, sentencepiece_model

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.fixture(scope="module")
def trained(library_text):
    return train_tokenizer(iter([library_text[:50_000]]), 400)


def test_gpt2_is_found_in_the_cache_and_in_a_snapshot_of_it(tmp_path, shared, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--gpt2" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text(COMMIT)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "gpt2_bpe" / name, snapshot)
    known = load_tokenizer(shared / "gpt2_bpe")
    for name in ("gpt2", str(snapshot)):
        tokenizer = load_tokenizer(name)
        assert tokenizer.fingerprint == known.fingerprint
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, END_OF_TEXT)
    with pytest.raises(DataError, match=r"^gpt3: no such tokenizer here"):
        load_tokenizer("gpt3")


def test_a_snapshot_says_which_token_ends_documents(tmp_path, trained):
    value = json.loads(trained.file_bytes())
    value["added_tokens"][0]["content"] = "<stop>"
    value["model"]["vocab"]["<stop>"] = value["model"]["vocab"].pop(END_OF_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(tmp_path).end_of_text == "<stop>"


sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module", params=[pytest.param("unigram", marks=pytest.mark.slow), "bpe"])
def model(request, library_text):
    return sentencepiece_model(library_text, model_type=request.param)


def test_ids_are_the_library_s(model, library_text):
    tokenizer = SentencePieceTokenizer(model)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines = [*library_text.splitlines(), "漢字 🙂", "", "  two  spaces "]
    assert tokenizer.encode_batch(lines) == [oracle.encode(line) for line in lines]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (600, "</s>")
    assert tokenizer.end_of_text_id == oracle.eos_id()
    ids = tokenizer.encode("def main(argv):")
    assert tokenizer.decode([*ids, 2, *ids]) == "def main(argv): def main(argv):"


def test_text_cannot_forge_the_end_of_a_document(model):
    tokenizer = SentencePieceTokenizer(model)
    ids = tokenizer.encode("one </s> two")
    assert tokenizer.end_of_text_id not in ids
    assert tokenizer.decode(ids) == "one </s> two"
    with pytest.raises(DataError, match="reads no special tokens in a text"):
        tokenizer.parsing()


@pytest.mark.slow
def test_piece_that_texts_have_cannot_end_documents(library_text):
    model = sentencepiece_model(library_text, user_defined_symbols="<stop>")
    tokenizer = SentencePieceTokenizer(model, "<stop>")
    tokenizer.encode("go on")
    with pytest.raises(DataError, match="--end-of-text TOKEN"):
        tokenizer.encode("go <stop> on")


def test_prepared_folder_keeps_the_model(model, texts, tmp_path):
    file = tmp_path / "any.model"
    file.write_bytes(model)
    manifest = prepare(str(texts), str(file), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == model
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    data = PreparedData.open(tmp_path / "out")
    assert data.tokenizer().fingerprint == manifest.tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "out").fingerprint == manifest.tokenizer.fingerprint
    assert load_tokenizer(file, "<s>").fingerprint != manifest.tokenizer.fingerprint
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    first = next(iter(open_source(str(texts)).documents())).text
    assert data.split("train").read_document(0).tolist() == [*oracle.encode(first), 2]
    (tmp_path / "out" / "tokenizer.model").write_bytes(model + b"\0")
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        PreparedData.open(tmp_path / "out").tokenizer()


def test_a_piece_that_the_model_lacks_cannot_end_documents(model):
    with pytest.raises(DataError, match=r"'<end>'.*--end-of-text"):
        SentencePieceTokenizer(model, "<end>")
