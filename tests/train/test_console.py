"""What a person sees: sizes, and a line on terminals of any width."""

import fcntl
import os
import pty
import struct
import termios

import pytest

from polyad.train.console import Console, Progress, counted, in_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (999.4, "999 B"), (999.6, "1 KB"), (1000, "1 KB"),
        (1234, "1.23 KB"), (999_499, "999 KB"), (999_500, "1 MB"), (999_999, "1 MB"),
        (85_899_345_920, "85.9 GB"), (1e12, "1 TB"), (999.6e12, "1 PB"), (1e18, "1 EB"),
        (5e21, "5,000 EB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_no_exponent(size, text):
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "process", "1 process"), (2000, "process", "2,000 processes"), (1, "block", "1 block"),
        (0, "block", "0 blocks"), (2, "micro-batch", "2 micro-batches"),
    ],
)  # fmt: skip
def test_a_number_and_its_noun_agree(number, noun, text):
    assert counted(number, noun) == text


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
    progress = Progress("reading", 1000.0)
    progress(0.0)
    assert "reading [----------------]   0%  0 tok/s  -:-- left" in capsys.readouterr().err
