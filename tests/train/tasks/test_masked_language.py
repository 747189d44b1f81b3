"""Masked language modelling: whole runs, and transformers as the oracle of the scores."""

import re
from pathlib import Path

import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.masking import MaskedWindows, SpecialTokens
from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import evaluate
from polyad.train.exchange.convert import convert
from polyad.train.report.command import report
from polyad.train.results import json_value
from polyad.train.tasks.registry import open_task
from tests.helpers.bert import prepare_pieces
from tests.helpers.runs import records, run, write_config
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed

BERT = {
    "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
}  # fmt: skip
SGD = {"kind": "sgd", "learning_rate": 0.1, "clip_grad_norm": 1.0}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory, texts) -> Path:
    """Text with a WordPiece vocabulary."""
    path = tmp_path_factory.mktemp("pieces") / "modules"
    prepare_pieces(texts, path)
    return path


def config_of(folder: Path, data: Path, **changes) -> Path:
    given = {"model": BERT, "data__kind": "masked_text", "optimizer": SGD} | changes
    return write_config(folder / "config.yaml", data, **given)


def weights_of(folder: Path) -> dict:
    return tensors(find_checkpoint(folder))


@pytest.fixture(scope="module")
def finished(workers, tmp_path_factory, pieces) -> Path:
    """A finished run of one process."""
    folder = tmp_path_factory.mktemp("masked")
    assert workers(1).run(run, config_of(folder, pieces)) == [6]
    return folder / "run"


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(workers, finished, tmp_path, pieces):
    workers(2).run(run, config_of(tmp_path, pieces))
    ours, theirs = records(tmp_path / "run"), records(finished)
    for one, other in zip(ours, theirs, strict=True):
        keys = {"loss", "validation_loss", "validation_accuracy"} & other.keys()
        assert {key: one[key] for key in keys} == pytest.approx(
            {key: other[key] for key in keys}, rel=1e-5
        )
    assert "validation_accuracy" in theirs[-1]
    for key, value in weights_of(finished).items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[key], value, atol=1e-6, rtol=1e-4)


def test_a_run_that_goes_on_sees_the_samples_it_would_have_seen(
    workers, finished, tmp_path, pieces
):
    config = config_of(tmp_path, pieces)
    workers(1).run(run, config, "train.steps=3")
    workers(1).run(run, config, "train.micro_batch_size=4")
    assert records(tmp_path / "run")[-1]["loss"] == pytest.approx(records(finished)[-1]["loss"])


@torch.no_grad()
def test_scores_are_those_of_transformers(workers, finished, tmp_path, pieces):
    # Its own model, on the same windows with the same tokens hidden, padding included.
    import transformers

    convert(finished, tmp_path / "theirs", "huggingface")
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    data = PreparedData.open(pieces)
    special = SpecialTokens.of(data.tokenizer(), "")
    windows = MaskedWindows(data.split("validation"), 32, 5, special)  # 15% of 32
    losses, right = [], []
    for number in range(len(windows)):
        ids, mask, positions, targets, scored = windows[number]
        logits = theirs(ids[None], attention_mask=mask[None].long()).logits[0, positions[scored]]
        losses += torch.nn.functional.cross_entropy(
            logits, targets[scored], reduction="none"
        ).tolist()
        right += (logits.argmax(-1) == targets[scored]).tolist()
    assert not windows[len(windows) - 1].mask_T.all()  # padding is among it
    for ranks in (1, 2):
        found = json_value(workers(ranks).run(evaluate, finished)[0])
        assert found["tokens_scored"] == len(losses)
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert found["accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_routing_of_text_is_probed_in_whole_windows(workers, tmp_path, pieces):
    experts = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16, "graph": "similarity"}
    changes = {"model": BERT | {"feed_forward": experts}, "log__fluctuation": True}
    config = config_of(tmp_path, pieces, **changes)
    assert workers(2).run(run, config) == [6, 6]
    assert any("fluctuation" in key for record in records(tmp_path / "run") for key in record)
    for knockout in (False, True):
        result = report(tmp_path / "run", tokens=300, knockout=knockout)
        assert all(row["top"] for row in result["experts"] if row["share"] > 0.05)
        assert (result["knockout"] is not None) == knockout


def loaded(folder: Path, data: Path, *overrides: str, **changes) -> RunConfig:
    return load_config(config_of(folder, data, **changes), overrides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"kind": "gpt2"}},
            "data.kind: masked_text is not allowed with model.kind: gpt2",
        ),
        (
            {"model": BERT | {"head": {"kind": "classification", "num_classes": 3}}},
            "model.head.kind: classification",
        ),
        (
            {"model": BERT | {"vocab_size": 200}},
            "model.vocab_size: 200 is less than the 300 tokens",
        ),
        ({"data__kind": "text"}, "data.kind: text is not allowed with model.kind: bert"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, pieces, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_task(loaded(tmp_path, pieces, **changes).for_task())


def test_text_without_a_mask_is_refused(tmp_path, prepared_path):
    with pytest.raises(DataError, match=rf"data.path: {prepared_path}: its tokenizer has no"):
        open_task(loaded(tmp_path, prepared_path).for_task())
