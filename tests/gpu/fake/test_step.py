"""Every shipped configuration takes a step on a GPU that is not there: `make fake-gpu`."""

import json
from pathlib import Path

import pytest

from tests.gpu.fake.library import run, why_not

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("bert", "decoder", "finetune", "gpt2", "mixer", "mixture", "quickstart", "vit",
           "wikitext103")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_step_mixes_no_devices_and_asks_for_no_number(folder: str, tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    files = sorted(str(path) for path in (ROOT / "configs" / folder).glob("*.yaml"))
    done = run("step", files, tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["config"] for each in found] == files, done.stderr[-2000:]
    assert not {each["config"]: each["failed"] for each in found if each["failed"]}
