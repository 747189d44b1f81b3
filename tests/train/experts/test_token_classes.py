"""Classes of tokens, and labels that are moved around in their window."""

from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import BertWordPieceTokenizer, decoders, models, pre_tokenizers

from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.train.experts.token_classes import (
    BINS,
    CHARACTERS,
    Shifts,
    _by_position,
    _position_names,
    character_class,
    classes_of_vocabulary,
    equal_mass,
)


def characters_of(tokenizer):
    """The class of every token."""
    stream = SimpleNamespace(num_tokens=0)
    return classes_of_vocabulary(tokenizer, stream)["characters"][1]


TEXTS = {
    " the": "letters", "é1": "letters", "7th": "digits", " (": "punctuation", "+=": "punctuation",
    "$": "punctuation", "\n\n": "space or newline", " ": "space or newline", "\ufffd": "other",
    "🙂": "other", "\x00": "other", "": "other",
}  # fmt: skip


def test_characters():
    assert {text: CHARACTERS[character_class(text)] for text in TEXTS} == TEXTS


def test_frequencies_by_hand():
    # 16 tokens of a text in 4 bins of 4. Token 2 is there 6 times, its middle after the third;
    # token 0 4 times, after the eighth; 3 and 4 twice, after the 11th and 13th; 1 and 5 once.
    counts = np.array([4, 1, 6, 2, 2, 1])
    assert equal_mass(counts, 4).tolist() == [2, 3, 0, 2, 3, 3]
    even = equal_mass(np.full(80, 5), 8)
    assert np.bincount(even).tolist() == [10] * 8
    assert equal_mass(np.zeros(3, dtype=np.int64)).max() < BINS


@pytest.mark.parametrize("length", [8, 13, 1024])
def test_positions_have_eight_bins(length):
    (labels,) = _by_position(torch.zeros(1, length)).tolist()
    assert sorted(set(labels)) == list(range(8))
    names = _position_names(length)
    for number, name in enumerate(names):
        first, last = map(int, name.split(" to "))
        assert [t for t in range(length) if labels[t] == number] == list(range(first, last + 1))


def test_moved_labels_are_those_of_the_same_window():
    labels = torch.arange(12).view(2, 6)
    labels[1, 4:] = -1  # which do not count
    shifts = Shifts(windows=5, length=6, shuffles=3)
    result = shifts(labels, torch.tensor([1, 4]))
    assert result.shape == (4, 2, 6)
    assert torch.equal(result[0], labels)
    distances = set()
    for moved in result[1:, 0].tolist():
        distance = moved.index(0)
        distances.add(distance)
        assert moved == [(t - distance) % 6 for t in range(6)]
    assert len(distances) > 1
    for moved in result[1:, 1].tolist():
        assert moved[4:] == [-1, -1]
        assert set(moved[:4]) <= {6, 7, 8, 9, -1}
    alone = shifts(labels[1:], torch.tensor([4]))  # whatever the other windows of the batch are
    assert torch.equal(alone[:, 0], result[:, 1])


def test_a_part_of_a_word_is_of_its_letters_and_a_special_token_of_nothing():
    words = {
        "##ty": "letters", "##7": "digits", ".": "punctuation", "word": "letters",
        "#": "punctuation",
    }  # fmt: skip
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*special, "a", *words])}
    tokenizer = Tokenizer(BertWordPieceTokenizer(vocabulary, lowercase=False).to_str(), "[SEP]")
    result = characters_of(tokenizer)
    for token, expected in words.items():
        assert CHARACTERS[result[vocabulary[token]]] == expected, token
    assert {CHARACTERS[result[vocabulary[token]]] for token in special} == {"other"}


def test_a_blank_alone_is_white_space():
    """SentencePiece's mark of a blank, which is left out at the beginning of a text."""
    backend = tokenizers.Tokenizer(models.Unigram([("</s>", 0.0), ("\u2581", -1.0), ("a", -1.0)]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend.to_str(), "</s>")
    result = characters_of(tokenizer)
    assert [CHARACTERS[each] for each in result] == ["other", "space or newline", "letters"]
