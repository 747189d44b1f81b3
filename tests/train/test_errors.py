"""What is shown of values in errors."""

from polyad.train.errors import MAX_LINE, one_line, shown


def test_a_long_value_is_shown_by_its_beginning_and_end():
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("a" + "x" * 500 + "z").startswith("'axxx")
    assert shown("a" + "x" * 500 + "z").endswith("xxxz'")
    assert len(shown("x" * 500)) == len(shown(list(range(9999)))) == 200


def test_a_line_controls_no_terminal():
    assert one_line("a\x1b[31mb\x07\x00\x9b\u202ec\nd\te") == (r"a\x1b[31mb\x07\x00\x9b\u202ec d e")
    assert one_line("Ünïcödé 漢字 🙂 …") == "Ünïcödé 漢字 🙂 …"
    assert one_line("name \udcff") == r"name \udcff"


def test_a_long_line_keeps_its_beginning_and_end():
    path = f"{'/folder' * 500}/file.txt: there is no such file"
    assert one_line(path).startswith("/folder/folder")
    assert one_line(path).endswith("/file.txt: there is no such file")
    assert len(one_line("word " * 9999)) == MAX_LINE
