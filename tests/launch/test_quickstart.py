"""The parts of `make quickstart`; the whole of it takes minutes and is run by hand and by CI."""

import subprocess
from pathlib import Path

import pytest

from polyad.launch.quickstart import (
    TEXT_CONFIG,
    TextQuickstart,
    remove_previous_run,
    step_to_go_on_from,
)
from polyad.train.errors import ConfigError


def test_a_previous_run_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    remove_previous_run(tmp_path / "none")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    (run / "checkpoints").mkdir()
    (run / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        remove_previous_run(run)
    (run / "notes.txt").unlink()
    remove_previous_run(run)
    assert not run.exists()
    run.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        remove_previous_run(run)


def test_a_run_that_was_stopped_goes_on_and_one_that_came_to_its_end_does_not(
    tmp_path: Path,
) -> None:
    run, result = tmp_path / "run", tmp_path / "validation.json"
    assert step_to_go_on_from(run, result) == 0
    for step in (4, 94):
        checkpoint = run / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    assert step_to_go_on_from(run, result) == 94
    result.touch()
    assert step_to_go_on_from(run, result) == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_the_table_names_what_was_reached(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]], data: Path
) -> None:
    folder, done = finished_run
    assert done.returncode == 0, done.stderr
    result = {
        **{"perplexity": 12.25, "tokens_scored": 1234},
        **{"word_perplexity": 99.5, "bits_per_byte": 1.5},
    }
    quickstart = TextQuickstart(TEXT_CONFIG, folder.parent)
    quickstart.run, quickstart.data = folder, data
    rows = dict(quickstart.finish(result, half=2))
    assert rows["perplexity"].startswith("12.2")
    assert "step-00000002" in rows["continued"]
    assert "tensorboard" in rows["curves"]
    assert float(rows["unigram baseline"].split()[0]) > 1
