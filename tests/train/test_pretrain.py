"""Whole runs: the folder, going on after a stop, and what is refused."""

import fcntl
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyad.parallel.checkpoint.manage import complete_checkpoints
from tests.helpers.everyday import everyday
from tests.helpers.runs import (
    FEED_FORWARDS,
    records,
    refusal,
    run,
    run_and_listen,
    run_expecting_error,
    write_config,
)
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


@pytest.fixture
def config(tmp_path, prepared_path):
    return write_config(tmp_path / "config.yaml", prepared_path)


@pytest.fixture(scope="module")
def finished(trained):
    """The folder of the configuration and of a finished run of 6 steps by 2 processes."""
    return trained("dense").parent


def test_a_run_folder_holds_everything(finished):
    folder = finished / "run"
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["model"]["vocab_size"] == 400  # from the data
    assert resolved["optimizer"]["betas"] == [0.9, 0.95]  # a default, written out
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["command"].startswith("polyad")
    assert {"git_commit", "host", "device", "world_size"} <= set(environment)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["latest", "step-00000003", "step-00000006"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000006\n"
    state = json.loads((folder / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (6, 48, 48 * 32)


def test_every_step_has_a_record_and_tensorboard_the_same_numbers(finished):
    lines = records(finished / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["validation_loss" in line for line in lines] == [False, False, True] * 2
    assert lines[-1]["loss"] < lines[0]["loss"]
    events = EventAccumulator(str(finished / "run" / "tensorboard"))
    events.Reload()
    validation = ("validation_loss", "validation_perplexity")
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", *validation):
        expected = {line["step"]: line[name] for line in lines if name in line}
        actual = {event.step: event.value for event in events.Scalars(name)}
        assert actual == pytest.approx(expected, rel=1e-6)
    for line in lines[2::3]:
        assert line["validation_perplexity"] == math.exp(line["validation_loss"])


@everyday("processes", [2, 4], keep=[])
def test_tensor_parallel_processes_train_and_validate_alike(
    workers, finished, config, tmp_path, processes
):
    workers(processes).run(run, config, "parallel.tensor_parallel_size=2")
    for ours, theirs in zip(records(tmp_path / "run"), records(finished / "run"), strict=True):
        keys = {"loss", "grad_norm", "validation_loss"} & theirs.keys()
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@everyday(
    ("kind", "first", "second"),
    [("dense", 2, 1), ("dense", 1, 2), ("smoe", 2, 1), ("cp", 2, 1), ("tr", 1, 2)],
    keep=[("smoe", 2, 1)],
)
@pytest.mark.slow
def test_a_run_goes_on_by_itself_on_another_layout(
    workers, trained, tmp_path, prepared_path, kind, first, second
):
    section = {"model__feed_forward": FEED_FORWARDS[kind]}
    config = write_config(tmp_path / "config.yaml", prepared_path, **section)
    workers(first).run(run, config, "train.steps=4", "checkpoint.every=3")
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoints" / "step-00000004")  # as if killed after step 4
    time.sleep(1.1)  # TensorBoard orders files by the second in their names
    (folder / "metrics.jsonl").open("a").write('{"step": 5, "lo')
    assert workers(second).run(run, config, "parallel.zero_stage=2")[0] == 6
    lines, expected = records(folder), records(trained(kind))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]  # none twice, none lost
    losses = torch.tensor([[a["loss"], b["loss"]] for a, b in zip(lines, expected, strict=True)])
    assert torch.allclose(losses[:, 0], losses[:, 1], rtol=1e-5, atol=0)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_has_nothing_left_to_do(workers, finished):
    before = records(finished / "run")
    assert workers(2).run(run, finished / "config.yaml") == [6, 6]
    assert records(finished / "run") == before


def test_init_from_takes_weights_alone(workers, finished, config, tmp_path):
    source = finished / "run"
    workers(1).run(
        run, config, f"checkpoint.init_from={source}", "train.steps=1", "optimizer.kind=sgd",
        "optimizer.learning_rate=1e-12", "optimizer.clip_grad_norm=0",
    )  # fmt: skip
    before = tensors(source / "checkpoints" / "step-00000006")
    after = tensors(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert {field for _, field in after} == {"master"}
    for name, field in after:
        torch.testing.assert_close(after[name, field], before[name, field], rtol=0, atol=1e-9)
    assert records(tmp_path / "run")[0]["step"] == 1


@pytest.mark.slow
def test_a_group_rises_over_its_own_steps_also_after_a_stop(workers, tmp_path, prepared_path):
    def train(name, group, *stops):
        """The weights and moments at the end, after a run that stopped on the way."""
        (tmp_path / name).mkdir()
        config = write_config(
            tmp_path / name / "config.yaml", prepared_path, train__steps=2,
            model__feed_forward=FEED_FORWARDS["smoe"], optimizer__kind="sgd",
            optimizer__groups=[{"match": "blocks.*.feed_forward.*", **group}],
        )  # fmt: skip
        for steps in stops:
            workers(2).run(run, config, f"train.steps={steps}")
        return tensors(tmp_path / name / "run" / "checkpoints" / f"step-{stops[-1]:08}")

    quarter = train("quarter", {"learning_rate": 0.25}, 1)
    begun = train("begun", {"warmup_steps": 4}, 1)
    assert begun.keys() == quarter.keys()
    assert all(torch.equal(begun[key], quarter[key]) for key in quarter)
    stopped = train("stopped", {"warmup_steps": 4}, 1, 2)
    whole = train("whole", {"warmup_steps": 4}, 2)
    assert all(torch.equal(stopped[key], whole[key]) for key in whole)
    level = train("level", {"learning_rate": 0.25}, 2)
    moved = {
        name for name, field in whole if not torch.equal(level[name, field], whole[name, field])
    }
    assert {"blocks.1.feed_forward.experts.up", "blocks.0.feed_forward.up.weight"} <= moved


@pytest.mark.slow
def test_an_interrupted_run_says_where_it_goes_on(config, tmp_path):
    command = [sys.executable, "-m", "polyad.launch", "train", str(config), "train.steps=3000"]
    run = subprocess.Popen(
        [*command, "checkpoint.every=0", "evaluation.every=0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in run.stderr:
        if line.startswith("step") and " 3/3000 " in line:
            break
    run.send_signal(signal.SIGINT)
    *_, last = run.communicate(timeout=60)[1].splitlines()
    assert run.returncode == 130
    (newest,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert last == f"polyad: interrupted; run the same command again to continue from {newest}"


@everyday("workers_count", [0, 2], keep=[0])
def test_batches_do_not_depend_on_loader_workers(
    workers, finished, config, tmp_path, workers_count
):
    workers(2).run(run, config, f"data.num_workers={workers_count}")
    ours = [line["loss"] for line in records(tmp_path / "run")]
    assert ours == [line["loss"] for line in records(finished / "run")]


@pytest.mark.slow
def test_a_profile_is_written_on_request(workers, config, tmp_path):
    workers(1).run(run, config, "log.profile.first_step=2", "log.profile.num_steps=2")
    trace = json.loads((tmp_path / "run" / "profile" / "rank-00000.json").read_text())
    assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])


def test_data_without_a_validation_split_trains(workers, tmp_path, texts):
    from polyad.data.text.prepare import prepare

    prepare(str(texts), "train:300", tmp_path / "data", validation_fraction=0.0)
    config = write_config(tmp_path / "config.yaml", tmp_path / "data")
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
        *(
            (key, f"holds another run: {key.partition('=')[0]}: ")
            for key in ("seed=9", "model.num_layers=3", "optimizer.kind=sgd")
        ),
        ("train.steps=2", "train.steps: 2 is less than the 6 steps"),
    ],
)
def test_a_folder_that_holds_another_run_is_refused(workers, finished, override, said):
    assert said in refusal(workers(2), finished / "config.yaml", override)


def test_other_data_under_the_same_run_is_refused(workers, finished, tmp_path, texts):
    from polyad.data.text.prepare import prepare

    prepare(str(texts), "train:400", tmp_path / "other", validation_fraction=0.2)
    text = refusal(workers(2), finished / "config.yaml", f"data.path={tmp_path / 'other'}")
    assert "holds other data" in text


def test_weights_of_another_model_or_tokenizer_are_refused(
    workers, finished, config, tmp_path, texts
):
    from polyad.data.text.prepare import prepare

    init = f"checkpoint.init_from={finished / 'run'}"
    assert "is a different model" in refusal(workers(2), config, init, "model.num_layers=1")
    prepare(str(texts), "train:401", tmp_path / "other")
    other = f"data.path={tmp_path / 'other'}"
    text = refusal(workers(2), config, init, other, "model.vocab_size=401")
    assert "a different model" in text
    prepare(str(texts), "train:400", tmp_path / "third", validation_fraction=0.3)
    text = refusal(workers(2), config, init, f"data.path={tmp_path / 'third'}")
    assert "their token ids mean different things" in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.vocab_size=100", "model.vocab_size: 100 is less than the 400 tokens"),
        ("model.sequence_length=1000000", "needs 1,000,001"),
        ("data.path=nowhere", "data.path: nowhere"),
        ("data.path=null", "data.path: is missing"),
        ("run.folder=/proc/version/run", "run.folder: "),
    ],
)
def test_data_that_is_missing_or_does_not_fit_is_refused(workers, config, override, said):
    assert said in refusal(workers(2), config, override)


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
    steps = [
        json.loads(x)["step"] for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 8))
    assert (checkpoints / "step-00000006" / "manifest.json").is_file()
    assert not list(checkpoints.glob(".step*"))


