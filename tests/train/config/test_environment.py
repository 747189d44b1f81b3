"""Processes that would do different things refuse to start, and say what differs where."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from polyad.data.text.prepare import prepare
from polyad.parallel.comm import STORE, comparison
from polyad.train.config.environment import agreed_facts, folder_digest
from polyad.train.config.run import load_config
from polyad.train.tasks.registry import open_task
from tests.helpers.everyday import everyday
from tests.helpers.runs import write_config

KEYS = [
    ("optimizer.learning_rate=0.02", "0.01 on", "0.02 on"),
    ("train.steps=9", "6 on", "9 on"),
    ("optimizer.clip_grad_norm=0.5", "1.0 on", "0.5 on"),
    ("optimizer.weight_decay=0.3", "on", "0.3 on"),
    ("seed=4", "3 on", "4 on"),
    ("train.micro_batch_size=4", "2 on", "4 on"),
    ("model.dropout=0.1", "0.0 on", "0.1 on"),
]


def go_to_own_host(rank: int) -> None:
    """Makes relative paths begin at a folder that only this process has, as on a disk of a host."""
    os.chdir(os.environ["HOSTS"].split(":")[rank])


def end_at_once(rank: int) -> None:
    """A process that was killed before it came."""
    if rank == 1:
        os._exit(9)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if "error" in line]


@pytest.mark.parametrize(("override", "ours", "theirs"), KEYS)
def test_a_key_that_differs_is_named_with_both_values(
    override: str, ours: str, theirs: str, tmp_path: Path, prepared_path: Path
) -> None:
    path = write_config(tmp_path / "config.yaml", prepared_path)
    told = []
    for name, words in (("a", []), ("b", [override])):
        config = load_config(path, words)
        task = open_task(config.for_task())
        config = config.model_copy(update={"model": task.model})
        told.append((name, agreed_facts(config, task)))
    (line,) = comparison(told)
    assert line.startswith(f"{override.partition('=')[0]}: ")
    assert f"{ours} a, {theirs} b" in line


@pytest.mark.distributed
@pytest.mark.parametrize(("override", "ours", "theirs"), KEYS[:2])
def test_processes_with_other_keys_train_no_step(
    override: str, ours: str, theirs: str, forks: Any, tmp_path: Path, prepared_path: Path
) -> None:
    path = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    run = forks.start(tmp_path, ["train", str(path)], last=[override])
    assert run.wait() == [2, 2], run.text()
    (line,) = errors(run.logs[0].read_text())
    assert line.startswith(f"polyad: error: {override.partition('=')[0]}: ")
    assert all(word in line for word in (ours, theirs, "(rank 0)", "(rank 1)"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.distributed
def test_processes_with_other_text_behind_one_key_train_no_step(
    forks: Any, tmp_path: Path, prepared_path: Path, texts: Path
) -> None:
    other = tmp_path / "texts.jsonl"
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    other.write_text("".join(json.dumps({"text": each["text"].upper()}) + "\n" for each in lines))
    data = tmp_path / "data"
    prepare(str(other), str(prepared_path / "tokenizer.json"), data)
    path = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    run = forks.start(tmp_path, ["train", str(path)], last=[f"data.path={data}"])
    assert run.wait() == [2, 2], run.text()
    (line,) = errors(run.logs[0].read_text())
    assert line.startswith("polyad: error: data.path (train): contents ")
    assert "data.path (validation)" in line


@pytest.mark.distributed
@everyday("key", ["checkpoint.init_from", "distill.teacher"], keep=[])
def test_processes_with_another_checkpoint_at_one_place_train_no_step(
    key: str, forks: Any, tmp_path: Path, prepared_path: Path
) -> None:
    for seed in (3, 4):
        folder = tmp_path / f"host-{seed}" / "start"
        folder.parent.mkdir()
        path = write_config(
            tmp_path / f"{seed}.yaml", prepared_path,
            run__folder=str(folder), train__steps=1, seed=seed, log__trackers=[],
        )  # fmt: skip
        run = forks.start(folder.parent, ["train", str(path)], processes=1)
        assert run.wait() == [0], run.text()
    path = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    run = forks.start(
        tmp_path,
        ["train", str(path), f"{key}=start"],
        before=go_to_own_host,
        LOCAL_RANK="0",  # each is the first of its host
        HOSTS=f"{tmp_path / 'host-3'}:{tmp_path / 'host-4'}",
    )
    assert run.wait() == [2, 2], run.text()
    (line,) = errors(run.logs[0].read_text())
    assert line.startswith(f"polyad: error: {key}: start/checkpoints/step-00000001: contents ")
    assert "all processes need the same" in line


@pytest.mark.distributed
@everyday("last", ["evaluation.batch_size=3", "--split=train"], ["--split=train"])
def test_processes_that_would_evaluate_otherwise_score_nothing(
    last: str, forks: Any, tmp_path: Path, prepared_path: Path
) -> None:
    path = write_config(tmp_path / "config.yaml", prepared_path, train__steps=1, log__trackers=[])
    run = forks.start(tmp_path, ["train", str(path)], processes=1)
    assert run.wait() == [0], run.text()
    run = forks.start(tmp_path, ["evaluate", str(tmp_path / "run")], last=[last])
    assert run.wait() == [2, 2], run.text()
    (line,) = errors(run.logs[0].read_text())
    assert line.startswith("polyad: error: the command's ")
    assert "all processes need the same" in line


@pytest.mark.distributed
def test_a_process_that_waits_for_one_that_was_killed_stops_at_once(
    forks: Any, tmp_path: Path, prepared_path: Path
) -> None:
    path = write_config(tmp_path / "config.yaml", prepared_path, log__trackers=[])
    store = tmp_path / "store"
    run = forks.start(tmp_path, ["train", str(path)], before=end_at_once, **{STORE: str(store)})
    run.until(store.exists)
    run.signal(signal.SIGTERM, 0)
    assert run.wait(timeout=20) == [143, 9], run.text()
    assert not errors(run.text())


def test_a_copy_of_the_data_elsewhere_is_the_same_data(tmp_path: Path, prepared_path: Path) -> None:
    copied = shutil.copytree(prepared_path, tmp_path / "copy")
    path = write_config(tmp_path / "config.yaml", prepared_path)
    told = []
    for words in ([], [f"data.path={copied}", f"run.folder={tmp_path / 'elsewhere'}"]):
        config = load_config(path, words)
        told.append(("here", agreed_facts(config, open_task(config.for_task()))))
    assert comparison(told) == []


def test_weights_that_differ_in_one_tensor_have_another_digest(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        content = bytearray(1_000_000)
        content[500_000] = name == "c"
        (tmp_path / name / "model.safetensors").write_bytes(content)
    first, same, other = (folder_digest(tmp_path / name) for name in ("a", "b", "c"))
    assert first == same != other
