"""A text in parts: the files of one, whatever the number of parts; and what is refused."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import polyad.data.text.parts
import polyad.data.text.writer
from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.job import Asked
from polyad.data.text.parts import PART_FILE, ranges
from polyad.data.text.plan import Cut
from polyad.data.text.prepare import Preparation, prepare
from polyad.data.text.source import Skipped
from tests.helpers.everyday import everyday
from tests.helpers.prepared import flip


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def silent(line):
    pass


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def documents(library_text):
    """Some real text, in documents of very different lengths, two of them empty."""
    lines = library_text.splitlines(keepends=True)[:900]
    found, at = [], 0
    for number in range(43):
        size = 1 + (number * 7) % 31
        found.append("".join(lines[at : at + size]))
        at += size
    found[5] = found[41] = ""
    return found


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def jsonl(folder, documents):
    write_jsonl(folder / "a.jsonl", documents[:20])
    write_jsonl(folder / "b.jsonl", documents[20:21])
    (folder / "c").mkdir()
    write_jsonl(folder / "c" / "d.jsonl", documents[21:])
    with (folder / "c" / "d.jsonl").open("a") as file:
        file.write("\n \n")
    (folder / "e.jsonl").write_text("")
    return {}


def compressed(folder, documents):
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in documents[number::3]]
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return {}


def parquet(folder, documents):
    table = pyarrow.table({"text": documents[:30]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    table = pyarrow.table({"text": documents[30:]})
    pyarrow.parquet.write_table(table, folder / "b.parquet")
    return {}


def lines(folder, documents):
    for number in range(2):
        text = "".join(documents[number::2]) + "\r\n \n\n"
        (folder / f"{number}.txt").write_bytes(text.encode())
    return {"documents": "lines"}


def text_files(folder, documents):
    for number, text in enumerate(documents):
        (folder / f"{number:02}.txt").write_text(text)
    return {}


def by_position(folder, documents):
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(documents[number::4]))
    (folder / "2a.txt").write_text("")
    (folder / "9.txt").write_text("")
    return {"validation_fraction": 0.2}


def lines_by_position(folder, documents):
    long = ["".join(documents).replace("\n", " ")[start::3] for start in range(3)]
    (folder / "a.txt").write_text(f"{long[0]}\n\n\n{long[1]}\n \n")
    (folder / "b.txt").write_text(long[2])
    return {"documents": "lines", "test_fraction": 0.1}


def other_sources(folder, documents):
    write_jsonl(folder / "a.jsonl", documents[:30])
    for name, texts in (("validation", documents[30:35]), ("test", documents[35:])):
        write_jsonl(folder.parent / f"{name}.jsonl", texts)
    return {
        f"{name}_source": str(folder.parent / f"{name}.jsonl") for name in ("validation", "test")
    }


def saved(folder, documents):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": documents})
    rows.save_to_disk(str(folder))
    return {}


KINDS = (
    *(jsonl, compressed, parquet, lines, text_files, by_position, lines_by_position),
    *(other_sources, saved),
)


def asked(folder, tokenizer, **options):
    return Asked(source=str(folder), tokenizer=str(tokenizer), **options)


@everyday("kind", KINDS, keep=[jsonl, parquet, text_files, lines_by_position])
def test_any_number_of_parts_gives_the_files_of_one(
    tmp_path, documents, prepared_path, kind, monkeypatch
):
    # Borders of blocks lie everywhere.
    monkeypatch.setattr(polyad.data.text.parts, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(polyad.data.text.parts, "BLOCK_DOCUMENTS", 3)
    (source := tmp_path / "source").mkdir()
    options = kind(source, documents)
    whole = prepare(str(source), str(prepared_path), tmp_path / "out", report=silent, **options)
    assert (whole.split_by == "position") == (kind in (by_position, lines_by_position))
    assert all(whole.splits[name].documents for name in whole.splits)
    expected = files(tmp_path / "out")
    for parts in (1, 2, 3, 7):
        shutil.rmtree(tmp_path / "out")
        request = asked(source, prepared_path, **options)
        manifest = Preparation(request, tmp_path / "out", parts, report=silent).all()
        assert manifest == whole
        assert files(tmp_path / "out") == expected
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("tokenizer", ["train:400", "words:200", "characters"])
def test_a_tokenizer_is_trained_on_the_same_text(tmp_path, documents, tokenizer):
    (source := tmp_path / "source").mkdir()
    jsonl(source, documents)
    prepare(str(source), tokenizer, tmp_path / "whole", report=silent)
    said = []
    Preparation(asked(source, tokenizer), tmp_path / "out", 3, report=said.append).all()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sum("training the tokenizer" in line for line in said) == 1


def test_more_parts_than_documents_leave_some_without_text(tmp_path, documents, prepared_path):
    (source := tmp_path / "source").mkdir()
    jsonl(source, documents[:25])
    prepare(str(source), str(prepared_path), tmp_path / "whole", report=silent)
    said = []
    request = asked(source, prepared_path)
    Preparation(request, tmp_path / "out", 60, report=said.append).all()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    (line,) = [line for line in said if "of 60 parts are empty" in line]
    assert int(line.split()[0]) >= 60 - 25


def test_the_standard_library_is_cut_between_modules(
    tmp_path, documents, prepared_path, monkeypatch
):
    for number, text in enumerate(documents[:9]):
        (tmp_path / f"m{number}.py").write_text(text)
    (tmp_path / "m4.py").write_bytes(b"\xff")
    monkeypatch.setattr("polyad.data.text.documents.standard_library", lambda: tmp_path)
    whole = prepare("python-stdlib", str(prepared_path), tmp_path / "whole", report=silent)
    assert whole.skipped_unreadable == 1
    request = asked("python-stdlib", prepared_path)
    Preparation(request, tmp_path / "out", 3, report=silent).all()
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_document_that_goes_on_in_another_is_dealt_to_one_split(
    tmp_path, documents, prepared_path, monkeypatch
):
    (source := tmp_path / "source").mkdir()
    jsonl(source, ["".join(documents) * 25, *documents])
    request = asked(source, prepared_path, validation_fraction=0.3)
    options = {"report": silent, "validation_fraction": 0.3}
    monkeypatch.setattr(polyad.data.text.parts, "BLOCK_DOCUMENTS", 2)
    monkeypatch.setattr(polyad.data.text.writer, "MOST_TOKENS", 100_000)
    whole = prepare(str(source), str(prepared_path), tmp_path / "whole", **options)
    assert sum(split.documents for split in whole.splits.values()) > 42  # that have text
    said = []
    Preparation(request, tmp_path / "out", 2, report=said.append).all()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert any("documents were split, as one holds at most" in line for line in said)


@pytest.fixture
def begun(tmp_path, documents, prepared_path):
    """A preparation in three parts, of which all are there."""
    (source := tmp_path / "source").mkdir()
    jsonl(source, documents)
    parts = Preparation(asked(source, prepared_path), tmp_path / "out", 3, report=silent)
    assert parts.begin() == [0, 1, 2]
    assert [parts.part(number)[1] for number in (1, 0, 2)] == [[0, 2], [2], []]
    return parts


def test_steps_one_by_one_give_the_same(tmp_path, begun, prepared_path):
    prepare(str(tmp_path / "source"), str(prepared_path), tmp_path / "whole", report=silent)
    begun.join()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    PreparedData.open(tmp_path / "out").verify()


@pytest.mark.parametrize("name", ["train.bin", "train.documents", PART_FILE])
@pytest.mark.parametrize("how", ["a bit", "cut off", "gone"])
def test_a_damaged_part_is_refused_by_name(tmp_path, begun, name, how):
    path = begun.folder / "part-00001" / name
    if how == "a bit":
        flip(path, path.stat().st_size // 2, bit=2)
    elif how == "cut off":
        os.truncate(path, path.stat().st_size - 4)
    else:
        path.unlink()
    with pytest.raises(DataError, match=rf"part-00001/{name}: damaged.*delete part-00001") as error:
        begun.join()
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if ".partial-" in path.name]
    shutil.rmtree(path.parent)
    with pytest.raises(DataError, match=r"part 1 of 3 \(from 0\) missing"):
        begun.join()
    begun.part(1)
    begun.join()


def test_parts_that_begin_at_one_time_keep_what_others_made(begun, monkeypatch):
    find, calls = Cut.find, []

    def late(self, *, overwrite=False):
        calls.append(overwrite)
        return None if len(calls) == 1 else find(self, overwrite=overwrite)

    monkeypatch.setattr(Cut, "find", late)  # as where another makes the plan in this moment
    assert begun.part(1)[1] == []


def test_missing_parts_are_named(begun):
    for number in (0, 2):
        shutil.rmtree(begun.folder / f"part-{number:05}")
    with pytest.raises(DataError, match=r"parts 0,2 of 3 \(from 0\) missing") as error:
        begun.join()
    assert len(str(error.value).splitlines()) == 1


def test_parts_of_another_request_are_refused_by_name(tmp_path, begun, documents, prepared_path):
    source = tmp_path / "source"
    for options, parts, what in (
        ({"text_key": "body"}, 3, "text_key was 'text', not 'body'"),
        ({"test_fraction": 0.2}, 3, "test_fraction was 0.05, not 0.2"),
        ({}, 4, "--parts was 3, not 4"),
    ):
        request = asked(source, prepared_path, **options)
        with pytest.raises(DataError, match="parts of another request: " + what):
            Preparation(request, tmp_path / "out", parts, report=silent).part(0)
    (source / "e.jsonl").write_text("\n")
    with pytest.raises(DataError, match="files of the text have changed since"):
        Preparation(asked(source, prepared_path), tmp_path / "out", 3, report=silent).join()
    # With --overwrite the parts begin anew.
    request = asked(source, prepared_path)
    parts = Preparation(request, tmp_path / "out", 3, overwrite=True, report=silent)
    with pytest.raises(DataError, match="parts of another request"):
        parts.part(0)  # another one of the old request may be running
    assert parts.begin() == [0, 1, 2]


def test_a_part_from_elsewhere_is_refused(tmp_path, begun, documents, prepared_path):
    (other := tmp_path / "other").mkdir()
    jsonl(other, documents[::-1])
    elsewhere = Preparation(asked(other, prepared_path), tmp_path / "there", 3, report=silent)
    elsewhere.part(1)
    shutil.rmtree(begun.folder / "part-00001")
    shutil.copytree(elsewhere.folder / "part-00001", begun.folder / "part-00001")
    with pytest.raises(DataError, match=r"part-00001: was made from other text, tokenizer or opt"):
        begun.join()
    shutil.rmtree(begun.folder / "part-00001")
    shutil.copytree(begun.folder / "part-00000", begun.folder / "part-00001")
    with pytest.raises(DataError, match=r"part-00001: was made .* it is part 0 of plan"):
        begun.join()


def test_a_part_needs_the_tokenizer(tmp_path, documents):
    (source := tmp_path / "source").mkdir()
    jsonl(source, documents)
    parts = Preparation(asked(source, "words"), tmp_path / "out", 2, report=silent)
    with pytest.raises(DataError, match=r"the tokenizer words is not trained yet; .*--begin"):
        parts.part(0)
    parts.begin()
    parts.part(0)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, documents, prepared_path):
    (source := tmp_path / "source").mkdir()
    jsonl(source, documents)
    parts = Preparation(asked(source, prepared_path), tmp_path / "out", 2, report=silent)
    parts.folder.mkdir()
    (parts.folder / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"contains 'thesis\.tex', which `polyad prepare` did not"):
        parts.all()
    assert files(parts.folder) == {"thesis.tex": b"mine"}


def test_what_jobs_said_outlives_the_parts(begun):
    (begun.folder / "launch").mkdir()
    (begun.folder / "launch" / "slurm-1.out").write_text("said")
    begun.join()
    assert [path.name for path in begun.folder.rglob("*")] == ["launch", "slurm-1.out"]


def test_bad_text_is_named_by_its_line_in_the_file(tmp_path, documents, prepared_path):
    (source := tmp_path / "source").mkdir()
    write_jsonl(source / "a.jsonl", documents)
    with (source / "a.jsonl").open("a") as file:
        file.write("{}\n")
    parts = Preparation(asked(source, prepared_path), tmp_path / "out", 5, report=silent)
    with pytest.raises(DataError, match=rf"a\.jsonl, line {len(documents) + 1}: no key 'text'"):
        parts.part(4)


def test_numbers_are_written_as_slurm_does():
    assert ranges([]) == ""
    assert ranges([4]) == "4"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_counts_of_what_is_left_out_are_those_of_the_whole(tmp_path, documents, prepared_path):
    (source := tmp_path / "source").mkdir()
    options = text_files(source, documents)
    job = asked(source, prepared_path, **options).open()
    whole, cut = Skipped(), Skipped()
    list(job.by_split["train"].documents(whole))
    for number in range(5):
        list(job.by_split["train"].part(number, 5).documents(cut))
    assert (whole.empty, whole) == (2, cut)
