"""Processes that would do different things refuse to start, and say what differs where."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyad.data.text.prepare import prepare
from polyad.parallel.comm import comparison
from polyad.train.config.environment import agreed_facts, folder_digest
from polyad.train.config.run import load_config
from polyad.train.tasks.registry import open_task
from tests.helpers.everyday import everyday

pytestmark = pytest.mark.distributed
RUN_CHANGES = {"log__trackers": []}


def go_to_own_host(rank: int) -> None:
    """Makes relative paths begin at a folder that only this process has, as on a disk of a host."""
    os.chdir(os.environ["HOSTS"].split(":")[rank])


def refused(run: Any) -> str:
    """The line with which two processes refused to start."""
    assert run.wait() == [2, 2], run.text()
    (line,) = [line for line in run.logs[0].read_text().splitlines() if "error" in line]
    return line.removeprefix("polyad: error: ")


def test_what_differs_is_named_with_both_values(
    config: Path, tmp_path: Path, prepared_path: Path, texts: Path
) -> None:
    def differences(*words: str) -> list[str]:
        told = []
        for name, more in (("here", ()), ("there", words)):
            read = load_config(config, more)
            task = open_task(read.for_task())
            read = read.model_copy(update={"model": task.model})
            told.append((name, agreed_facts(read, task)))
        return comparison(told)

    for key, ours, theirs in (
        ("optimizer.learning_rate", 0.01, 0.02), ("train.steps", 6, 9), ("seed", 3, 4),
        ("train.micro_batch_size", 2, 4), ("model.dropout", 0.0, 0.1),
    ):  # fmt: skip
        (line,) = differences(f"{key}={theirs}")
        assert line.startswith(f"{key}: ")
        assert f"{ours} on here, {theirs} on there" in line
    copied = shutil.copytree(prepared_path, tmp_path / "copy")
    assert differences(f"data.path={copied}", f"run.folder={tmp_path / 'elsewhere'}") == []
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    other = tmp_path / "texts.jsonl"
    other.write_text("".join(json.dumps({"text": each["text"].upper()}) + "\n" for each in lines))
    prepare(str(other), str(prepared_path / "tokenizer.json"), tmp_path / "data")
    named = [line.partition(" contents ")[0] for line in differences(f"data.path={tmp_path}/data")]
    assert named == ["data.path (train):", "data.path (validation):"]


def test_processes_with_other_keys_train_no_step(forks: Any, config: Path, tmp_path: Path) -> None:
    line = refused(forks.start(tmp_path, ["train", str(config)], last=["train.steps=9"]))
    assert line.startswith("train.steps: ")
    assert all(word in line for word in ("6 on", "9 on", "(rank 0)", "(rank 1)"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@everyday("key", ["checkpoint.init_from", "distill.teacher"], keep=[])
def test_processes_with_another_checkpoint_at_one_place_train_no_step(
    key: str, forks: Any, config: Path, tmp_path: Path
) -> None:
    for seed in (3, 4):
        folder = tmp_path / f"host-{seed}" / "start"
        words = ["train", str(config), f"run.folder={folder}", "train.steps=1", f"seed={seed}"]
        run = forks.start(folder.parent, words, processes=1)
        assert run.wait() == [0], run.text()
    hosts = f"{tmp_path / 'host-3'}:{tmp_path / 'host-4'}"
    command = ["train", str(config), f"{key}=start"]  # each process is the first of its host
    run = forks.start(tmp_path, command, before=go_to_own_host, LOCAL_RANK="0", HOSTS=hosts)
    assert refused(run).startswith(f"{key}: start/checkpoints/step-00000001: contents ")


@everyday("last", ["evaluation.batch_size=3", "--split=train"], ["--split=train"])
def test_processes_that_would_evaluate_otherwise_score_nothing(
    last: str, forks: Any, config: Path, tmp_path: Path
) -> None:
    run = forks.start(tmp_path, ["train", str(config), "train.steps=1"], processes=1)
    assert run.wait() == [0], run.text()
    run = forks.start(tmp_path, ["evaluate", str(tmp_path / "run")], last=[last])
    assert refused(run).startswith("the command's ")


def test_weights_that_differ_in_one_tensor_have_another_digest(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        content = bytearray(1_000_000)
        content[500_000] = name == "c"
        (tmp_path / name / "model.safetensors").write_bytes(content)
    first, same, other = (folder_digest(tmp_path / name) for name in ("a", "b", "c"))
    assert first == same != other
