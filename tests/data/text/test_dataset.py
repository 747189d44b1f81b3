import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from tests.helpers.prepared import flip


def test_reads_outside_are_index_errors(prepared):
    stream = prepared.split("test")
    for start, stop in ((-1, 2), (3, 2), (0, stream.num_tokens + 1)):
        with pytest.raises(IndexError):
            stream.read(start, stop)


def test_empty_split_is_empty(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    prepare(str(tmp_path / "a.txt"), "train:300", tmp_path / "out")
    stream = PreparedData.open(tmp_path / "out").split("test")
    assert (stream.num_tokens, len(stream.document_lengths), len(stream.read(0, 0))) == (0, 0, 0)


def test_another_tokenizer_is_refused_when_it_is_read(copy):
    path = copy / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    with pytest.raises(DataError, match="is not the tokenizer that made these tokens"):
        PreparedData.open(copy).tokenizer()


def test_damage_that_reading_meets_is_one_line(copy):
    stream = PreparedData.open(copy).split("train")
    stream.vocab_size = 300
    with pytest.raises(DataError, match=r"train\.bin: damaged: token [\d,]+ is not in the vocab"):
        stream.read(0, stream.num_tokens)
    flip(copy / "train.idx", 34 + 4, bit=1)
    with pytest.raises(DataError, match=r"train\.idx: damaged: the lengths of its documents"):
        PreparedData.open(copy).split("train").document_lengths  # noqa: B018
