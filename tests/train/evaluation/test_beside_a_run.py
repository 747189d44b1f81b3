"""Commands that read a checkpoint while its run deletes it: the newest is read again."""

import json
import shutil

import pytest

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import Contents
from polyad.parallel.checkpoint.load import Checkpoint, read_newest
from polyad.parallel.checkpoint.manage import discard
from polyad.parallel.weights import load_model
from tests.helpers.everyday import everyday
from tests.helpers.runs import weights_of

pytestmark = pytest.mark.distributed


@pytest.fixture
def run(trained, tmp_path):
    """A run with checkpoints of steps 3 and 6."""
    shutil.copytree(trained("smoe"), tmp_path / "run")
    return tmp_path / "run"


def deletes_the_newest(monkeypatch, run, *, while_it_opens):
    """Deletes step 6 as a run does, before its small files are read or before its tensors are."""
    newest = run / "checkpoints" / "step-00000006"

    def first(usual):
        def read(*given, **named):
            if newest.exists():
                discard(newest)
            return usual(*given, **named)

        return read

    if while_it_opens:
        monkeypatch.setattr(Contents, "verify", first(Contents.verify))
    else:
        monkeypatch.setattr(Checkpoint, "_stored", first(Checkpoint._stored))


@everyday("while_it_opens", [True, False], keep=[False])
@everyday(
    "command",
    [
        ["evaluate", "{run}", "evaluation.max_windows=2"],
        ["experts", "specialize", "{run}", "evaluation.max_windows=2"],
        ["experts", "steer", "{run}", "--tokens", "200", "--intervene", "layer=1,expert=1"],
        ["compare", "{other}", "--with", "{run}", "--tokens", "200"],
        ["generate", "{run}", "--prompt", "def", "--max-tokens", "2"],
        ["report", "{run}", "--tokens", "400"],
        ["convert", "{run}", "{run}/../out", "--to", "safetensors"],
    ],
    keep=[["evaluate", "{run}", "evaluation.max_windows=2"]],
    ids=lambda words: " ".join(word for word in words[:3] if "{" not in word),
)
def test_the_newest_is_read_again(trained, run, capfd, monkeypatch, command, while_it_opens):
    deletes_the_newest(monkeypatch, run, while_it_opens=while_it_opens)
    words = [word.format(run=run, other=trained("smoe")) for word in command]
    assert polyad([*words, "--json", str(run.parent / "result.json")]) == 0
    captured = capfd.readouterr()
    assert "step-00000003" in (run.parent / "result.json").read_text()
    # What vanished before it was opened is known to nobody.
    told = (
        f"polyad: {run}/checkpoints/step-00000006 was deleted while it was being read"
        in captured.err
    )
    assert told or while_it_opens
    assert not list(run.parent.glob("*.partial"))


def test_a_checkpoint_that_was_named_itself_is_not_replaced_by_another(run, monkeypatch):
    deletes_the_newest(monkeypatch, run, while_it_opens=False)
    assert polyad(["evaluate", str(run / "checkpoints" / "step-00000006")]) != 0
    assert polyad(["report", str(run / "checkpoints" / "step-00000006")]) != 0


def test_a_model_that_python_loads_is_of_one_checkpoint(trained, run, monkeypatch):
    deletes_the_newest(monkeypatch, run, while_it_opens=False)
    expected = weights_of(trained("smoe") / "checkpoints" / "step-00000003")
    model = load_model(run)
    assert all(parameter.equal(expected[name]) for name, parameter in model.named_parameters())


def test_an_error_of_a_checkpoint_that_is_there_is_not_tried_again(run):
    seen = []

    def read(chosen):
        seen.append(chosen)
        raise ValueError("of another kind")

    with pytest.raises(ValueError, match="of another kind"):
        read_newest(run, read)
    assert seen == [run / "checkpoints" / "step-00000006"]


def test_the_best_checkpoint_is_taken_where_it_is_asked_for_and_else_named(run, capfd, refused):
    words = ["generate", str(run), "--prompt", "def", "--max-tokens", "2"]
    assert "no checkpoint is marked as the best" in refused(*words, "--best")
    line = "step-00000006; its best validation was that of"
    for best, options, read, is_said in (
        (3, [], 6, True),
        (3, ["--best"], 3, False),
        (6, [], 6, False),
    ):
        (run / "checkpoints" / "best").write_text(f"step-{best:08}")
        assert polyad([*words, *options, "--json", "-"]) == 0
        captured = capfd.readouterr()
        assert json.loads(captured.out)["checkpoint"].endswith(f"step-{read:08}")
        assert (line in captured.err) == is_said
