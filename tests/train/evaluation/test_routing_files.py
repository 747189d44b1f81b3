"""`polyad evaluate --record-routing` and `--replay-routing`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyad.data.images.prepare import prepare_images
from polyad.launch.cli import run as polyad_command
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import Routing
from polyad.train.experts.replay import read_choices
from tests.helpers.bert import prepare_pieces
from tests.helpers.fine_tuned import SETTINGS, others, trainer
from tests.helpers.images import class_folders
from tests.helpers.runs import evaluated, evaluation, run, write_config
from tests.launch.test_cli import error_line

pytestmark = pytest.mark.distributed
ODD = ("evaluation.batch_size=3", "evaluation.stride=23")
"""Windows that neither the batch size nor two processes divide."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smoe", "emoe"])
def test_processes_and_batches_do_not_change_what_is_replayed(workers, trained, tmp_path, kind):
    folder, first, second = trained(kind), tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    earlier = folder / "checkpoints" / "step-00000003"
    own = workers(2).run(evaluation, folder, overrides=ODD, routing=Routing(record=first))[0]
    assert own["routing"] == {"recorded": str(first)}
    choices, about = read_choices(first)
    assert about["step"] == "6"
    assert (about["split"], len(about["data"])) == ("validation", 64)

    asked: dict[str, Any] = {"overrides": ("evaluation.batch_size=64", *ODD[1:])}
    again = workers(1).run(evaluation, folder, routing=Routing(replay=first), **asked)[0]
    assert again["loss"] == pytest.approx(own["loss"], rel=1e-6)

    # Other weights, of which one process in large batches and two in small ones do the same.
    both = Routing(record=second, replay=first)
    result, text = workers(2).run(evaluated, earlier, routing=both, overrides=ODD)[0]
    for layer, (ids_NK, tokens_R, experts) in read_choices(second)[0].items():
        assert torch.equal(ids_NK, choices[layer].expert_ids_NK)
        assert torch.equal(tokens_R, choices[layer].tokens_R)
        assert experts == choices[layer].num_experts
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    assert rows["routing"].strip().startswith("replayed from ")
    assert rows["routing"].endswith(f"step-00000006 ({first}), not the model's own")
    assert rows["routing recorded"].strip() == str(second)
    alone = workers(1).run(evaluation, earlier, routing=Routing(replay=first), **asked)[0]
    assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    selected = workers(1).run(evaluation, earlier, **asked)[0]
    assert selected["routing"] is None
    assert selected["loss"] != pytest.approx(alone["loss"], rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_padded_rows_of_labelled_sequences_are_replayed(workers, tmp_path_factory, name):
    rows = others()[name]
    train = trainer(workers, tmp_path_factory)
    kept = {"checkpoint": {"every": 2}}
    folder = train(name, rows[:16], rows[16:27], steps=4, data=SETTINGS[name], **kept)
    path, again = folder.parent / "a.safetensors", folder.parent / "b.safetensors"
    odd = {"overrides": ("evaluation.batch_size=3",)}
    own = workers(2).run(evaluation, folder, routing=Routing(record=path), **odd)[0]
    both = Routing(record=again, replay=path)
    other = workers(1).run(evaluation, folder / "checkpoints" / "step-00000002", routing=both)[0]
    replayed = workers(1).run(evaluation, folder, routing=Routing(replay=path))[0]
    assert replayed["loss"] == pytest.approx(own["loss"], rel=1e-6)
    assert other["loss"] != own["loss"]
    ours, theirs = (read_choices(each)[0] for each in (path, again))
    assert list(ours) == list(theirs) == ["blocks.0.feed_forward", "blocks.1.feed_forward"]
    for layer, (ids_NK, tokens_R, _) in ours.items():
        assert len(tokens_R) == 11 * (2 if name == "choices" else 1)
        assert len(set(tokens_R.tolist())) > 1
        assert torch.equal(theirs[layer].expert_ids_NK, ids_NK)
        assert torch.equal(theirs[layer].tokens_R, tokens_R)


EXPERTS = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}


