import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from polyad.data.text.sources import Document
from polyad.data.text.tokenizers.files import train_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.writer import cut_between_words, encode_documents, may_cut


def test_ids_of_a_long_document_in_pieces_are_those_of_the_whole(library_text):
    tokenizer = train_tokenizer(iter([library_text[:200_000]]), 600)
    text = library_text + "漢字。\n\n" * 500 + "\n" * 500 + "a b\nc" * 100
    assert len(list(cut_between_words(text))) > 3
    documents = [Document("a", "short"), Document("b", text)]
    encoded = [ids.tolist() for ids in encode_documents(tokenizer, documents)]
    assert encoded == [tokenizer.encode("short"), tokenizer.encode(text)]


MODELS = [
    (models.BPE({"<unk>": 0, "</s>": 1}, [], unk_token="<unk>"), None, True),
    (models.BPE({"<unk>": 0, "</s>": 1}, [], unk_token="<unk>", fuse_unk=True), None, False),
    (
        models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        False,
    ),
]


@pytest.mark.parametrize(("model", "splitter", "cut"), MODELS, ids=["plain", "fuses", "begins"])
def test_a_document_is_cut_only_where_its_tokenizer_does_not_notice(model, splitter, cut):
    backend = Backend(model)
    if splitter is not None:
        backend.pre_tokenizer = splitter
    assert may_cut(Tokenizer(backend.to_str())) == cut
