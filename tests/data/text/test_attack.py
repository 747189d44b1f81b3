"""Attacked text: which words are replaced, and the tokens."""

import math
import pickle

import numpy as np
import pytest

from polyad.data.text.attack import WordSwap, attacked_split
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare

TEXT = "  One, two;\n\n\tthree -- four\u00a0five\x1c6 "
WORDS = TEXT.split()


def test_words_stand_between_white_space_which_stays():
    text, replaced = WordSwap(1.0)(TEXT, 0)
    assert text == "  AAA AAA\n\n\tAAA AAA AAA\u00a0AAA\x1cAAA "
    assert replaced == len(WORDS) == 7
    assert WordSwap(0.0)(TEXT, 0) == (TEXT, 0)
    assert WordSwap(1.0)("", 3) == ("", 0)


def test_the_rate_is_the_share_of_words():
    text = " ".join(f"w{number}" for number in range(20_000))
    for rate in (0.05, 0.3, 0.8):
        swapped, replaced = WordSwap(rate, seed=5)(text, 0)
        assert replaced == swapped.split().count("AAA")
        # Four standard deviations of a binomial distribution.
        spread = 4 * math.sqrt(rate * (1 - rate) / 20_000)
        assert replaced / 20_000 == pytest.approx(rate, abs=spread)


def test_words_depend_on_seed_and_document_and_more_are_the_same_and_others():
    text = " ".join(f"w{number}" for number in range(300))

    def places(rate, seed, document):
        words = WordSwap(rate, seed)(text, document)[0].split()
        return {place for place, word in enumerate(words) if word == "AAA"}

    assert places(0.3, 1, 2) == places(0.3, 1, 2)
    assert places(0.3, 1, 2) < places(0.6, 1, 2)
    assert len({frozenset(places(0.3, s, d)) for s in range(3) for d in range(3)}) == 9


def assert_same(stream, other):
    assert np.array_equal(stream.document_lengths, other.document_lengths)
    assert np.array_equal(stream.read(0, stream.num_tokens), other.read(0, other.num_tokens))


def test_a_loader_process_reads_the_attacked_tokens(prepared):
    attacked, *_ = attacked_split(prepared.split("train"), prepared.tokenizer(), WordSwap(0.5))
    assert_same(pickle.loads(pickle.dumps(attacked)), attacked)
    mapped = prepared.split("train")
    mapped.read(0, mapped.num_tokens)
    assert len(pickle.dumps(mapped)) < 1000  # a file's tokens are not sent


def test_documents_are_attacked_one_by_one(prepared):
    split, tokenizer = prepared.split("validation"), prepared.tokenizer()
    attack = WordSwap(0.4, seed=2)
    result, info, replaced = attacked_split(split, tokenizer, attack)
    assert 0 < replaced < info.words
    assert info.documents == split.num_documents > 2
    for document in range(split.num_documents):
        text = tokenizer.decode(split.read_document(document)[:-1].tolist())
        expected = [*tokenizer.encode(attack(text, document)[0]), tokenizer.end_of_text_id]
        assert result.read_document(document).tolist() == expected


def test_of_a_vocabulary_of_words_the_replacement_is_unknown(texts, tmp_path):
    prepare(str(texts), "words", tmp_path / "words")
    data = PreparedData.open(tmp_path / "words")
    split, tokenizer = data.split("validation"), data.tokenizer()
    clean, *_ = attacked_split(split, tokenizer, WordSwap(0.0))
    assert np.array_equal(clean.read(0, split.num_tokens), split.read(0, split.num_tokens))
    result, info, replaced = attacked_split(split, tokenizer, WordSwap(1.0))
    unknown = tokenizer.vocabulary()["<unk>"]
    tokens = result.read(0, split.num_tokens)
    assert set(tokens.tolist()) == {unknown, tokenizer.end_of_text_id}
    assert info.words == replaced == split.num_tokens - split.num_documents
