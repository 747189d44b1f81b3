"""The moving average of a run's weights: evaluated, converted, begun late, refused in one line."""

import shutil

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.model.smoe.router import INITIAL_TEMPERATURE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers.runs import evaluated, evaluation, newest, run, run_and_listen, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def averaged(workers, tmp_path_factory, prepared_path):
    folder = tmp_path_factory.mktemp("averaged")
    config = write_config(folder / "config.yaml", prepared_path, train__ema=0.8)
    workers(2).run(run, config)
    return folder / "run"


@pytest.mark.slow
def test_evaluate_scores_the_average_by_choice(workers, averaged, tmp_path, prepared_path):
    (trained, plain), (average, text) = (
        workers(1).run(evaluated, averaged, weights=weights)[0] for weights in ("trained", "ema")
    )
    assert (trained["weights"], average["weights"]) == ("trained", "ema")
    assert abs(trained["loss"] - average["loss"]) > 0.01
    assert workers(1).run(evaluation, averaged)[0]["loss"] == trained["loss"]
    two = workers(2).run(evaluation, averaged, weights="ema")[0]
    assert two["loss"] == pytest.approx(average["loss"], rel=1e-6)
    # A checkpoint whose weights are the average.
    result = convert(averaged, tmp_path / "ema", "polyad", choice="ema")
    assert any("moving average" in note for note in result["notes"])
    again = workers(1).run(evaluation, tmp_path / "ema", data=str(prepared_path))[0]
    assert again["loss"] == pytest.approx(average["loss"], rel=1e-6)
    assert "their moving average" in text
    assert "moving average" not in plain


@pytest.mark.slow
def test_a_process_without_any_of_few_trained_numbers_has_no_part_of_the_average(
    workers, tmp_path, prepared_path
):
    config = write_config(
        tmp_path / "config.yaml",
        prepared_path,
        train__ema=0.8,
        model__feed_forward={"kind": "smoe", "num_experts": 4, "score": "cosine"},
        optimizer__groups=[
            {"match": "blocks.0.feed_forward.router.score.temperature"},
            {"match": "*", "freeze": True},
        ],
    )
    results = {}
    for processes in (1, 2):
        folder = tmp_path / f"{processes}"
        micro = f"train.micro_batch_size={4 // processes}"
        workers(processes).run(run, config, f"run.folder={folder}", micro)
        stored = Checkpoint(newest(folder))
        results[processes] = stored.whole("blocks.0.feed_forward.router.score.temperature", "ema")
    torch.testing.assert_close(results[1], results[2])
    assert abs(results[1].item() - INITIAL_TEMPERATURE) > 1e-3


@pytest.mark.parametrize("to", ["safetensors", "polyad"])
def test_convert_writes_the_average_by_choice(averaged, tmp_path, to, capfd):
    arguments = ["convert", str(averaged), str(tmp_path / "new"), "--to", to]
    assert polyad([*arguments, "--weights", "ema"]) == 0
    stored = Checkpoint(newest(averaged))
    for name, parameter in load_model(tmp_path / "new").named_parameters():
        assert torch.equal(parameter, stored.whole(name, "ema"))
        assert not torch.equal(parameter, stored.whole(name))
    assert not Checkpoint(tmp_path / "new").has_average if to == "polyad" else True


def test_a_run_without_an_average_is_one_line(finished, averaged, exported, tmp_path, capfd):
    for arguments, said in [
        (["evaluate", str(finished)], "has no moving average of its weights"),
        (["convert", str(finished), str(tmp_path / "a"), "--to", "safetensors"], "has no moving"),
        (["convert", str(exported), str(tmp_path / "a"), "--to", "polyad"], "folder of weights"),
    ]:
        assert polyad([*arguments, "--weights", "ema"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert said in line
    assert not (tmp_path / "a").exists()


def test_an_older_run_begins_its_average_with_its_weights(
    workers, finished, tmp_path, prepared_path
):
    shutil.copytree(finished, tmp_path / "run")
    config = write_config(tmp_path / "config.yaml", prepared_path, train__ema=0.75)
    ((done, said),) = workers(1).run(run_and_listen, config, "train.steps=7")
    assert done == 7
    first = said.splitlines()[0]
    assert first.startswith("continues from step 6 of 7 (1 left), from ")
    before = Checkpoint(newest(tmp_path / "run"))
    after = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000007")
    for name in before.shapes():
        expected = 0.75 * before.whole(name).double() + 0.25 * after.whole(name).double()
        torch.testing.assert_close(after.whole(name, "ema").double(), expected, atol=1e-6, rtol=0)
    ((_, said),) = workers(1).run(run_and_listen, config, "train.steps=8")
    assert "moving average" not in said.splitlines()[0]
