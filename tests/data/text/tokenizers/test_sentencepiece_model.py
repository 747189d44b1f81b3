import io

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.documents import open_source
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import SentencePieceTokenizer, load_tokenizer

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
    assert tokenizer.decode([*ids, 2, *ids]) == "def main(argv):</s>def main(argv):"


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
    manifest = prepare(str(texts), str(file), tmp_path / "out", report=lambda line: None)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == model
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    data = PreparedData.open(tmp_path / "out")
    assert data.tokenizer().fingerprint == manifest.tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "out").fingerprint == manifest.tokenizer.fingerprint
    assert load_tokenizer(file, "<s>").fingerprint != manifest.tokenizer.fingerprint
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    first = next(iter(open_source(str(texts)).documents())).text
    assert data.split("train").read_document(0).tolist() == [*oracle.encode(first), 2]
    again = prepare(str(texts), str(file), tmp_path / "out", report=lambda line: None)
    assert again == manifest
    (tmp_path / "out" / "tokenizer.model").write_bytes(model + b"\0")
    with pytest.raises(DataError, match="not the tokenizer that made these tokens"):
        PreparedData.open(tmp_path / "out")


def test_bad_model_is_one_line(model, tmp_path):
    for content in (b"", b"nonsense"):
        (tmp_path / "a.model").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.model: not a SentencePiece model$"):
            load_tokenizer(tmp_path / "a.model")
    (tmp_path / "a.model").write_bytes(model)
    with pytest.raises(DataError, match=r"no token '<end>' to end a document.*--end-of-text"):
        load_tokenizer(tmp_path / "a.model", "<end>")
    with pytest.raises(DataError, match=r"did you mean 'a\.model'"):
        load_tokenizer(tmp_path / "b.model")