def images(folder: Path, _: Path) -> tuple[Path, dict[str, Any]]:
    """Images, and a Mixer of which tokens and channels have experts."""
    made = class_folders(folder / "all", 20)
    prepare_images(str(made), folder / "images", held_out=0.3, report=lambda line: None)
    return folder / "images", {
        "data__kind": "images",
        "model": {
            "kind": "mixer", "image_size": 8, "patch_size": 2, "num_layers": 2, "hidden_size": 16,
            "token_feed_forward": EXPERTS, "channel_feed_forward": EXPERTS | {"placement": 2},
        },
    }  # fmt: skip


def masked_text(folder: Path, texts: Path) -> tuple[Path, dict[str, Any]]:
    """Text with hidden words, and a BERT."""
    prepare_pieces(texts, folder / "modules")
    bert = {"kind": "bert", "num_layers": 2, "hidden_size": 16, "num_heads": 2}
    return folder / "modules", {
        "data__kind": "masked_text",
        "model": bert | {"sequence_length": 32, "feed_forward": EXPERTS},
    }


@pytest.mark.slow
@pytest.mark.parametrize("make", [images, masked_text])
def test_images_and_masked_text_are_replayed(workers, tmp_path, texts, make):
    data, changes = make(tmp_path, texts)
    workers(1).run(run, write_config(tmp_path / "config.yaml", data, **changes))
    path, again = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    own = workers(2).run(evaluation, tmp_path / "run", routing=Routing(record=path))[0]
    earlier, both = tmp_path / "run/checkpoints/step-00000003", Routing(record=again, replay=path)
    odd = ("evaluation.batch_size=5",)
    other = workers(1).run(evaluation, earlier, routing=both, overrides=odd)[0]
    assert other["loss"] != own["loss"]
    replayed = workers(1).run(evaluation, tmp_path / "run", routing=Routing(replay=path))[0]
    assert replayed["loss"] == pytest.approx(own["loss"], rel=1e-6)
    ours, theirs = (read_choices(each)[0] for each in (path, again))
    assert len(ours) == (3 if make is images else 2)
    for layer, (ids_NK, tokens_R, _) in ours.items():
        assert torch.equal(theirs[layer].expert_ids_NK, ids_NK)
        assert torch.equal(theirs[layer].tokens_R, tokens_R)


def refusal(path: Any, **options: Any) -> str:
    """The one line that an evaluation is refused with."""
    try:
        evaluation(path, **options)
    except ConfigError as error:
        return str(error)
    return "it was not refused"


def test_a_file_is_replayed_on_its_own_data_alone(workers, trained, tmp_path):
    run_folder, path = trained("smoe"), tmp_path / "routing.safetensors"
    asked = {"overrides": ("evaluation.batch_size=64",), "split": "test"}
    own = workers(1).run(evaluation, run_folder, routing=Routing(record=path), **asked)[0]
    replay = Routing(replay=path)
    again = workers(2).run(evaluation, run_folder, routing=replay, **asked)[0]
    assert again["loss"] == pytest.approx(own["loss"], rel=1e-6)
    line = workers(1).run(refusal, run_folder, routing=replay)[0]
    assert "was recorded with split test, but validation is scored" in line
    other = {"overrides": ODD[1:], "split": "test"}
    line = workers(1).run(refusal, run_folder, routing=replay, **other)[0]
    assert "sequences or images, but" in line


@pytest.mark.slow
def test_models_that_select_no_experts_are_refused(workers, trained, tmp_path):
    path = tmp_path / "routing.safetensors"
    for kind, words in (("cp", "(MuMoE) gives a token a share"), ("dense", "has no experts")):
        line = workers(2).run(refusal, trained(kind), routing=Routing(record=path))[1]
        assert words in line
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--record-routing", "x.npz"), "x.npz: a file that ends in .safetensors is needed"),
        (("--record-routing", "no/x.safetensors"), "no/x.safetensors: there is no folder no"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(capfd, arguments, line):
    assert polyad_command(["evaluate", "runs/none", *arguments]) == 2
    assert line in error_line(capfd.readouterr().err)
