"""`polyad evaluate --record-routing` and `--replay-routing`."""

from typing import Any

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import Routing
from polyad.train.experts.replay import read_choices
from tests.helpers.runs import evaluated, evaluation
from tests.launch.test_cli import error_line

pytestmark = pytest.mark.distributed
ODD = ("evaluation.batch_size=3", "evaluation.stride=23")
"""Windows that neither the batch size nor two processes divide."""


@pytest.mark.parametrize("kind", ["smoe", pytest.param("emoe", marks=pytest.mark.slow)])
def test_processes_and_batches_do_not_change_what_is_replayed(workers, trained, tmp_path, kind):
    run, first, second = trained(kind), tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    earlier = run / "checkpoints" / "step-00000003"
    own = workers(2).run(evaluation, run, overrides=ODD, routing=Routing(record=first))[0]
    assert own["routing"] == {"recorded": str(first)}
    choices, about = read_choices(first)
    assert about["step"] == "6"
    assert (about["split"], len(about["data"])) == ("validation", 64)

    asked: dict[str, Any] = {"overrides": ("evaluation.batch_size=64", *ODD[1:])}
    again = workers(1).run(evaluation, run, routing=Routing(replay=first), **asked)[0]
    assert again["loss"] == pytest.approx(own["loss"], rel=1e-6)

    # Other weights, of which one process in large batches and two in small ones do the same.
    both = Routing(record=second, replay=first)
    result, text = workers(2).run(evaluated, earlier, routing=both, overrides=ODD)[0]
    for layer, (ids_NK, tokens_R, experts) in read_choices(second)[0].items():
        assert torch.equal(ids_NK, choices[layer].expert_ids_NK)
        assert torch.equal(tokens_R, choices[layer].tokens_R)
        assert experts == choices[layer].num_experts
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    assert rows["routing"].strip().startswith("not the model's own: that of ")
    assert rows["routing"].endswith(f"step-00000006 ({first})")
    assert rows["routing recorded"].strip() == str(second)
    alone = workers(1).run(evaluation, earlier, routing=Routing(replay=first), **asked)[0]
    assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    selected = workers(1).run(evaluation, earlier, **asked)[0]
    assert selected["routing"] is None
    assert selected["loss"] != pytest.approx(alone["loss"], rel=1e-7)


def refusal(path: Any, **options: Any) -> str:
    """The one line that an evaluation is refused with."""
    try:
        evaluation(path, **options)
    except ConfigError as error:
        return str(error)
    return "it was not refused"


def test_files_of_other_data_and_models_without_a_choice_are_refused(workers, trained, tmp_path):
    path = tmp_path / "routing.safetensors"
    workers(1).run(evaluation, trained("smoe"), routing=Routing(record=path))

    def refused(kind: str, routing: Routing, **options: Any) -> str:
        return str(workers(1).run(refusal, trained(kind), routing=routing, **options)[0])

    replay = Routing(replay=path)
    assert "is of split validation, and test is scored" in refused("smoe", replay, split="test")
    assert "sequences or images, and" in refused("smoe", replay, overrides=ODD[1:])
    line = refused("cp", Routing(record=tmp_path / "other.safetensors"))
    assert "(MuMoE) gives a token a share of every expert" in line
    assert not (tmp_path / "other.safetensors").exists()
    assert "the model has no experts" in refused("dense", replay)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--record-routing", "x.npz"), "x.npz: a file that ends in .safetensors is needed"),
        (("--record-routing", "no/x.safetensors"), "no/x.safetensors: there is no folder no"),
        (("--replay-routing", "x", "--leak", "5"), "--leak: 5 is not allowed with --replay-rout"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(capfd, arguments, line):
    assert polyad(["evaluate", "runs/none", *arguments]) == 2
    assert line in error_line(capfd.readouterr().err)
