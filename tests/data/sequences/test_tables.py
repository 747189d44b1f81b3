"""Tables of every form: the same rows, their labels, and one line for what is wrong with them."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from polyad.data.errors import DataError
from polyad.data.sequences.config import BENCHMARKS, Schema, SequenceDataConfig
from polyad.data.sequences.tables import Table, read_tables
from tests.helpers.sequences import folder_of, rows, write

TABLE = [
    {"text": 'with "quotes", a comma\nand a line', "label": "b"},
    {"text": "漢字 🙂 NA", "label": "a"},
    {"text": "", "label": "01"},
]
MARK = b"\xef\xbb\xbf"


def tables_of(path, schema=None):
    return read_tables(str(path), schema or Schema())[0]


def made(labels, names=None, place="t"):
    """A table of labels alone."""
    features = datasets.Features({"label": datasets.ClassLabel(names=names)}) if names else None
    return Table(place, datasets.Dataset.from_dict({"label": labels}, features=features))


@pytest.mark.parametrize("name", ["rows.csv", "rows.JSONL", "rows.parquet"])
def test_all_forms_of_a_table_have_the_same_rows(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pa.parquet.write_table(pa.Table.from_pylist(TABLE), path)
    else:
        if name.endswith("JSONL"):
            path.write_text("".join(json.dumps(row) + "\n" for row in TABLE))
        else:
            write(path, TABLE)
        path.write_bytes(MARK + path.read_bytes())
    assert list(tables_of(path)["train"].rows) == TABLE


def test_quotation_marks_between_tabs_are_values(tmp_path):
    """GLUE's tables know no quotation."""
    path = tmp_path / "rows.tsv"
    path.write_text('text\tlabel\n"Hello there\t0\n"so" he said\t1\n5" disk\t0\n')
    texts = ['"Hello there', '"so" he said', '5" disk']
    assert tables_of(path)["train"].column("text") == texts


def test_splits_of_a_folder_are_told_by_names_and_what_is_not_read_is_said(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "categories.json").write_text("[]")
    write(tmp_path / "notes.csv", [{"what": "ever"}])
    tables, notes = read_tables(str(tmp_path), Schema())
    assert {name: len(t) for name, t in tables.items()} == {
        "train": 60, "validation": 21, "test": 17,
    }  # fmt: skip
    assert notes == [f"{tmp_path}: not read: 'notes.csv'"]
    row = [{"premise": "p", "hypothesis": "h", "label": 0}]
    for name in ("train", "validation_matched", "validation_mismatched"):
        write(tmp_path / "mnli" / f"{name}-00000-of-00001.csv", [row[0] | {"premise": name}])
    found = tables_of(tmp_path / "mnli", BENCHMARKS["glue/mnli-mm"])
    assert found["validation"].column("premise") == ["validation_mismatched"]


def test_a_share_is_held_out_evenly(tmp_path):
    table = tables_of(write(tmp_path / "all.csv", rows(30, 0)))["train"]
    stay, out = table.held_out(0.1)
    assert (len(stay), len(out)) == (27, 3)
    both = sorted([*stay.column("text"), *out.column("text")])
    assert both == sorted(table.column("text"))


def test_numbers_are_classes_in_their_order_and_words_by_the_alphabet():
    for labels, names in (
        (["10", "9", "-2", "9"], ["-2", "9", "10"]),
        (["b", "10", "a"], ["10", "a", "b"]),
        (["01", "1", "0"], ["0", "01", "1"]),
        (["1", "0", "01"], ["0", "01", "1"]),
        ([1.0, 0.0], ["0", "1"]),
        (["--1", "2", "9" * 5000], ["--1", "2", "9" * 5000]),
    ):
        assert made(labels).classes("label") == names
    assert made(["a", "10"]).class_labels("label", ["10", "a", "b"]).tolist() == [1, 0]


def test_values_and_choices_are_numbers():
    assert made(["1.5", "-2"]).numeric_labels("label").tolist() == [1.5, -2.0]
    assert made(["1", "0"]).numeric_labels("label", 2).dtype == np.int64


def test_hidden_labels_are_told_from_minus_one_in_every_form():
    for labels in ([-1, -1], [-1.0, -1.0], ["-1", "-1"]):
        assert made(labels).labels_are_hidden("label")
    for labels in ([-1, 0, 1], ["-1", "0", "1"], [-1.0, 0.0, 1.0]):
        assert not made(labels).labels_are_hidden("label")
        assert made(labels).classes("label") == ["-1", "0", "1"]
        assert made(labels).numeric_labels("label").tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("read", "table"),
    [
        (Table.classes, made(["a", ""])),
        (Table.classes, made([[1], [2]])),
        (Table.classes, made([1.0, float("nan")])),
        (Table.classes, made(["a", "a"])),
        (lambda t, c: t.class_labels(c, ["bad", "good"]), made(["goods"])),
        (lambda t, c: t.class_labels(c, ["no", "yes"]), made([0, -1], ["no", "yes"])),
        (Table.numeric_labels, made(["1", "nan"])),
        (Table.numeric_labels, made(["high", "1"])),
        (lambda t, c: t.numeric_labels(c, 2), made(["0", "2"])),
        (lambda t, c: t.numeric_labels(c, 2), made(["0.5", "1"])),
        (lambda t, c: t.classes("lable"), made(["a", "b"])),
    ],
)
def test_bad_labels_are_one_line_that_names_table_and_row(read, table):
    with pytest.raises(DataError, match=r"^t(, row \d)?: .*la?b") as caught:
        read(table, "label")
    assert "\n" not in str(caught.value)


