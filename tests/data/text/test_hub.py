"""Hugging Face data sets, from files laid out as on the hub. Nothing here uses a network."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from polyad.data.errors import DataError
from polyad.data.tables import SPLITS
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import ReadOptions
from polyad.data.text.prepare import prepare
from polyad.data.text.sources import join_articles
from polyad.data.text.sources import open_splits as open_all
from tests.helpers.prepared import open_source
from tests.helpers.refusals import line_of

datasets = pytest.importorskip("datasets")
RAW, UNK = "wikitext-103-raw-v1", "wikitext-103-v1"
FILES = {"train": 2, "validation": 1, "test": 1}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def article(title, *, words):
    """Lines as in WikiText's own files."""
    body = f" {title} is told in {words} words . \n", f" x = {words} = y \n"
    return [" \n", f" = {title} = \n", " \n", body[0], " \n", " = = Plot = = \n", " \n", *body]


def write_rows(folder, split, lines):
    """Parquet files as on the hub: a row for each line, an empty one for a blank line."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["" if line == " \n" else line for line in lines]
    shards, size = FILES[split], -(-len(rows) // FILES[split])
    for number in range(shards):
        # An article continues from one file to the next.
        table = pyarrow.table({"text": rows[number * size : (number + 1) * size]})
        name = f"{split}-{number:05}-of-{shards:05}.parquet"
        pyarrow.parquet.write_table(table, folder / name)


ARTICLES = {
    "train": [article(f"Article {i} = B", words=i + 2) for i in range(7)],
    "validation": [article("Held out", words=3), article("Second", words=4)],
    "test": [article("Tested", words=5)],
}
LINES = {name: [line for each in ARTICLES[name] for line in each] for name in ARTICLES}


@pytest.fixture
def wikitext(tmp_path):
    folder = tmp_path / "wikitext"
    for split, lines in LINES.items():
        write_rows(folder / RAW, split, lines)
        write_rows(folder / UNK, split, [line.replace("told", "<unk>") for line in lines])
    files = {
        config: [{"split": split, "path": f"{config}/{split}-*"} for split in SPLITS]
        for config in (RAW, UNK)
    }
    about = [{"config_name": config, "data_files": each} for config, each in files.items()]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': about})}\n---\n")
    return folder


def open_splits(spec, **options):
    return open_all(spec, ReadOptions(**options))


def texts(source):
    return [document.text for document in source.documents()]


def test_wikitext_has_its_own_splits_and_one_document_an_article(wikitext):
    splits = open_splits(f"hub:{wikitext}:{RAW}")
    assert list(splits) == list(SPLITS)
    for name, source in splits.items():
        documents = list(source.documents())
        assert [d.text for d in documents] == texts(source)  # read twice
        assert len(documents) == len(ARTICLES[name])
        assert "".join(d.text for d in documents) == "".join(LINES[name])
        for number, document in enumerate(documents):
            assert f"#{number}" in document.name
            assert document.text.count("\n = = Plot = = \n") == 1


def test_articles_of_the_real_file(shared):
    content = (shared / "wikitext2" / "valid.txt").read_text()
    lines = [line if line.strip() else "" for line in content.splitlines(keepends=True)]
    articles = list(join_articles(iter(lines)))
    assert len(articles) == 60  # what the makers of WikiText-2 count
    assert "".join(articles) == content
    assert articles[1].startswith(" = ")
    without_ends = (line.rstrip("\n") for line in lines)
    assert list(join_articles(without_ends)) == articles


def test_saved_to_disk_is_the_same_text(wikitext, tmp_path):
    loaded = datasets.load_dataset(str(wikitext), RAW)
    loaded.save_to_disk(tmp_path / "saved")
    expected = texts(open_source(f"hub:{wikitext}:{RAW}"))
    for spec in (f"{tmp_path}/saved", f"hub:{tmp_path}/saved"):
        splits = open_splits(spec)
        assert list(splits) == list(SPLITS)
        assert texts(splits["train"]) == expected
    loaded["validation"].save_to_disk(tmp_path / "one")
    assert texts(open_source(f"{tmp_path}/one")) == texts(
        open_source(f"hub:{wikitext}:{RAW}", split="validation")
    )


def test_splits_with_other_names_are_listed(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    splits = {"test_sft": rows, "train_sft": rows}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert "it has 'test_sft', 'train_sft'" in line_of(DataError, open_splits, f"{tmp_path}/saved")
    assert texts(open_source(f"{tmp_path}/saved/train_sft")) == ["a", "b"]


def test_real_splits_are_prepared_as_splits(wikitext, tmp_path):
    spec = f"hub:{wikitext}:{RAW}"
    manifest = prepare(spec, "train:300", tmp_path / "a")
    assert [manifest.splits[name].documents for name in SPLITS] == [7, 2, 1]
    data = PreparedData.open(tmp_path / "a")
    decoded = data.tokenizer().decode(data.split("validation").read_document(0).tolist())
    assert decoded == "".join(ARTICLES["validation"][0] + [" \n"]) + "<|endoftext|>"
    # A split that is given goes before the data set's own, and takes that split of a data set.
    other = prepare(spec, "train:300", tmp_path / "b", test_source=f"hub:{wikitext}:{UNK}")
    assert other.splits["validation"] == manifest.splits["validation"]
    assert other.splits["test"].bytes == manifest.splits["test"].bytes + 2  # told -> <unk>, twice


@pytest.mark.parametrize(
    "spec",
    ["hub:nobody/nothing:main", "openwebtext", "hub:/nowhere", "hub:a/b/c", "hub:a b", "hub:"],
)
def test_what_cannot_be_reached_or_is_no_name_is_one_line(spec):
    line_of(DataError, open_source, spec)


def test_bad_configuration_column_and_row_are_one_line(wikitext, tmp_path):
    assert RAW in line_of(DataError, open_source, f"hub:{wikitext}")
    assert RAW in line_of(DataError, open_source, f"hub:{wikitext}:nonsense")
    source = open_source(f"hub:{wikitext}:{RAW}", ReadOptions(text_key="txt"))
    assert "there are 'text' (did you mean 'text'?)" in line_of(DataError, texts, source)
    (tmp_path / "nulls").mkdir()
    table = pyarrow.table({"text": ["a", None]})
    pyarrow.parquet.write_table(table, tmp_path / "nulls" / "train.parquet")
    source = open_source(f"hub:{tmp_path}/nulls")
    assert "row 2: 'text' is None" in line_of(DataError, texts, source)
    (tmp_path / "nulls" / "train.parquet").rename(tmp_path / "nulls" / "test.parquet")
    line = line_of(DataError, open_splits, f"hub:{tmp_path}/nulls")
    assert "no train split; it has 'test'" in line
    (tmp_path / "nulls" / "test.parquet").write_bytes(b"nothing")
    assert "nulls" in line_of(DataError, lambda: texts(open_source(f"hub:{tmp_path}/nulls")))


def test_code_that_comes_with_a_data_set_is_not_run(tmp_path):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line_of(DataError, open_source, f"hub:{folder}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_short_name_reads_the_data_set_of_the_hub(wikitext, monkeypatch, streaming):
    # As if the hub were there: its name leads to a folder laid out like it.
    original = datasets.load_dataset_builder

    def reached(path, name):
        assert (path, name) == ("Salesforce/wikitext", RAW)
        return original(str(wikitext), name)

    monkeypatch.setattr(datasets, "load_dataset_builder", reached)
    splits = open_splits("wikitext-103", streaming=streaming)
    found = {name: texts(source) for name, source in splits.items()}
    assert [len(found[name]) for name in SPLITS] == [7, 2, 1]
    assert {name: "".join(parts) for name, parts in found.items()} == {
        name: "".join(lines) for name, lines in LINES.items()
    }
    assert bool(splits["train"].total_bytes) != streaming


def test_articles_without_a_heading_are_one_document(tmp_path):
    from datasets import Dataset, DatasetInfo

    info = DatasetInfo(config_name=RAW)
    Dataset.from_dict({"text": ["a", "", "b"]}, info=info).save_to_disk(str(tmp_path / "saved"))
    assert texts(open_source(f"{tmp_path / 'saved'}")) == ["a\n \nb\n"]
