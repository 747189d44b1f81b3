"""WordPiece: BERT's own reader as the oracle, and a training that gives the same each time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.training import resolve_tokenizer, training_wanted
from polyad.data.text.tokenizers.vocabularies import SPECIAL, train_wordpiece

WORDS = [
    "the",
    "cat",
    "##s",
    "un",
    "##able",
    "house",
    "!",
    ",",
    "[",
    "]",
    "a",
    "##b",
    "中",
    "se",
    "##p",
]
TEXT = "The cats, unable! HOUSE the 中文 [SEP] ab zebra  Café [MASK]"


def write(folder: Path, tokens: list[str], **about: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    if about:
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_a_vocabulary_reads_text_as_transformers_does(tmp_path, lowercase, said):
    from transformers import BertTokenizer

    words = WORDS if lowercase else [*WORDS, "The", "HO", "##USE"]
    about = {"do_lower_case": lowercase} if said else {}
    folder = write(tmp_path / "bert", [*SPECIAL, *words], **about)
    ours = load_tokenizer(folder)
    theirs = BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=lowercase)
    plain = TEXT.replace("[SEP]", "").replace("[MASK]", "")
    assert ours.encode(plain) == theirs.encode(plain, add_special_tokens=False)
    assert ours.end_of_text == "[SEP]"
    # What a text says is text, and never the end of a document or a hidden token.
    ids = ours.encode(TEXT)
    assert {ours.vocabulary()[token] for token in ("[SEP]", "[MASK]")}.isdisjoint(ids)
    assert load_tokenizer(folder / "vocab.txt").fingerprint == ours.fingerprint
    ours.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == ours.fingerprint


def test_accents_and_chinese_are_read_as_the_folder_says(tmp_path):
    from transformers import BertTokenizerFast

    tokens = [*SPECIAL, "\u2028", "cafe", "caf\u00e9", "\u4e2d", "\u56fd", "\u4e2d\u56fd"]
    for number, switches in enumerate(
        ({}, {"strip_accents": False}, {"tokenize_chinese_chars": False})
    ):
        folder = write(tmp_path / f"{number}", tokens, do_lower_case=True, **switches)
        ours, theirs = load_tokenizer(folder), BertTokenizerFast.from_pretrained(folder)
        text = "Caf\u00e9 \u4e2d\u56fd"
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.vocabulary()["\u2028"] == len(SPECIAL)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(["the", "a"], r"no token \[UNK\]"), ([*SPECIAL, "a", "b", "a"], "'a' is there twice")],
)
def test_another_file_is_refused(tmp_path, tokens, message):
    with pytest.raises(DataError, match=message) as raised:
        load_tokenizer(write(tmp_path, tokens))
    assert str(raised.value).count("vocab.txt") == 2  # the file, and what it is not


@pytest.mark.slow
def test_training_gives_the_same_in_every_process(library_text, tmp_path):
    (tmp_path / "text").write_text(library_text[:60_000])
    code = (
        "import sys; from pathlib import Path\n"
        "from polyad.data.text.tokenizers.vocabularies import train_wordpiece\n"
        "text = Path(sys.argv[1]).read_text()\n"
        "print(train_wordpiece(lambda: iter([text]), 600).fingerprint)"
    )
    root = Path(__file__).resolve().parents[4]
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "text")],
            **{"capture_output": True, "text": True, "check": True, "cwd": root},
        ).stdout
        for _ in range(3)
    }
    assert len(prints) == 1


def test_a_trained_vocabulary_has_the_size_and_knows_its_text(library_text):
    tokenizer = train_wordpiece(lambda: iter([library_text]), 1000)
    vocabulary = tokenizer.vocabulary()
    assert len(vocabulary) == tokenizer.vocab_size == 1000
    assert [token for token, _ in sorted(vocabulary.items(), key=lambda t: t[1])][:5] == [*SPECIAL]
    ids = tokenizer.encode(library_text)
    assert vocabulary["[UNK]"] not in ids
    assert tokenizer.decode(tokenizer.encode("def main")) == "def main"
    assert tokenizer.encodes_in_pieces()


@pytest.mark.slow
def test_text_is_prepared_with_a_vocabulary_of_its_train_split(tmp_path, texts):
    manifest = prepare(str(texts), "wordpiece:500", tmp_path / "out", report=lambda line: None)
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.end_of_text) == (500, "[SEP]")
    data = PreparedData.open(tmp_path / "out")
    last = data.split("train").read_document(0)[-1]
    assert last == data.tokenizer().vocabulary()["[SEP]"]


@pytest.mark.parametrize("spec", ["wordpiece", "wordpiece:", "wordpiece:6", "wordpiece:x"])
def test_a_size_that_cannot_be_is_refused(spec):
    with pytest.raises(DataError, match="VOCAB_SIZE"):
        training_wanted(spec)


def test_a_text_without_words_is_refused():
    with pytest.raises(DataError, match="has no word"):
        resolve_tokenizer("wordpiece:100", training_texts=lambda: iter([" \n\t"]))
