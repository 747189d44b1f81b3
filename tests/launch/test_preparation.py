"""`polyad prepare --part` and `--join`."""

import json
from pathlib import Path

import pytest

from polyad.launch.cli import run


def words(text: Path, output: Path, tokenizer: Path) -> list[str]:
    options = ["--tokenizer", str(tokenizer), "--output", str(output)]
    return ["prepare", "--source", str(text), *options]


@pytest.mark.slow
def test_parts_are_joined(text, tmp_path, data, capfd):
    command = [*words(text, tmp_path / "out", data), "--documents", "lines"]
    for number in (1, 2):
        assert run([*command, "--part", f"{number}/2"]) == 0
        assert f"in {tmp_path / 'out'}.part-{number}-of-2\n" in capfd.readouterr().out
    assert run(["prepare", "--join", "--output", str(tmp_path / "out")]) == 0
    assert f"in {tmp_path / 'out'}\n" in capfd.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["request"]["part"] is None
