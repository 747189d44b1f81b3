"""Groups of processes of the scaling bench, and the socket that they wait on."""

import socket
from pathlib import Path

import pytest

from polyad.train.errors import RunError
from tests.benchmarks.scaling_worlds import _bind


def test_a_folder_for_temporary_files_with_a_long_name_is_one_line(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as listener,
        pytest.raises(RunError, match=r"TMPDIR: .*/b: "),
    ):
        _bind(listener, str(tmp_path / ("long" * 30) / "b"))
