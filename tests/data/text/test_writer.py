import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.tokenizers.training import train_tokenizer
from polyad.data.text.writer import PIECE_CHARACTERS, PieceCutter, cut_between_words


def in_parts(cutter, text, sizes):
    start = 0
    while start < len(text):
        end = start + next(sizes)
        yield from cutter.add(text[start:end], is_last=end >= len(text))
        start = end
    yield cutter.take_rest()


@pytest.mark.parametrize("largest", [1, 10, 3000, 10_000_000])
def test_parts_are_cut_where_the_whole_is(library_text, largest):
    text = library_text[: 20_000 if largest < 100 else None]
    text += "漢字。\n\n" * 500 + "\n" * 500 + "a b\nc" * 100
    draw = random.Random(0)
    sizes = iter(lambda: draw.randint(1, largest), None)
    pieces = list(in_parts(PieceCutter(1000), text, sizes))
    assert pieces == list(cut_between_words(text, 1000))
    assert len(pieces) > 10


@pytest.mark.slow
def test_ids_of_a_document_in_parts_are_those_of_the_whole(library_text):
    tokenizer = train_tokenizer(iter([library_text]), 600)
    sizes = iter(lambda: 7777, None)
    cutter = PieceCutter.of(tokenizer)
    text = library_text * 2
    pieces = list(in_parts(cutter, text, sizes))
    assert len(pieces) > len(text) // PIECE_CHARACTERS - 1
    ids = tokenizer.encode_batch(pieces)
    assert [token for part in ids for token in part] == tokenizer.encode(text)
    assert cutter.forced == 0


@pytest.mark.parametrize(
    ("text", "ends"),
    [("ab\n\n" * 50, "\n"), ("ab  " * 50, " "), ("x" * 200, "x"), ("\n" * 200, "\n")],
)
def test_text_without_a_place_to_cut_is_held_within_bounds(text, ends):
    cutter = PieceCutter(10, most=40)
    pieces = list(in_parts(cutter, text, iter(lambda: 8, None)))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 48
    assert all(piece.endswith(ends) for piece in pieces[:-1])
    assert cutter.forced == len(pieces) - 1 > 2


def test_a_whole_document_is_never_cut_for_memory():
    cutter = PieceCutter(None, most=40)
    assert list(in_parts(cutter, "ab\n" * 50, iter(lambda: 1000, None))) == ["ab\n" * 50]
    assert cutter.forced == 0


def test_a_tokenizer_that_marks_beginnings_is_cut_at_line_ends_alone():
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    cutter = PieceCutter.of(Tokenizer(backend.to_str()))
    text = "some words\n" * 30_000
    assert list(in_parts(cutter, text, iter(lambda: 50_000, None))) == [text]
    cutter = PieceCutter(None, most=1000)
    pieces = list(in_parts(cutter, text[:5000], iter(lambda: 300, None)))
    assert len(pieces) > 3
    assert all(piece.endswith("words\n") for piece in pieces[:-1])
