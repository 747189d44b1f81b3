"""Vocabularies of words, and of BERT."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.text.attack import WordSwap, attacked_split
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer, train_words, trainer_of
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from tests.helpers.bert import SPECIAL
from tests.helpers.prepared import jsonl


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
    assert trained.encode("a b") == [2, 3]
    with pytest.raises(DataError, match="--end-of-text"):
        trained.encode(f"a {END_OF_TEXT} b")


@pytest.mark.parametrize("splitter", [pre_tokenizers.WhitespaceSplit, pre_tokenizers.Whitespace])
def test_unknown_word_without_unk_names_word_and_document(tmp_path, splitter):
    vocabulary = {"a": 0, "b": 1, "</s>": 2}
    file = word_file(tmp_path / "words.json", vocabulary, splitter=splitter)
    source = jsonl(tmp_path / "texts.jsonl", ["a b", "b a", "a zebra b"])
    with pytest.raises(DataError, match=r"texts\.jsonl#2: .*\[UNK\]") as caught:
        prepare(source, file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    prepare(jsonl(tmp_path / "known.jsonl", ["a b"] * 3), file, tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    assert data.split("train").read(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="cannot be attacked"):
        attacked_split(data.split("train"), data.tokenizer(), WordSwap(1.0))
    forged = jsonl(tmp_path / "forged.jsonl", ["a </s> b"])
    with pytest.raises(DataError):
        prepare(forged, file, tmp_path / "other")


def test_unk_cannot_end_documents(tmp_path):
    with pytest.raises(DataError, match=re.escape("'<unk>' cannot end")):
        trainer_of("words")(iter(["a"]), "<unk>")
    # An unknown word in a text would end its document.
    file = word_file(tmp_path / "words.json", {"<unk>": 0, "a": 1, "</s>": 2})
    with pytest.raises(DataError, match="--end-of-text TOKEN"):
        load_tokenizer(file, "<unk>").encode("a b")
    assert load_tokenizer(file).encode("a b") == [1, 0]


def test_text_without_a_word_has_no_vocabulary():
    with pytest.raises(DataError, match="has no word"):
        train_words(iter([" \n", "<unk>"]), None, END_OF_TEXT)


WORDS = [
    *("the", "cat", "##s", "un", "##able", "house", "!", ","),
    *("[", "]", "a", "##b", "中", "se", "##p"),
]
TEXT = "The cats, unable! HOUSE the 中文 [SEP] ab zebra  Café [MASK]"


def write(folder: Path, tokens: list[str], **about: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    if about:
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("is_default", [True, False])
def test_a_vocabulary_reads_text_as_transformers_does(tmp_path, lowercase, is_default):
    from transformers import BertTokenizer

    words = WORDS if lowercase else [*WORDS, "The", "HO", "##USE"]
    about = {} if lowercase and is_default else {"do_lower_case": lowercase}
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
        assert ours.vocabulary()["cafe"] == len(SPECIAL) + 1
