"""Perplexity: against an independent computation, and the same by any number of processes."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.parallel.weights import load_model
from polyad.train.evaluation.summary import unigram_perplexity
from polyad.train.exchange.convert import convert
from polyad.train.experts import token_classes
from tests.helpers.everyday import everyday
from tests.helpers.reference import reference_of
from tests.helpers.runs import evaluated, evaluation, evaluation_error

pytestmark = pytest.mark.distributed


def reference_loss(run_folder, data, split, stride):
    """Sum of nats by transformers, one window at a time, from the raw file; and how many tokens.

    What transformers does not have runs through our model, without a cache or a batch.
    """
    model = load_model(run_folder)
    dense = model.config.feed_forward.kind == "dense"
    reference = reference_of(model)[0].eval() if dense else model
    manifest = json.loads((data / "manifest.json").read_text())
    tokens = np.fromfile(data / f"{split}.bin", manifest["dtype"]).astype(np.int64)
    stream = torch.cat([torch.tensor([manifest["tokenizer"]["end_of_text_id"]]),
                        torch.from_numpy(tokens)])  # fmt: skip
    length, total, scored = 32, 0.0, 0
    while scored < len(tokens):
        # Scores targets scored .. stop, the last of a window that begins as early as it can.
        stop = min(scored + (length if scored == 0 else stride), len(tokens))
        begin = max(0, stop - length)
        if scored and stop == len(tokens):  # our last window starts on the stride and is short
            begin = scored - (length - stride)
        with torch.no_grad():
            logits = reference(stream[None, begin:stop]).logits[0].double()
        picked = logits.log_softmax(-1).gather(1, stream[begin + 1 : stop + 1, None])[:, 0]
        total -= picked[scored - begin :].sum().item()
        scored = stop
    return total, scored


@everyday(
    ("kind", "split", "stride"),
    [
        *(("dense", split, stride) for split in ("validation", "test") for stride in (32, 8, 5)),
        ("dense", "validation", 23),
        ("cp", "test", 32),
        *((kind, "validation", 8) for kind in ("cp", "smoe", "tr")),
    ],
    keep=[("dense", "validation", 23)],
)
def test_perplexity_equals_an_independent_computation(
    workers, trained, prepared_path, kind, split, stride
):
    finished = trained(kind)
    overrides = (f"evaluation.stride={stride}",)
    result = workers(1).run(evaluation, finished, split=split, overrides=overrides)[0]
    nats, tokens = reference_loss(finished, prepared_path, split, stride)
    info = PreparedData.open(prepared_path).manifest.splits[split]
    assert result["tokens_scored"] == tokens == info.tokens
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-4)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["word_perplexity"] == pytest.approx(math.exp(nats / info.words), rel=1e-3)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / info.bytes, rel=1e-4)


@everyday(
    ("kind", "batch_size"),
    [("dense", 1), ("dense", 3), ("dense", 64), ("smoe", 3), ("cp", 3), ("tr", 64)],
    keep=[("dense", 3)],
)
def test_two_processes_score_what_one_scores(workers, trained, kind, batch_size):
    # Windows that neither the batch size nor the processes divide, and more room than windows.
    overrides = (f"evaluation.batch_size={batch_size}", "evaluation.stride=23")
    one = workers(1).run(evaluation, trained(kind), overrides=overrides)[0]
    two = workers(2).run(evaluation, trained(kind), overrides=overrides)
    assert two[0]["loss"] == two[1]["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two[0]["tokens_scored"] == one["tokens_scored"]


UP = "blocks.1.feed_forward.up.weight"


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        (UP, math.nan, f": {UP} is not finite: it holds nan"),
        (UP, -math.inf, f": {UP} is not finite: it holds -inf"),
        ("final_norm.weight", 3e38, ", although all weights are finite: numbers overflow in fp32"),
    ],
)
def test_a_loss_that_is_not_finite_is_an_error_on_every_process(
    workers, finished, prepared_path, tmp_path, name, value, part
):
    folder = tmp_path / "plain"
    convert(finished, folder, "safetensors")
    stored = load_file(folder / "model.safetensors")
    stored[name].fill_(value)
    if name == UP:  # the first that is not finite is named
        stored["final_norm.weight"][0] = math.nan
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for text, status in workers(2).run(evaluation_error, folder, data=str(prepared_path)):
        assert status == 1
        assert text.startswith(f"{folder}: ")
        assert text.endswith(part)


def test_a_split_without_a_word_has_no_perplexity_a_word(
    workers, finished, tmp_path, texts, prepared_path
):
    (tmp_path / "blank.txt").write_text(" \n\t \n" * 50)
    prepare(
        str(texts), str(prepared_path), tmp_path / "data",
        validation_source=str(tmp_path / "blank.txt"),
    )  # fmt: skip
    result, text = workers(1).run(evaluated, finished, data=str(tmp_path / "data"))[0]
    assert result["words"] == 0
    assert result["word_perplexity"] is None
    assert result["bits_per_byte"] > 0
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    assert rows["word perplexity"] == "nan (separated by white space)"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.num_layers=1",), "model.num_layers: cannot be changed in evaluation"),
        (("evaluation.stride=33",), "stride 33"),
        (("data.path=nowhere",), "nowhere"),
        (("evaluation.strid=3",), "unknown key evaluation.strid"),
    ],
)
def test_bad_options_are_refused(finished, overrides, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        evaluation(finished, overrides=overrides)
    assert caught.value.exit_status == 2


class Stream:
    """Tokens in memory, with what counting uses of a split."""

    def __init__(self, tokens):
        self._tokens = np.array(tokens, dtype=np.int64)
        self.num_tokens = len(tokens)

    def read(self, start, stop):
        assert stop - start <= 2, "no more than a part at a time"
        return self._tokens[start:stop]


def test_unigram_perplexity_is_that_worked_out_by_hand(monkeypatch):
    monkeypatch.setattr(token_classes, "AT_ONCE", 2)
    train, held_out = Stream([0, 0, 0, 1, 1]), Stream([0, 1, 2])
    assert token_classes.frequencies(train, 3).tolist() == [3, 2, 0]
    # (4, 3, 1) / 8 after adding one; their geometric mean is (12 / 512) ** (1 / 3).
    perplexity = unigram_perplexity(train, held_out, 3)
    assert perplexity == pytest.approx((512 / 12) ** (1 / 3), rel=1e-12)
