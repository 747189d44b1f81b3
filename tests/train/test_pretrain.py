"""Whole runs: the folder, going on after a stop, and what is refused."""

import fcntl
import json
import math
import shutil
import time

import pytest
import torch
import yaml

from polyad.data.text.prepare import prepare
from polyad.parallel.checkpoint.manage import complete_checkpoints
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_tensors
from tests.helpers.prepared import flip
from tests.helpers.runs import (
    FEED_FORWARDS,
    in_tensorboard,
    records,
    refusal,
    run,
    run_and_listen,
    run_expecting_error,
    write_config,
)
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(trained):
    """The folder of the configuration and of a finished run of 6 steps by 2 processes."""
    return trained("dense").parent


@pytest.fixture
def other_data(texts, tmp_path):
    """Prepares data with a tokenizer and a share of validation; gives the folder."""

    def made(tokenizer, validation):
        folder = tmp_path / f"{tokenizer[6:]}-{validation}"
        prepare(str(texts), tokenizer, folder, validation_fraction=validation)
        return folder

    return made


def test_a_run_folder_holds_everything(finished):
    folder = finished / "run"
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["model"]["vocab_size"] == 400  # from the data
    assert resolved["optimizer"]["betas"] == [0.9, 0.95]  # a default, written out
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert {"command", "git_commit", "host", "device", "world_size"} <= set(environment)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000006"]
    state = json.loads((folder / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (6, 48, 48 * 32)


def test_every_step_has_a_record_and_tensorboard_the_same_numbers(finished):
    lines = records(finished / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["validation_loss" in line for line in lines] == [False, False, True] * 2
    assert all(line["memory_bytes"] > 50e6 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    scalars = in_tensorboard(finished / "run")
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "validation_loss"):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert scalars[name] == pytest.approx(expected, rel=1e-6)
    for line in lines[2::3]:
        assert line["validation_perplexity"] == math.exp(line["validation_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("smoe", 2, 1), ("dense", 2, 1), ("dense", 1, 2), ("cp", 2, 1), ("tr", 1, 2)],
)
def test_a_run_goes_on_by_itself_on_another_layout(workers, trained, config, kind, first, second):
    section, folder = f"model.feed_forward={FEED_FORWARDS[kind]}", config.parent / "run"
    workers(first).run(run, config, section, "train.steps=4", "checkpoint.every=3")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")  # as if killed after step 4
    time.sleep(1.1)  # TensorBoard orders files by the second in their names
    (folder / "metrics.jsonl").open("a").write('{"step": 5, "lo')
    assert workers(second).run(run, config, section, "parallel.zero_stage=2")[0] == 6
    ours, theirs = (
        {line["step"]: line["loss"] for line in records(each)} for each in (folder, trained(kind))
    )
    assert list(ours) == [1, 2, 3, 4, 5, 6]  # none twice, none lost
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert list(in_tensorboard(folder)["loss"]) == list(ours)


def test_a_finished_run_has_nothing_left_to_do(workers, finished):
    before = records(finished / "run")
    assert workers(2).run(run, finished / "config.yaml") == [6, 6]
    assert records(finished / "run") == before


@pytest.mark.slow
def test_a_group_rises_over_its_own_steps_also_after_a_stop(workers, tmp_path, prepared_path):
    def train(group, *stops):
        """The weights and moments at the end, after a run that stopped on the way."""
        folder = tmp_path / f"{group} {stops}"
        config = write_config(
            folder / "config.yaml", prepared_path,
            model__feed_forward=FEED_FORWARDS["smoe"], optimizer__kind="sgd",
            optimizer__groups=[{"match": "blocks.*.feed_forward.*", **group}],
        )  # fmt: skip
        for steps in stops:
            workers(2).run(run, config, f"train.steps={steps}")
        return tensors(folder / "run" / "checkpoints" / f"step-{stops[-1]:08}")

    def same(one, other):
        return {name for name, field in one if torch.equal(one[name, field], other[name, field])}

    level, rising = {"learning_rate": 0.25}, {"warmup_steps": 4}
    begun, whole = train(rising, 1), train(rising, 2)
    assert same(begun, train(level, 1)) == {name for name, _ in begun}
    assert same(whole, train(rising, 1, 2)) == {name for name, _ in whole}
    moved = {"blocks.1.feed_forward.experts.up", "blocks.0.feed_forward.up.weight"}
    assert not moved & same(whole, train(level, 2))


@pytest.mark.slow
def test_a_profile_is_written_on_request(workers, config, tmp_path):
    workers(1).run(run, config, "log.profile.first_step=2", "log.profile.num_steps=2")
    trace = json.loads((tmp_path / "run" / "profile" / "rank-00000.json").read_text())
    assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])


def test_data_without_a_validation_split_trains(workers, tmp_path, other_data):
    config = write_config(tmp_path / "config.yaml", other_data("train:300", 0))
    assert workers(1).run(run, config) == [6]
    assert "validation_loss" not in records(tmp_path / "run")[-1]


def test_too_many_steps_that_are_not_finite_end_the_run(workers, config, tmp_path):
    # The learning rate throws the weights so far that every later loss overflows.
    name, text, status = workers(2).run(
        run_expecting_error, config, "optimizer.learning_rate=1e6", "train.max_skipped_steps=2",
        "optimizer.clip_grad_norm=0", "train.steps=50", "checkpoint.every=1",
        "checkpoint.keep_last=1",
    )[0]  # fmt: skip
    assert (name, status) == ("RunError", 1)
    assert "2 steps in a row" in text
    *before, last = records(tmp_path / "run")
    assert last["skipped"]
    assert last["loss"] is None
    # What may be damaged does not take the place of a good checkpoint.
    good = [line["step"] for line in before if not line["skipped"]][-1]
    assert text.endswith(f"the last checkpoint is of step {good}")
    (kept,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert kept.name == f"step-{good:08d}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_layers=3", "holds another run: model.num_layers: "),
        ("train.steps=2", "train.steps: 2 is less than the 6 steps"),
        ("data.path={}", "holds other data"),
    ],
)
def test_a_folder_that_holds_another_run_is_refused(workers, finished, other_data, override, said):
    change = override.format(other_data("train:400", 0.2))
    assert said in refusal(workers(2), finished / "config.yaml", change)


