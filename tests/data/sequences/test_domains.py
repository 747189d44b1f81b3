"""Rows with domains: what each split holds is what a loop over the table says."""

import csv
import json
import math
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


def texts(data, split):
    """The rows of a split as texts, in their order."""
    pieces = data.encoded(split)
    ids = [
        pieces.ids_S[begin:end]
        for begin, end in zip(pieces.starts_R1[:-1], pieces.starts_R1[1:], strict=True)
    ]
    return [data.tokenizer.decode(each.tolist()) for each in ids]


def read(path, keep):
    """The texts of the rows that are kept, by the csv module alone."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file) if keep(row)]


@pytest.mark.parametrize("leave_out", [["films"], ["games", "books"]])
def test_what_is_left_out_is_the_test_split_and_nowhere_else(folder, leave_out):
    data = opened(folder, leave_out=leave_out)
    assert data.splits == ["train", "validation", "test"]
    stays = lambda row: row["source"] not in leave_out  # noqa: E731
    assert texts(data, "train") == read(folder / "train.csv", stays)
    assert texts(data, "validation") == read(folder / "dev.csv", stays)
    expected = [
        text
        for name in ("train", "dev", "test")
        for text in read(folder / f"{name}.csv", lambda row: not stays(row))
    ]
    assert texts(data, "test") == expected
    assert set(data.domains("test")) == set(leave_out)
    assert set(data.domains("train")) == set(DOMAINS) - set(leave_out)


def test_without_any_left_out_the_splits_are_the_sources(folder):
    data = opened(folder)
    assert [data.size(name) for name in data.splits] == [61, 22, 17]
    assert data.domains("train") == [row["source"] for row in table_of(61, 0)]
    assert opened(folder, columns=None).domains("train") is None


def test_a_share_of_each_domain_is_held_out(folder, tmp_path):
    path = write(tmp_path / "all.csv", table_of(61, 0))
    data = opened(folder, path, held_out=0.2)
    whole = read(path, lambda row: True)
    assert sorted([*texts(data, "train"), *texts(data, "validation")]) == sorted(whole)
    for domain in DOMAINS:
        total = len(read(path, lambda row: row["source"] == domain))  # noqa: B023
        held = data.domains("validation").count(domain)
        assert held in (math.floor(0.2 * total), math.ceil(0.2 * total)), domain
        assert held > 0
    # The same rows are held out, whatever is left out.
    left = opened(folder, path, held_out=0.2, leave_out=["books"])
    kept = zip(texts(data, "validation"), data.domains("validation"), strict=True)
    assert texts(left, "validation") == [text for text, domain in kept if domain != "books"]
    out = read(path, lambda row: row["source"] == "books")
    assert sorted(texts(left, "test")) == sorted(out)


def test_the_fingerprint_knows_what_is_left_out(folder, tmp_path):
    choices = (None, ["books"], ["films"], ["books", "films"], ["films", "books"])
    found = [opened(folder, leave_out=each).fingerprint for each in choices]
    assert len(set(found)) == 4
    assert found[3] == found[4]
    assert found[0] == opened(folder, columns=None).fingerprint
    # Also where a domain has no row that would be trained on.
    write(tmp_path / "train.csv", table_of(30, 0, ("books", "films")))
    write(tmp_path / "test.csv", table_of(9, 2))
    one, other = (opened(folder, tmp_path, leave_out=each) for each in (None, ["games"]))
    assert texts(one, "train") == texts(other, "train")
    assert one.fingerprint != other.fingerprint
    assert other.size("test") == len(
        read(tmp_path / "test.csv", lambda row: row["source"] == "games")
    )


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


def test_rows_with_hidden_labels_are_not_the_test_split(folder, tmp_path):
    for name, seed in (("train", 0), ("test", 1)):
        table = table_of(12, seed)
        hidden = [row | {"label": -1} for row in table] if name == "test" else table
        lines = "".join(json.dumps(row) + "\n" for row in hidden)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    data = opened(folder, tmp_path, leave_out=["films"])
    assert data.size("test") == sum(row["source"] == "films" for row in table_of(12, 0))


def test_names_are_a_set_that_is_not_empty():
    assert SequenceDataConfig(path="x.csv", leave_out=["b", "a", "b"]).leave_out == ["a", "b"]
    with pytest.raises(ValueError, match="leave_out"):
        SequenceDataConfig(path="x.csv", leave_out=[])
