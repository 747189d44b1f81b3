"""Rows with domains."""

import random

import pytest
from datasets import Dataset

from polyad.data.errors import DataError
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.data.sequences.labels import domains_of
from polyad.data.sequences.tables import Table
from polyad.data.text.tokenizers.files import load_tokenizer
from tests.helpers.sequences import byte_tokenizer, rows, write

DOMAINS = ("books", "films", "games")


def table_of(count, seed, domains=DOMAINS):
    """Rows, each of a domain drawn at random; the first has most."""
    drawn = random.Random(seed).choices(domains, range(len(domains), 0, -1), k=count)
    return [row | {"source": domain} for row, domain in zip(rows(count, seed), drawn, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    for seed, (name, count) in enumerate((("train", 61), ("dev", 22), ("test", 17))):
        write(root / f"{name}.csv", table_of(count, seed))
    byte_tokenizer(root)
    return root


def opened(folder, path=None, **keys):
    section = {"path": str(path or folder), "columns": {"domain": "source"}, **keys}
    settings = SequenceDataConfig.model_validate(section)
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    return SequenceData(settings, tokenizer, model_kind="gpt2", max_length=128)


def test_each_row_has_its_domain(folder):
    data = opened(folder)
    assert [data.size(name) for name in data.splits] == [61, 22, 17]
    assert data.domains("train") == [row["source"] for row in table_of(61, 0)]
    assert opened(folder, columns=None).domains("train") is None


def test_a_domain_is_a_word(tmp_path):
    for cells, words in (
        (["a ", "3"], ["a", "3"]),
        ([3, 4], ["3", "4"]),
        ([2.0, 3.5], ["2", "3.5"]),
    ):
        assert domains_of(Table("t", Dataset.from_dict({"d": cells})), "d") == words
    for cells in (["a", None], ["a", ""], [1.0, float("nan")]):
        with pytest.raises(DataError, match="t, row 2: has no domain"):
            domains_of(Table("t", Dataset.from_dict({"d": cells})), "d")
