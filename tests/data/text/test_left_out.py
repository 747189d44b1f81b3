"""What a preparation of text takes and leaves out is counted and told."""

from polyad.data.text.prepare import prepare
from polyad.launch.preparation import prepared_table


def test_what_stands_beside_texts_is_counted_and_told(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02}.{'TXT' if number % 2 else 'txt'}").write_text(f"{number} text.\n")
    for name in ("README.md", "LICENSE", "deep/PAGES.HTML", "book.txt.gz", ".gitignore"):
        (folder / name).write_text("x")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX" / "00.txt").write_text("no text")
    manifest = prepare(str(folder), "train:300", tmp_path / "out")
    assert manifest.left_out == {"hidden files and folders": 2, "files of other kinds": 4}
    assert sum(split.documents for split in manifest.splits.values()) == 40
    table = prepared_table(manifest, "out", 1.0)
    assert "left out: " in table
    assert "files of other kinds: 4" in table
