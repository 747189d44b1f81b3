"""What a preparation of text takes and leaves out is counted and told."""

from polyad.data.text.prepare import prepare
from polyad.launch.preparation import prepared_table


def folder_with(tmp_path, names, text="A text of some length.\n"):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number:02}.{'TXT' if number % 2 else 'txt'}").write_text(f"{number} {text}")
    for name in names:
        (folder / name).write_text("x")
    return folder


def test_what_stands_beside_texts_is_counted_and_told(tmp_path):
    folder = folder_with(
        tmp_path, ["README.md", "LICENSE", "deep/PAGES.HTML", "book.txt.gz", ".gitignore"]
    )
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "00.txt").write_text("no text")
    manifest = prepare(str(folder), "train:300", tmp_path / "out")
    assert manifest.left_out == {"hidden files and folders": 2, "files of other kinds": 4}
    assert sum(split.documents for split in manifest.splits.values()) == 40
    table = prepared_table(manifest, "out", 1.0)
    assert "left out: " in table
    assert "files of other kinds: 4" in table


def test_other_splits_of_a_data_set_are_told(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(30)]})
    saved = datasets.DatasetDict({"train": rows, "unsupervised": rows.select(range(3))})
    saved.save_to_disk(str(tmp_path / "saved"))
    manifest = prepare(str(tmp_path / "saved"), "train:300", tmp_path / "out")
    assert manifest.left_out == {"splits other than train, validation, test": 1}
