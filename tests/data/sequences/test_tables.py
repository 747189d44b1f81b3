"""Tables of every form: the same rows, their labels, and one line for what is wrong with them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from polyad.data.errors import DataError
from polyad.data.sequences.config import ALLOWED_METRICS, BENCHMARKS, Schema, SequenceDataConfig
from polyad.data.sequences.labels import (
    class_labels,
    class_names,
    labels_are_hidden,
    right_choices,
    values,
)
from polyad.data.sequences.tables import Table, held_out, read_tables
from tests.helpers.sequences import folder_of, rows, write

TABLE = [
    {"text": 'with "quotes", a comma\nand a line', "label": "b"},
    {"text": "漢字 🙂", "label": "a"},
    {"text": "", "label": "b"},
]


def one_table(path):
    (table,) = read_tables(str(path), Schema()).values()
    each_row = zip(*table.columns.values(), strict=True)
    return [dict(zip(table.columns, row, strict=True)) for row in each_row]


def test_all_forms_of_a_table_have_the_same_rows(tmp_path):
    for name in ("rows.csv", "rows.tsv"):
        assert one_table(write(tmp_path / name, TABLE)) == TABLE
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE))
    assert one_table(tmp_path / "rows.jsonl") == TABLE
    pa.parquet.write_table(pa.Table.from_pylist(TABLE), tmp_path / "rows.parquet")
    assert one_table(tmp_path / "rows.parquet") == TABLE


def test_a_data_set_of_the_hub_has_the_names_of_its_classes(tmp_path):
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    made = {
        name: datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": labels}, features)
        for name, labels in (("train", [1, 0]), ("validation", [1, 1]), ("test", [-1, -1]))
    }
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    tables = read_tables(f"arrow:{tmp_path / 'saved'}", BENCHMARKS["glue/sst2"])
    names = class_names(tables["train"], "label")
    assert names == ["no", "yes"]
    assert class_labels(tables["validation"], "label", names).tolist() == [1, 1]
    assert labels_are_hidden(tables["test"], "label")
    assert not labels_are_hidden(tables["validation"], "label")


def test_splits_of_a_folder_are_told_by_names_and_other_files_are_left_alone(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "categories.json").write_text("[]")
    write(tmp_path / "notes.csv", [{"what": "ever"}])
    assert {name: len(t) for name, t in read_tables(str(tmp_path), Schema()).items()} == {
        "train": 60, "validation": 21, "test": 17,
    }  # fmt: skip
    mnli = BENCHMARKS["glue/mnli-mm"]
    row = [{"premise": "p", "hypothesis": "h", "label": 0}]
    for name in ("train", "validation_matched", "validation_mismatched"):
        write(tmp_path / "mnli" / f"{name}-00000-of-00001.csv", row)
    found = read_tables(str(tmp_path / "mnli"), mnli)
    assert found["validation"].place.endswith("validation_mismatched-00000-of-00001.csv")


def test_a_share_is_held_out_evenly(tmp_path):
    table = read_tables(str(write(tmp_path / "all.csv", rows(30, 0))), Schema())["train"]
    stay, out = held_out(table, 0.1)
    assert (len(stay), len(out)) == (27, 3)
    both = sorted([*stay.column("text"), *out.column("text")])
    assert both == sorted(table.column("text"))


def test_quotation_marks_of_tabs_are_values_where_they_do_not_fit(tmp_path):
    """GLUE's tables know no quotation; a spreadsheet's do."""
    path = tmp_path / "rows.tsv"
    for content, texts in (
        ('text\tlabel\n"Hello there\t0\nhe said bye"\t1\nplain\t0\n',
         ['"Hello there', 'he said bye"', "plain"]),
        ('text\tlabel\n" bare\t1\n', ['" bare']),
        ('text\tlabel\nx\t1\n5" disk\t0\n"so" he said\t1\n', ["x", '5" disk', '"so" he said']),
    ):  # fmt: skip
        path.write_text(content)
        table = read_tables(str(path), Schema())["train"]
        assert table.column("text") == texts
        assert len(table.column("label")) == len(texts)
    assert "rows.tsv: quotation marks are read as part of the values" in table.note
    path.write_text('text\tlabel\n"he said ""bye"""\t1\nplain "x"\t0\n"two\nlines"\t1\n')
    table = read_tables(str(path), Schema())["train"]
    assert table.column("text") == ['he said "bye"', 'plain "x"', "two\nlines"]
    assert table.note is None
    path.write_text('text\tlabel\n"a\t1\nb\tc\t0\n')
    with pytest.raises(
        DataError, match=r"rows\.tsv, line 3: does not have as many values as the 2 columns"
    ):
        read_tables(str(path), Schema())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "rows.csv",
            b"text,text,label\na,b,c\n",
            "line 1: there are 2 columns named 'text'; only one is",
        ),
        ("rows.tsv", b"label\ttext\tlabel\na\tb\tc\n", "line 1: there are 2 columns named 'label'"),
        ("rows.csv", b"text;label\na;b\n", "line 1: 'text;label' is one column: values are"),
        ("rows.csv", b'text,label\na,b\nc,"d" e\n', "after line 2: cannot be read: ',' expected"),
        ("rows.csv", b"text,label\na,b\nc,\xff\n", "rows.csv, line 3: is not UTF-8"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "rows.jsonl, line 2: is not UTF-8"),
    ],
)
def test_where_a_table_is_damaged_is_said(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_tables(str(tmp_path / name), Schema())


def test_a_column_that_stands_twice_in_parquet_is_refused(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="there are 2 columns named 'text'; only one is"):
        read_tables(str(tmp_path / "rows.parquet"), Schema())


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl", "rows.JSONL", "rows.CSV"])
def test_a_byte_order_mark_and_large_letters_in_endings_change_nothing(tmp_path, name):
    path = write(tmp_path / name.lower(), TABLE[1:])
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in TABLE[1:]))
    content = b"\xef\xbb\xbf" + path.read_bytes()
    path.unlink()
    (tmp_path / name).write_bytes(content)
    assert one_table(tmp_path / name) == TABLE[1:]


