import pytest
import tokenizers

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT
from polyad.data.text.tokenizers.training import resolve_tokenizer
from polyad.data.text.tokenizers.vocabularies import train_characters


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
