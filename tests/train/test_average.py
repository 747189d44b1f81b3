"""The moving average of a run's weights: evaluated, converted, begun late, refused in one line."""

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.model.smoe.router import INITIAL_TEMPERATURE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from tests.helpers.runs import evaluated, evaluation, newest

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def averaged(run_of):
    return run_of(2, train__ema=0.8)


@pytest.mark.slow
def test_evaluate_scores_the_average_by_choice(workers, averaged):
    (trained, plain), (average, text) = (
        workers(1).run(evaluated, averaged, weights=weights)[0] for weights in ("trained", "ema")
    )
    assert (trained["weights"], average["weights"]) == ("trained", "ema")
    assert abs(trained["loss"] - average["loss"]) > 0.01
    assert workers(1).run(evaluation, averaged)[0]["loss"] == trained["loss"]
    two = workers(2).run(evaluation, averaged, weights="ema")[0]
    assert two["loss"] == pytest.approx(average["loss"], rel=1e-6)
    assert "their moving average" in text
    assert "moving average" not in plain


@pytest.mark.slow
def test_a_process_without_any_of_few_trained_numbers_has_no_part_of_the_average(run_of):
    name = "blocks.0.feed_forward.router.score.temperature"
    changes = {
        "train__ema": 0.8, "optimizer__groups": [{"match": name}, {"match": "*", "freeze": True}],
        "model__feed_forward": {"kind": "smoe", "num_experts": 4, "score": "cosine"},
    }  # fmt: skip
    folders = [run_of(processes, **changes) for processes in (1, 2)]
    results = [Checkpoint(newest(folder)).whole(name, "ema") for folder in folders]
    torch.testing.assert_close(*results)
    assert abs(results[0].item() - INITIAL_TEMPERATURE) > 1e-3


@pytest.mark.parametrize("to", ["safetensors", "polyad"])
def test_convert_writes_the_average_by_choice(averaged, tmp_path, to):
    arguments = ["convert", str(averaged), str(tmp_path / "new"), "--to", to]
    assert polyad([*arguments, "--weights", "ema"]) == 0
    stored = Checkpoint(newest(averaged))
    for name, parameter in load_model(tmp_path / "new").named_parameters():
        assert torch.equal(parameter, stored.whole(name, "ema"))
        assert not torch.equal(parameter, stored.whole(name))
    if to == "polyad":
        assert not any("ema" in fields for fields in Checkpoint(tmp_path / "new").tensors.values())


def test_a_run_without_an_average_is_one_line(finished, exported, tmp_path, refused):
    new = tmp_path / "a"
    for words, said in (
        (("evaluate", finished), "has no moving average of its weights"),
        (("convert", finished, new, "--to", "safetensors"), "has no moving"),
        (("convert", exported, new, "--to", "polyad"), "folder of weights"),
    ):
        assert said in refused(*words, "--weights", "ema")
    assert not new.exists()