def test_a_folder_that_cannot_be_locked_is_refused_on_all_processes(workers, config, tmp_path):
    (tmp_path / "run" / ".lock").mkdir(parents=True)  # as a file system without locks: an OSError
    assert ".lock" not in refusal(workers(2), config)
    assert refusal(workers(2), config).endswith("cannot be locked: Is a directory")


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(
    workers, config, tmp_path, prepared_path
):
    shutil.copytree(prepared_path, tmp_path / "data")
    size = (tmp_path / "data" / "train.bin").stat().st_size
    with (tmp_path / "data" / "train.bin").open("r+b") as file:
        file.seek(size * 2 // 5 // 2 * 2)
        file.write(b"\xff" * (size // 5))  # in the middle: opening looks at the ends alone
    data = f"data.path={tmp_path / 'data'}"
    text = refusal(workers(1), config, data, "train.steps=40")
    assert "train.bin: damaged: token" in text


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@everyday("damage", ["cut", "flipped", "without manifest"], keep=["flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    workers, finished, config, tmp_path, damage
):
    shutil.copytree(finished / "run", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    good = tensors(folder / "step-00000006")
    path = folder / "step-00000006" / "rank-00001.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "without manifest":
        (path.parent / "manifest.json").unlink()
    else:
        flip(path, 5)  # in the header, which nobody but verification reads
    (steps, said), (_, silent) = workers(2).run(run_and_listen, config)
    assert steps == 6
    assert "warning" not in silent
    (warning,) = [line for line in said.splitlines() if "warning" in line]
    what = f"{path}: damaged: "
    if damage == "without manifest":
        what = f"{path.parent}: is not a complete checkpoint: no manifest.json"
    assert warning.startswith(f"polyad: warning: {what}")
    assert warning.endswith("; the run continues from step-00000003")
    again = tensors(folder / "step-00000006")
    assert all(torch.equal(again[key], good[key]) for key in good)


def test_a_run_without_a_good_checkpoint_is_refused(workers, finished, config, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    paths = [
        tmp_path / "run" / "checkpoints" / f"step-0000000{step}" / "rank-00000.safetensors"
        for step in (3, 6)
    ]
    for path in paths:
        flip(path, -1)
    text = refusal(workers(2), config)
    assert all(f"{path}: damaged: " in text for path in paths)
    assert "no good checkpoint is left" in text


def test_as_many_checkpoints_stay_as_are_asked_for(workers, config, tmp_path):
    keys = ("checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_every=3")
    assert workers(1).run(run, config, *keys, "train.steps=7") == [7]
    names = [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert names == [f"step-0000000{step}" for step in (3, 6, 7)]


@pytest.mark.slow
def test_a_run_that_saves_while_it_trains_leaves_the_same_checkpoints(
    workers, finished, config, tmp_path
):
    keys = ("checkpoint.asynchronous=true", "checkpoint.every=1", "checkpoint.keep_last=4")
    assert workers(2).run(run, config, *keys) == [6, 6]
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name[-1] for path in complete_checkpoints(folder)] == ["3", "4", "5", "6"]
    assert sorted(path.name for path in folder.iterdir())[0] == "latest"  # nothing was left over
    for step in (3, 6):
        ours, theirs = (
            tensors(place / f"step-0000000{step}")
            for place in (folder, finished / "run" / "checkpoints")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert workers(2).run(run, config, *keys, "train.steps=8") == [8, 8]  # and goes on
