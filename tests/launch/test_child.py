"""Commands in processes of their own, as the quickstart and studies start them."""

from pathlib import Path

import pytest

from launch.child import polyad

pytestmark = pytest.mark.distributed


def test_the_status_of_a_command_is_that_of_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert polyad("train", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml: there is no such file" in capfd.readouterr().err
    assert polyad("--version") == 0


@pytest.mark.slow
def test_a_command_that_starts_processes_itself_does_not_end_them(config: Path) -> None:
    # Workers of torchrun are no children of this process, and are not to end because of that.
    assert polyad("launch", str(config), "--processes-per-node", "2") == 0
    assert (config.parent / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists()
