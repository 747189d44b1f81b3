"""What a preparation of text takes and leaves out: told, or refused."""

import pytest

from polyad.data.errors import DataError
from polyad.data.text.prepare import prepare
from polyad.launch.preparation import prepared_table

LEFT = {
    "notes.json": "[]", "more.jsonl.zst": "x", "book.txt.gz": "x", "rows.csv": "a,b\n",
    "deep/PAGES.HTML": "<p>",
}  # fmt: skip


def folder_with(tmp_path, names, text="A text of some length.\n"):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number:02}.{'TXT' if number % 2 else 'txt'}").write_text(f"{number} {text}")
    for name in names:
        (folder / name).write_text(LEFT.get(name, "x"))
    return folder


def prepared_anyway(folder, tmp_path, **options):
    lines = []
    manifest = prepare(
        str(folder), "train:300", tmp_path / "out", report=lines.append, accept=True, **options
    )
    return manifest, "\n".join(lines)


@pytest.mark.parametrize("name", LEFT)
def test_files_that_hold_text_and_are_not_read_are_refused_or_accepted(tmp_path, name):
    folder = folder_with(tmp_path, [name])
    ending = {"more.jsonl.zst": ".jsonl.zst", "book.txt.gz": ".txt.gz"}.get(
        name, f".{name.rpartition('.')[2].lower()}"
    )
    with pytest.raises(DataError) as caught:
        prepare(str(folder), "train:300", tmp_path / "out", report=lambda line: None)
    said = str(caught.value)
    assert f"would leave out {ending} files: 1 (as {name.rpartition('/')[2]})" in said
    assert said.endswith("if that is intended, add --accept")
    assert not (tmp_path / "out").exists()
    manifest, lines = prepared_anyway(folder, tmp_path)
    assert manifest.files == {".txt": 40}
    assert manifest.left_out == {f"{ending} files": 1}
    assert f"left out: {ending} files: 1" in lines
    assert f"left out: {ending} files: 1" in prepared_table(manifest, "out", 1.0)
    assert "files read: 40 .txt" in prepared_table(manifest, "out", 1.0)


def test_what_stands_beside_texts_is_told_and_not_refused(tmp_path):
    folder = folder_with(tmp_path, ["README.md", "LICENSE", "sizes.png", ".gitignore"])
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "00.txt").write_text("no text")
    manifest = prepare(str(folder), "train:300", tmp_path / "out", report=lambda line: None)
    assert manifest.left_out == {
        "hidden files and folders": 2, "files without an ending": 1, ".md files": 1,
        ".png files": 1,
    }  # fmt: skip
    assert sum(split.documents for split in manifest.splits.values()) == 40
    for number in range(41):
        (folder / f"{number}.md").write_text("more of these than are read")
    with pytest.raises(DataError, match=r"would leave out \.md files: 42 \(as 0\.md\)"):
        prepare(str(folder), "train:300", tmp_path / "other", report=lambda line: None)


def test_files_read_that_have_no_ending_are_told_in_words(tmp_path):
    folder = folder_with(tmp_path, ["LICENSE"])
    manifest, _ = prepared_anyway(folder, tmp_path, file_format="text")
    assert manifest.files == {".txt": 40, "": 1}
    assert "files read: 40 .txt, 1 without an ending\n" in prepared_table(manifest, "out", 1.0)


def test_links_are_followed_once_and_a_second_name_of_a_file_is_doubted(tmp_path):
    folder, other = folder_with(tmp_path, []), tmp_path / "elsewhere"
    other.mkdir()
    (other / "linked.txt").write_text("far away")
    (folder / "link").symlink_to(other)
    manifest, _ = prepared_anyway(folder, tmp_path)
    assert manifest.files == {".txt": 41}
    (folder / "again.txt").hardlink_to(folder / "00.txt")
    (folder / "twice.txt").symlink_to(other / "linked.txt")
    with pytest.raises(DataError, match="would read text twice, of 2 files that are others by a"):
        prepare(str(folder), "train:300", tmp_path / "two", report=lambda line: None)
    manifest, _ = prepared_anyway(folder, tmp_path, overwrite=True)
    assert manifest.files == {".txt": 43}


def test_other_splits_of_a_data_set_are_told(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(30)]})
    saved = datasets.DatasetDict({"train": rows, "unsupervised": rows.select(range(3))})
    saved.save_to_disk(str(tmp_path / "saved"))
    manifest = prepare(
        str(tmp_path / "saved"), "train:300", tmp_path / "out", report=lambda line: None
    )
    assert manifest.left_out == {"splits other than train, validation, test": 1}


def test_a_manifest_of_an_older_version_has_neither_and_opens(tmp_path):
    folder = folder_with(tmp_path, [])
    prepare(str(folder), "train:300", tmp_path / "out", report=lambda line: None)


def test_the_option_of_the_text_is_named(tmp_path):
    folder = folder_with(tmp_path, ["notes.json"])
    (tmp_path / "train.txt").write_text("some text\n" * 50)
    with pytest.raises(DataError, match=r"^--validation-source: .*texts: would leave out \.json"):
        prepare(
            str(tmp_path / "train.txt"),
            "train:300",
            tmp_path / "out",
            validation_source=str(folder),
            report=lambda line: None,
        )


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "test.txt"),
        ("Train/a.txt", "valid/a.txt", "valid/b.txt"),
        ("train-00000-of-1.txt", "test_01.txt"),
    ],
)
def test_files_that_are_called_as_splits_are_joined_only_if_that_is_meant(tmp_path, names):
    folder = tmp_path / "texts"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"A text of {name}.\n")
    with pytest.raises(DataError, match=r"are called as splits.*--test-source") as caught:
        prepare(str(folder), "train:300", tmp_path / "out", report=lambda line: None)
    assert str(caught.value).endswith("if that is intended, add --accept")
    manifest, _ = prepared_anyway(folder, tmp_path)
    assert manifest.files == {".txt": len(names)}
    one = folder / names[0]
    alone = prepare(str(one.parent if one.parent != folder else one), "train:300",
                    tmp_path / "alone", report=lambda line: None)  # fmt: skip
    assert alone.files in ({}, {".txt": 1})
