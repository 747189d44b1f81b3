from polyad.data.text.tokenizers.training import train_tokenizer
from polyad.data.text.writer import cut_between_words, encode_documents


def test_ids_of_a_long_document_in_pieces_are_those_of_the_whole(library_text):
    tokenizer = train_tokenizer(iter([library_text[:200_000]]), 600)
    text = library_text + "漢字。\n\n" * 500 + "\n" * 500 + "a b\nc" * 100
    assert len(list(cut_between_words(text))) > 3
    assert list(encode_documents(tokenizer, ["short", text])) == [
        tokenizer.encode("short"), tokenizer.encode(text),
    ]  # fmt: skip


def test_pieces_are_the_text():
    text = "some words\n" * 1000 + "x" * 5000 + "\n\n" * 100
    pieces = list(cut_between_words(text, 300))
    assert "".join(pieces) == text
    assert all(len(piece) >= 300 for piece in pieces[:-1])
    assert len(pieces) > 30