def test_files_of_a_split_are_all_read_or_refused_and_others_named(tmp_path):
    write(tmp_path / "train.csv", TABLE)
    write(tmp_path / "VALIDATION.CSV", TABLE[:1])
    write(tmp_path / "train_more.csv", TABLE)
    tables = read_tables(str(tmp_path), Schema())
    assert {name: len(table) for name, table in tables.items()} == {"train": 3, "validation": 1}
    assert tables["train"].note.endswith("as their names contain no split: 'train_more.csv'")
    for name in ("test.csv.gz", "test.json", "train-1.xlsx"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match=rf"{name}: has the name of a split, but"):
            read_tables(str(tmp_path), Schema())
        (tmp_path / name).unlink()
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(DataError, match=r"train.jsonl: exists besides train.csv, so both would be"):
        read_tables(str(tmp_path), Schema())


def test_a_fault_in_json_lines_is_in_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n\n\n{nonsense\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 4: is not JSON"):
        read_tables(str(tmp_path / "rows.jsonl"), Schema())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,label\na,b,c\n", "line 2: does not have as many values as the 2 columns"),
        ("text,label\na\n", "line 2: does not have as many values"),
        ('text,label\n"a,b\n', "cannot be read"),
        (b"text,label\n\xff\xfe,b\n", "line 2: is not UTF-8"),
    ],
)
def test_a_damaged_table_is_one_line(tmp_path, content, said):
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=said) as caught:
        read_tables(str(path), Schema())
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"text": "a"}\n[1]\n', "line 2: is not a JSON object"),
        ("rows.jsonl", "{\n", "line 1: is not JSON"),
        ("rows.parquet", "no parquet", "cannot be read as Parquet"),
        ("rows.txt", "text", "is not a table; supported: .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        read_tables(str(tmp_path / name), Schema())


def table_of(tmp_path, labels, name="train.csv"):
    rows_ = [{"text": "x", "label": label} for label in labels]
    (table,) = read_tables(str(write(tmp_path / name, rows_)), Schema()).values()
    return table


def test_numbers_are_classes_in_their_order_and_words_by_the_alphabet(tmp_path):
    assert class_names(table_of(tmp_path, ["10", "9", "-2", "9"]), "label") == ["-2", "9", "10"]
    names = class_names(table_of(tmp_path, ["b", "10", "a"]), "label")
    assert names == ["10", "a", "b"]
    assert class_labels(table_of(tmp_path, ["a", "10"]), "label", names).tolist() == [1, 0]


def test_values_and_choices_are_numbers(tmp_path):
    assert values(table_of(tmp_path, ["1.5", "-2"]), "label").tolist() == [1.5, -2.0]
    assert right_choices(table_of(tmp_path, ["1", "0"]), "label", 2).dtype == np.int64
    for read, labels in (
        (values, ["1", "nan"]),
        (values, ["high", "1"]),
        (lambda t, c: right_choices(t, c, 2), ["0", "2"]),
        (lambda t, c: right_choices(t, c, 2), ["0.5", "1"]),
    ):
        with pytest.raises(DataError, match=r"train.csv, row \d: the label '.*' is not"):
            read(table_of(tmp_path, labels), "label")


def test_hidden_labels_are_told_from_minus_one_in_every_form(tmp_path):
    for labels in ([-1, -1], [-1.0, -1.0], ["-1", "-1"]):
        assert labels_are_hidden(Table("t", {"label": labels}, ["label"]), "label")
    for labels in ([-1, 0, 1], ["-1", "0", "1"], [-1.0, 0.0, 1.0]):
        table = Table("t", {"label": labels}, ["label"])
        assert not labels_are_hidden(table, "label")
        assert class_names(table, "label") == ["-1", "0", "1"]
        assert values(table, "label").tolist() == [-1.0, 0.0, 1.0]
    with pytest.raises(DataError, match="the label -1, hidden"):
        class_labels(
            Table("t", {"label": [0, -1]}, ["label"], ["no", "yes"]), "label", ["no", "yes"]
        )


def test_bad_labels_are_one_line(tmp_path):
    with pytest.raises(DataError, match="all 2 rows have the label 'a': with one class there is"):
        class_names(table_of(tmp_path, ["a", "a"]), "label")
    with pytest.raises(DataError, match="row 2: has no label"):
        class_names(table_of(tmp_path, ["a", ""]), "label")
    with pytest.raises(DataError, match=r"row 1: the label 'goods' is not among the 2 .* 'good'\?"):
        class_labels(table_of(tmp_path, ["goods"]), "label", ["bad", "good"])
    with pytest.raises(DataError, match="no column 'lable'; columns present: 'text', 'label'"):
        class_names(table_of(tmp_path, ["a", "b"]), "lable")


def named_table(path, names, words):
    """A Parquet file as `datasets` writes it: numbers of classes, and their names."""
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    table = datasets.Dataset.from_dict({"text": words, "label": words}, features=features)
    path.parent.mkdir(exist_ok=True)
    table.to_parquet(path)
    return table


CAT_DOG, DOG_CAT = ["cat", "dog"], ["dog", "cat"]


def labels_of(path, split, names=None):
    tables = read_tables(str(path), Schema())
    names = names or class_names(tables["train"], "label")
    return [names[n] for n in class_labels(tables[split], "label", names)]


@pytest.mark.parametrize("split", ["test", "validation", "train"])
def test_classes_are_told_by_their_names_whatever_their_numbers(tmp_path, split):
    import datasets

    folder = tmp_path / "parquet"
    train = named_table(folder / "train-0.parquet", CAT_DOG, ["cat", "dog", "cat"])
    other = named_table(folder / f"{split}-1.parquet", DOG_CAT, ["dog", "dog", "cat"])
    assert pyarrow.parquet.read_table(folder / f"{split}-1.parquet")["label"].to_pylist() == [
        0, 0, 1,
    ]  # fmt: skip
    expected = (["cat", "dog", "cat"] if split == "train" else []) + ["dog", "dog", "cat"]
    assert labels_of(folder, split) == expected
    assert class_names(read_tables(str(folder), Schema())["train"], "label") == CAT_DOG
    with pytest.raises(DataError, match="names the numbers in 'label' 'dog', 'cat', another file"):
        read_tables(f"hub:{folder}", Schema())
    if split != "train":
        streams = tmp_path / "streams"
        streams.mkdir()
        for name, table in (("train", train), (split, other)):
            with pa.ipc.new_stream(str(streams / f"{name}.arrow"), table.data.schema) as writer:
                writer.write_table(table.data.table)
        with pytest.raises(DataError, match=r"names the numbers in 'label' 'dog', 'cat', another"):
            read_tables(f"hub:{streams}", Schema())
        saved = tmp_path / "saved"
        datasets.DatasetDict({"train": train, split: other}).save_to_disk(str(saved))
        assert labels_of(saved, split) == expected


def test_classes_that_only_some_files_name_are_refused_or_words(tmp_path):
    named_table(tmp_path / "train-0.parquet", DOG_CAT, ["cat", "dog"])
    write(tmp_path / "train-1.csv", [{"text": "woof", "label": "dog"}])
    write(tmp_path / "test.csv", [{"text": "meow", "label": "cat"}])
    assert labels_of(tmp_path, "train") == ["cat", "dog", "dog"]
    assert labels_of(tmp_path, "test") == ["cat"]
    for split, said in (("train", "holds numbers without names"), ("test", "'1' is not among")):
        numbers = pa.table({"text": ["meow"], "label": [1]})
        pyarrow.parquet.write_table(numbers, tmp_path / f"{split}-2.parquet")
        (tmp_path / "test.csv").unlink(missing_ok=True)
        with pytest.raises(DataError, match=said):
            labels_of(tmp_path, split)
        (tmp_path / f"{split}-2.parquet").unlink()


def test_a_class_that_the_training_rows_do_not_name_is_refused(tmp_path):
    named_table(tmp_path / "train.parquet", CAT_DOG, ["cat", "dog"])
    named_table(tmp_path / "test.parquet", ["bird", *CAT_DOG], ["cat", "bird"])
    with pytest.raises(DataError, match=r"row 2: the label 'bird' is not among .* 'cat', 'dog'"):
        labels_of(tmp_path, "test")


def test_benchmarks_have_metrics_that_their_tasks_allow():
    for name, schema in BENCHMARKS.items():
        assert set(schema.metrics) <= set(ALLOWED_METRICS[schema.task]), name
        assert bool(schema.choices) == (schema.task == "multiple_choice"), name


def test_keys_stand_above_the_benchmark():
    settings = SequenceDataConfig(path="glue/mrpc")
    assert settings.schema_of == BENCHMARKS["glue/mrpc"]
    own = SequenceDataConfig.model_validate(
        {"path": "x.csv", "benchmark": "glue/mrpc", "columns": {"text": "q"}, "metrics": ["f1"]}
    ).schema_of
    assert (own.text, own.pair, own.metrics, own.task) == ("q", None, ("f1",), "classification")
    numbers = SequenceDataConfig(path="x.csv", task="regression").schema_of
    assert numbers.metrics == ("pearson", "spearman")


def test_a_key_that_stands_twice_in_json_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: has the key 'text' twice"):
        read_tables(str(tmp_path / "rows.jsonl"), Schema())


@pytest.mark.parametrize("label", [[0, 1], {"a": 1}, float("nan")])
def test_labels_that_are_no_class_are_one_line(label):
    table = Table("rows", {"label": ["a", label]}, ["label"])
    with pytest.raises(
        DataError, match=r"rows, row 2: the label .* is not a class: it must be text or a number"
    ):
        class_names(table, "label")


def test_numbers_as_text_have_one_order():
    for labels in (["01", "1", "0"], ["1", "0", "01"]):
        assert class_names(Table("rows", {"label": labels}, ["label"]), "label") == ["0", "01", "1"]
    odd = ["--1", "2", "9" * 5000]
    assert class_names(Table("rows", {"label": odd}, ["label"]), "label") == sorted(odd)


def test_splits_with_other_names_are_listed_with_the_way_to_name_one(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(TABLE)
    named = f"{tmp_path}/saved/train_sft"
    way = f"name the folder of one, such as {named}"
    datasets.DatasetDict(train_sft=rows, test_sft=rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=f"it has train_sft, test_sft; {way}$"):
        read_tables(str(tmp_path / "saved"), Schema())
    assert read_tables(named, Schema())["train"].columns["text"] == rows["text"][:]
    datasets.DatasetDict(train_sft=rows, test=rows).save_to_disk(tmp_path / "half")
    half = read_tables(str(tmp_path / "half"), Schema())
    assert "no train split; it has train_sft, test; name" in half["test"].note
