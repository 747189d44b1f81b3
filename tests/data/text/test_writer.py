from polyad.data.text.sources import Document
from polyad.data.text.tokenizers.training import train_tokenizer
from polyad.data.text.writer import cut_between_words, encode_documents


def test_ids_of_a_long_document_in_pieces_are_those_of_the_whole(library_text):
    tokenizer = train_tokenizer(iter([library_text[:200_000]]), 600)
    text = library_text + "漢字。\n\n" * 500 + "\n" * 500 + "a b\nc" * 100
    assert len(list(cut_between_words(text))) > 3
    documents = [Document("a", "short"), Document("b", text)]
    encoded = [ids.tolist() for ids in encode_documents(tokenizer, documents)]
    assert encoded == [tokenizer.encode("short"), tokenizer.encode(text)]


def test_pieces_are_the_text():
    text = "some words\n" * 1000 + "x" * 5000 + "\n\n" * 100
    pieces = list(cut_between_words(text, 300))
    assert "".join(pieces) == text
    assert all(len(piece) >= 300 for piece in pieces[:-1])
    assert len(pieces) > 30
