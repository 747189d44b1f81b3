"""Masked language modelling: whole runs, and transformers as the oracle of the scores."""

import re

import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.masking import MaskedWindows, SpecialTokens
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from polyad.train.exchange.convert import convert
from polyad.train.report.command import report
from polyad.train.tasks.registry import open_task
from tests.helpers.runs import evaluation, records, run
from tests.train.tasks.conftest import SPARSE

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@torch.no_grad()
def test_scores_are_those_of_transformers(workers, task_run, task_data, tmp_path):
    # Its own model, on the same windows with the same tokens hidden, padding included.
    import transformers

    convert(task_run("masked text"), tmp_path / "theirs", "huggingface")
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    data = PreparedData.open(task_data / "pieces")
    special = SpecialTokens.of(data.tokenizer(), "")
    windows = MaskedWindows(data.split("validation"), 32, 5, special)  # 15% of 32
    losses, right = [], []
    for number in range(len(windows)):
        ids, mask, positions, targets, scored = windows[number]
        logits = theirs(ids[None], attention_mask=mask[None].long()).logits[0, positions[scored]]
        each = torch.nn.functional.cross_entropy(logits, targets[scored], reduction="none")
        losses += each.tolist()
        right += (logits.argmax(-1) == targets[scored]).tolist()
    assert not windows[len(windows) - 1].mask_T.all()  # padding is among it
    for ranks in (1, 2):
        found = workers(ranks).run(evaluation, task_run("masked text"))[0]
        assert found["tokens_scored"] == len(losses)
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert found["accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_routing_of_text_is_probed_in_whole_windows(workers, task_config, tmp_path):
    sparse = SPARSE | {"graph": "similarity"}
    config = task_config(tmp_path, "masked text", model__feed_forward=sparse, log__fluctuation=True)
    assert workers(2).run(run, config) == [12, 12]
    assert any("fluctuation" in key for record in records(tmp_path / "run") for key in record)
    for knockout in (False, True):
        result = report(tmp_path / "run", tokens=300, knockout=knockout)
        assert all(row["top"] for row in result["experts"] if row["share"] > 0.05)
        assert (result["knockout"] is not None) == knockout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"kind": "gpt2"}}, "data.kind: masked_text is not allowed with model.kind"),
        ({"model__head": {"kind": "classification", "num_classes": 3}}, "model.head.kind: class"),
        ({"model__vocab_size": 200}, "model.vocab_size: 200 is less than the 300 tokens"),
        ({"data__kind": "text"}, "data.kind: text is not allowed with model.kind: bert"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, task_config, changes, message):
    config = load_config(task_config(tmp_path, "masked text", **changes))
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_task(config.for_task())


def test_a_vocabulary_of_which_the_data_uses_little_is_said(tmp_path, task_config):
    for size, expected in ((310, ()), (600, ("the vocabulary of the data has 300 tokens, that of "
                                             "the model 600",))):  # fmt: skip
        config = load_config(task_config(tmp_path, "masked text", model__vocab_size=size))
        assert tuple(open_task(config.for_task()).notes) == expected


def test_text_without_a_mask_is_refused(tmp_path, task_config, prepared_path):
    config = task_config(tmp_path, "masked text", data__path=str(prepared_path))
    with pytest.raises(DataError, match=rf"data.path: {prepared_path}: its tokenizer has no"):
        open_task(load_config(config).for_task())
