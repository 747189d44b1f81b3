"""The quickstarts: what the scripts type is valid, and a small one goes from text to a table."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.started import ROOT
from tests.helpers.written import parsed

SCRIPTS = sorted((ROOT / "configs" / "quickstart").glob("*.sh"))
SMALL = (
    "model.hidden_size=32 model.num_heads=2 model.num_layers=2 model.sequence_length=32 "
    "train.global_batch_size=4 train.micro_batch_size=2 evaluation.every=0 schedule.warmup_steps=1"
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_line_is_a_command_that_can_be_typed(path):
    text = path.read_text().replace("\\\n", " ")
    values = dict(re.findall(r"^(\w+)=(\S+)", text, re.MULTILINE)) | {"larger": "", "images": "x"}
    found = re.findall(r"^ *(polyad .*)|  (polyad .*)", text, re.MULTILINE)
    commands = [re.sub(r"\"?\$(\w+)\"?", lambda m: values[m[1]], a or b) for a, b in found]
    assert len(commands) >= 7
    for command in commands:
        parsed(command.replace("'", "").split()[1:])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_small_quickstart_ends_with_its_table_and_again(tmp_path):
    text = (ROOT / "configs" / "quickstart" / "run.sh").read_text()
    for old, new in (
        (
            "--source python-stdlib --tokenizer train:8192",
            f"--source {tmp_path / 'text'} --tokenizer train:300",
        ),
        (
            "train.steps=100 schedule.decay_steps=200",
            f"train.steps=2 schedule.decay_steps=4 {SMALL}",
        ),
        ("--processes-per-node 2\n", f"--processes-per-node 2 train.steps=4 {SMALL}\n"),
        ("step-00000100", "step-00000002"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "text").mkdir()
    for number in range(100):
        words = "".join(f"line {n} of file {number}\n" for n in range(40))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    script = tmp_path / "run.sh"
    script.write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        table = dict(re.findall(r"^(\w[\w ]*?)  +(.*)", done.stdout, re.MULTILINE))
        assert float(table["unigram baseline"].split()[0]) > 1
        assert table["continued"].endswith("checkpoints/step-00000002")
        assert re.fullmatch(r"[\d,]+ tokens/s in training on 2 processes", table["speed"])