def named_table(path, names, words, **columns):
    """A Parquet file as `datasets` writes it: numbers of classes, and their names."""
    texts = {"text": words} | columns
    features = datasets.Features(
        dict.fromkeys(texts, datasets.Value("string")) | {"label": datasets.ClassLabel(names=names)}
    )
    table = datasets.Dataset.from_dict(texts | {"label": words}, features=features)
    path.parent.mkdir(exist_ok=True)
    table.to_parquet(path)
    return table


CAT_DOG, DOG_CAT = ["cat", "dog"], ["dog", "cat"]


def labels_of(path, split):
    tables = tables_of(path)
    names = tables["train"].classes("label")
    return [names[n] for n in tables[split].class_labels("label", names)]


@pytest.mark.parametrize("split", ["test", "validation"])
def test_classes_are_told_by_their_names_whatever_their_numbers(tmp_path, split):
    folder, words = tmp_path / "parquet", ["dog", "dog", "cat"]
    train = named_table(folder / "train-0.parquet", CAT_DOG, ["cat", "dog", "cat"])
    other = named_table(folder / f"{split}-1.parquet", DOG_CAT, words)
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": train, split: other}).save_to_disk(str(saved))
    for place in (folder, f"hub:{folder}", saved, f"hub:{saved}"):
        assert labels_of(place, split) == words


def test_files_of_a_split_with_other_names_of_classes_are_refused(tmp_path):
    named_table(tmp_path / "train-0.parquet", CAT_DOG, ["cat", "dog"])
    named_table(tmp_path / "train-1.parquet", DOG_CAT, ["cat", "dog"])
    with pytest.raises(DataError, match=r"label.*ClassLabel.*dog.*cat"):
        tables_of(tmp_path)


def test_a_class_that_the_training_rows_do_not_name_is_refused(tmp_path):
    named_table(tmp_path / "train.parquet", CAT_DOG, ["cat", "dog"])
    named_table(tmp_path / "test.parquet", ["bird", *CAT_DOG], ["cat", "bird"])
    with pytest.raises(DataError, match=r"row 2: the label 'bird' is not among .* 'cat', 'dog'"):
        labels_of(tmp_path, "test")
    pyarrow.parquet.write_table(
        pa.table({"text": ["meow"], "label": [1]}), tmp_path / "test.parquet"
    )
    with pytest.raises(DataError, match=r"row 1: the label '1' is not among"):
        labels_of(tmp_path, "test")


def test_a_split_that_was_saved_alone_is_for_training(tmp_path):
    table = datasets.Dataset.from_list(TABLE)
    datasets.DatasetDict(train_sft=table, test_sft=table).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="it has 'train_sft', 'test_sft'"):
        tables_of(tmp_path / "saved")
    assert list(tables_of(tmp_path / "saved" / "train_sft")["train"].rows) == TABLE
    datasets.DatasetDict(train=table, more=table).save_to_disk(tmp_path / "half")
    assert read_tables(str(tmp_path / "half"), Schema())[1] == [
        f"{tmp_path / 'half'}: not read: 'more'"
    ]


def test_keys_stand_above_the_benchmark():
    settings = SequenceDataConfig(path="glue/mrpc")
    assert settings.schema_of == BENCHMARKS["glue/mrpc"]
    own = SequenceDataConfig.model_validate(
        {"path": "x.csv", "benchmark": "glue/mrpc", "columns": {"text": "q"}, "metrics": ["f1"]}
    ).schema_of
    assert (own.text, own.pair, own.metrics, own.task) == ("q", None, ("f1",), "classification")
    numbers = SequenceDataConfig(path="x.csv", task="regression").schema_of
    assert numbers.metrics == ("pearson", "spearman")


def test_a_domain_is_a_word():
    for cells, words in (
        (["a ", "3"], ["a", "3"]),
        ([3, 4], ["3", "4"]),
        ([2.0, 3.5], ["2", "3.5"]),
    ):
        assert Table("t", datasets.Dataset.from_dict({"d": cells})).domains("d") == words
    for cells in (["a", None], ["a", ""], [1.0, float("nan")]):
        with pytest.raises(DataError, match="t, row 2: has no domain"):
            Table("t", datasets.Dataset.from_dict({"d": cells})).domains("d")
