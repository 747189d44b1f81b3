"""What a person sees: sizes, values in errors, and a line on terminals of any width."""

import fcntl
import os
import pty
import struct
import termios

import pytest

from polyad.train.errors import MAX_LINE, one_line, shown
from polyad.train.results import Console, Progress, counted, in_bytes


def test_sizes_have_three_digits_and_no_exponent():
    for size, text in (
        (0, "0 B"), (999.4, "999 B"), (999.6, "1 KB"), (1234, "1.23 KB"), (999_499, "999 KB"),
        (999_500, "1 MB"), (85_899_345_920, "85.9 GB"), (999.6e12, "1 PB"), (5e21, "5,000 EB"),
    ):  # fmt: skip
        assert in_bytes(size) == text
    counts = [counted(n, noun) for n, noun in ((1, "process"), (2000, "process"), (0, "block"))]
    assert counts == ["1 process", "2,000 processes", "0 blocks"]


@pytest.mark.parametrize(
    ("columns", "expected"), [(0, "x" * 79), (1, ""), (10, "x" * 9), (500, "x" * 100)]
)
def test_a_line_fits_a_terminal_of_any_width(columns, expected):
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(inner, "w") as stream:
        Console(stream).show("x" * 100)
        assert os.read(outer, 1000).decode() == f"\r{expected}"
    os.close(outer)


def test_before_anything_is_done_no_time_is_left_to_tell(capsys):
    Progress("reading", 1000.0)(0.0)
    assert "reading [----------------]   0%  0 tok/s  -:-- left" in capsys.readouterr().err


def test_a_long_value_or_line_is_shown_by_its_beginning_and_end():
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("a" + "x" * 500 + "z").startswith("'axxx")
    assert shown("a" + "x" * 500 + "z").endswith("xxxz'")
    assert len(shown("x" * 500)) == len(shown(list(range(9999)))) == 200
    path = f"{'/folder' * 500}/file.txt: there is no such file"
    assert one_line(path).startswith("/folder/folder")
    assert one_line(path).endswith("/file.txt: there is no such file")
    assert len(one_line("word " * 9999)) == MAX_LINE


def test_a_line_controls_no_terminal():
    assert one_line("a\x1b[31mb\x07\x00\x9b\u202ec\nd\te") == (r"a\x1b[31mb\x07\x00\x9b\u202ec d e")
    assert one_line("Ünïcödé 漢字 🙂 …") == "Ünïcödé 漢字 🙂 …"
    assert one_line("name \udcff") == r"name \udcff"