def test_a_run_goes_on_from_a_checkpoint_whose_replacement_was_cut_short(workers, config, tmp_path):
    assert workers(2).run(run, config) == [6, 6]
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("step-*"):
        path.rename(checkpoints / f".{path.name}.replaced")
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is in use by another start of this run" in refusal(workers(2), config)
    assert not list(checkpoints.glob("step-*"))
    assert workers(2).run(run, config, "train.steps=7") == [7, 7]
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, 8))
    assert (checkpoints / "step-00000006" / "manifest.json").is_file()
    assert not list(checkpoints.glob(".step*"))


def test_a_folder_that_cannot_be_locked_is_refused_on_all_processes(workers, config, tmp_path):
    (tmp_path / "run" / ".lock").mkdir(parents=True)  # as a file system without locks: an OSError
    assert ".lock" not in refusal(workers(2), config)
    assert refusal(workers(2), config).endswith("cannot be locked: Is a directory")


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(workers, config, copy):
    path = copy / "train.bin"
    size = path.stat().st_size
    with path.open("r+b") as file:  # in the middle: opening looks at the ends alone
        file.seek(size * 2 // 5 // 2 * 2)
        file.write(b"\xff" * (size // 5))
    text = refusal(workers(1), config, f"data.path={copy}", "train.steps=40")
    assert "train.bin: damaged: token" in text


@everyday("damage", ["cut", "flipped", "without manifest"], keep=["flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    workers, finished, config, tmp_path, damage
):
    shutil.copytree(finished / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    good, path = tensors(newest), newest / "rank-00001.safetensors"
    what = f"{path}: damaged: "
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "without manifest":
        (newest / "manifest.json").unlink()
        what = f"{newest}: is not a complete checkpoint: no manifest.json"
    else:
        flip(path, 5)  # in the header, which nobody but verification reads
    (steps, said), (_, silent) = workers(2).run(run_and_listen, config)
    assert (steps, "warning" in silent) == (6, False)
    (warning,) = [line for line in said.splitlines() if "warning" in line]
    assert warning.startswith(f"polyad: warning: {what}")
    assert warning.endswith("; the run continues from step-00000003")
    assert_equal_tensors(tensors(newest), good)


def test_a_run_without_a_good_checkpoint_is_refused(workers, finished, config, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    paths = sorted((tmp_path / "run" / "checkpoints").glob("*/rank-00000.safetensors"))
    for path in paths:
        flip(path, -1)
    text = refusal(workers(2), config)
    assert all(f"{path}: damaged: " in text for path in paths)
    assert "no good checkpoint is left" in text
