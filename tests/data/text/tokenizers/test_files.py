"""Tokenizers from the hub, its cache, and SentencePiece's files."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.sources import open_source
from polyad.data.text.tokenizers.files import SentencePieceTokenizer, load_tokenizer
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from polyad.data.text.tokenizers.training import train_tokenizer

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
LOAD = """
import sys
from polyad.data.errors import DataError
from polyad.data.text.tokenizers.files import load_tokenizer
for name in sys.argv[1:]:
    try:
        tokenizer = load_tokenizer(name)
        print(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text)
    except DataError as error:
        print(error)
"""


def load(names, **environment):
    """Loads tokenizers in a process whose hub library reads this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def trained(library_text):
    return train_tokenizer(iter([library_text[:50_000]]), 400)


@pytest.mark.slow
def test_gpt2_is_found_in_the_cache_and_in_a_snapshot_of_it(tmp_path, shared):
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--gpt2" / "refs").mkdir()
    (tmp_path / "hub" / "models--gpt2" / "refs" / "main").write_text(COMMIT)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "gpt2_bpe" / name, snapshot)
    known = load_tokenizer(shared / "gpt2_bpe")
    expected = f"{known.fingerprint} 50257 {END_OF_TEXT}"
    names = ["gpt2", str(snapshot), "gpt3"]
    *found, unknown = load(names, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found == [expected] * 2
    assert unknown.startswith("gpt3: no such tokenizer here")


def test_a_snapshot_says_which_token_ends_documents(tmp_path, trained):
    value = json.loads(trained.file_bytes())
    value["added_tokens"][0]["content"] = "<stop>"
    value["model"]["vocab"]["<stop>"] = value["model"]["vocab"].pop(END_OF_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(tmp_path).end_of_text == "<stop>"


sentencepiece = pytest.importorskip("sentencepiece")


def train(text, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        minloglevel=2,
        **{"vocab_size": 600, "byte_fallback": True, **options},
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=[pytest.param("unigram", marks=pytest.mark.slow), "bpe"])
def model(request, library_text):
    return train(library_text, model_type=request.param)


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


@pytest.mark.slow
def test_piece_that_texts_have_cannot_end_documents(library_text):
    model = train(library_text, user_defined_symbols="<stop>")
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
