"""`polyad configs`: what comes with Polyad, listed and printed."""

import pytest

from polyad.launch.cli import run
from polyad.train.config.run import SHIPPED, load_config, shipped_configs


def test_all_are_listed_with_what_they_are_for(capfd):
    assert run(["configs"]) == 0
    rows = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
    names = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in shipped_configs()]
    assert [name for name, _ in rows] == sorted(names)
    assert "launch/kubernetes" not in names
    about = dict(rows)
    assert about["gpt2/124m-smoe-16"].startswith("GPT-2 124M with 16 experts in every block")
    assert all(len(text) <= 72 and "$schema" not in text for text in about.values())


@pytest.mark.parametrize("name", ["quickstart/gpt2", "configs/quickstart/gpt2.yaml"])
def test_one_is_printed_as_it_is_and_can_be_trained(name, tmp_path, capfd):
    assert run(["configs", name]) == 0
    printed = capfd.readouterr().out
    assert printed == (SHIPPED / "quickstart/gpt2.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(printed)
    assert load_config(tmp_path / "mine.yaml", []).train.steps == 200
