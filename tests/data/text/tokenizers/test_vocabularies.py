"""Vocabularies of words, of characters and of WordPiece."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS
from polyad.data.text.dataset import PreparedData
from polyad.data.text.documents import open_source
from polyad.data.text.prepare import prepare
from polyad.data.text.source import ByteShares
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from polyad.data.text.tokenizers.training import resolve_tokenizer, training_wanted
from polyad.data.text.tokenizers.vocabularies import (
    SPECIAL,
    WordTokenizer,
    train_characters,
    train_wordpiece,
    train_words,
)
from tests.helpers.prepared import jsonl, silent


def word_file(path, vocabulary, unknown="<unk>", splitter=pre_tokenizers.WhitespaceSplit):
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = splitter()
    backend.save(str(path))
    return str(path)


def test_vocabulary_by_hand():
    texts = ["b a  b\nc", "<unk> b a d"]
    trained = train_words(iter(texts), None, END_OF_TEXT)
    # <unk> and the end, then b (3), a (2), and c and d (1 each) by their letters.
    assert trained.encode("b a c d <unk> new") == [2, 3, 4, 5, 0, 0]
    assert (trained.vocab_size, trained.end_of_text_id) == (6, 1)
    assert trained.decode([2, 3, 0, 1]) == f"b a <unk> {END_OF_TEXT}"
    assert train_words(iter(texts), 4, END_OF_TEXT).encode("b a c d") == [2, 3, 0, 0]


def test_real_text_agrees_with_the_library(shared, tmp_path):
    content = (shared / "wikitext2" / "valid.txt").read_text()
    other = (shared / "wikitext2" / "test.txt").read_text()
    lines = content.splitlines(keepends=True)
    trained = train_words(iter(lines), None, "<eos>")
    # As Transformer-XL counts for WikiText: every word, <unk> among them, and <eos>.
    assert trained.vocab_size == len(set(content.split())) + 1
    trained.save(tmp_path / "tokenizer.json")
    oracle = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (content, other):
        assert trained.encode(text) == oracle.encode(text).ids
    assert 0 in trained.encode(other)


def test_end_of_a_document_cannot_be_forged():
    trained = train_words(iter([f"a {END_OF_TEXT} b"]), None, END_OF_TEXT)
    assert trained.encode(f"a {END_OF_TEXT} b") == [2, 0, 3]


def test_saved_file_is_read_as_words(tmp_path):
    trained = train_words(iter(["one two two"]), None, END_OF_TEXT)
    trained.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, WordTokenizer)
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode("two one three") == [2, 3, 0]


@pytest.mark.parametrize("size", [None, 200])
def test_prepared_words_of_the_train_split(tmp_path, texts, size):
    manifest = silent(str(texts), f"words:{size}" if size else "words", tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    documents = [d.text for d in open_source(str(texts)).documents()]
    held_out = _held_out(documents)
    train = [t for i, t in enumerate(documents) if i not in held_out]
    counts = Counter(word for text in train for word in text.split())
    assert manifest.tokenizer.vocab_size == (size or len(counts) + 2)
    tokenizer = data.tokenizer()
    assert isinstance(tokenizer, WordTokenizer)
    stream = data.split("train")
    kept = {word for word, _ in sorted(counts.items(), key=lambda p: (-p[1], p[0]))}
    for number, text in enumerate(train):
        ids = stream.read_document(number).tolist()
        assert len(ids) == len(text.split()) + 1
        if size is None:
            assert 0 not in ids
            assert set(text.split()) <= kept
            assert tokenizer.decode(ids[:-1]) == " ".join(text.split())
    for name in SPLITS:  # a word is a token, and an end is none
        split = manifest.splits[name]
        assert split.tokens == split.words + split.documents


def _held_out(documents):
    shares = ByteShares("train", {"validation": 0.05, "test": 0.05})
    splits = [shares.split_of(len(text.encode())) for text in documents]
    return {i for i, name in enumerate(splits) if name != "train"}


@pytest.mark.parametrize("splitter", [pre_tokenizers.WhitespaceSplit, pre_tokenizers.Whitespace])
def test_unknown_word_without_unk_names_word_and_document(tmp_path, splitter):
    vocabulary = {"a": 0, "b": 1, "</s>": 2}
    file = word_file(tmp_path / "words.json", vocabulary, splitter=splitter)
    source = jsonl(tmp_path / "texts.jsonl", ["a b", "b a", "a zebra b"])
    with pytest.raises(DataError, match=r"^texts\.jsonl#2: the word 'zebra' is not in") as caught:
        silent(source, file, tmp_path / "out")
    assert "<unk>" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    silent(jsonl(tmp_path / "known.jsonl", ["a b"] * 3), file, tmp_path / "out")
    assert PreparedData.open(tmp_path / "out").split("train").read(0, 3).tolist() == [0, 1, 2]
    forged = jsonl(tmp_path / "forged.jsonl", ["a </s> b"])
    with pytest.raises(DataError):
        silent(forged, file, tmp_path / "other")


def test_words_that_python_alone_separates():
    # \x1c is white space for str.split(), by which words are counted.
    assert train_words(iter(["a\x1cb"]), None, END_OF_TEXT).encode("a\x1cb") == [2, 3]


@pytest.mark.parametrize("spec", ["words:", "words:2", "words:x", "words:-1"])
def test_bad_size_is_refused(spec):
    with pytest.raises(DataError, match="whole number of at least 3"):
        resolve_tokenizer(spec, training_texts=lambda: iter(["a"]))


def test_unk_cannot_end_documents(tmp_path):
    with pytest.raises(DataError, match=re.escape("'<unk>' cannot end")):
        resolve_tokenizer("words", end_of_text="<unk>", training_texts=lambda: iter(["a"]))
    # An unknown word in a text would end its document.
    file = word_file(tmp_path / "words.json", {"<unk>": 0, "a": 1, "</s>": 2})
    with pytest.raises(DataError, match=r"words\.json: '<unk>' stands for unknown words"):
        load_tokenizer(file, "<unk>")
    assert load_tokenizer(file).encode("a b </s>") == [1, 0, 0]


def test_text_without_a_word_has_no_vocabulary():
    with pytest.raises(DataError, match="has no word"):
        train_words(iter([" \n", "<unk>"]), None, END_OF_TEXT)


def test_each_character_is_a_token_and_text_comes_back(tmp_path, library_text):
    text = library_text + "\0\t\r\n  é e\u0301 \u2028 🙂 <unk>" + END_OF_TEXT
    tokenizer = train_characters(iter([text[:5000], text[5000:]]), END_OF_TEXT)
    assert tokenizer.vocab_size == 2 + len(set(text))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert min(ids) > 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids[:3], 1]) == text[:3] + END_OF_TEXT
    assert tokenizer.decode(tokenizer.encode("a☃☃b")) == "a<unk><unk>b"
    assert tokenizer.encodes_in_pieces()
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.fingerprint, loaded.encode(text)) == (tokenizer.fingerprint, ids)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode("def main").ids == tokenizer.encode("def main")


def test_the_vocabulary_is_that_of_the_train_split(tmp_path):
    (tmp_path / "a.txt").write_text("ab\n" * 1000 + "☃")
    manifest = prepare(
        str(tmp_path / "a.txt"), "characters", tmp_path / "out", report=lambda line: None
    )
    assert manifest.tokenizer.vocab_size == 5
    assert manifest.request.tokenizer == "characters"
    data = PreparedData.open(tmp_path / "out")
    test = data.split("test").read_document(0).tolist()
    assert data.tokenizer().decode(test).endswith(f"ab\n<unk>{END_OF_TEXT}")


@pytest.mark.parametrize("end_of_text", ["a", "<unk>"])
def test_a_character_cannot_end_documents(end_of_text):
    with pytest.raises(DataError, match="--end-of-text TOKEN"):
        resolve_tokenizer(
            "characters", end_of_text=end_of_text, training_texts=lambda: iter(["abc"])
        )


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
    [(["the", "a"], r"no token \[UNK\]"), ([*SPECIAL, "a", "b", "a"], "'a' appears twice")],
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
