"""`polyad prepare --part` and `--join`."""

import json

import pytest

from polyad.launch.cli import run


@pytest.mark.slow
def test_parts_are_joined(text, tmp_path, data, capfd):
    command = ["prepare", "--source", str(text), "--tokenizer", str(data), "--documents", "lines"]
    command += ["--output", str(tmp_path / "out")]
    for number in (1, 2):
        assert run([*command, "--part", f"{number}/2"]) == 0
        assert f"in {tmp_path / 'out'}.part-{number}-of-2\n" in capfd.readouterr().out
    assert run(["prepare", "--join", "--output", str(tmp_path / "out")]) == 0
    assert f"in {tmp_path / 'out'}\n" in capfd.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["request"]["part"] is None
