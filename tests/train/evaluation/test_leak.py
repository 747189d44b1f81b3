"""`polyad evaluate --leak`: beside the same by hand, one token after the other."""

import json
import math

import numpy as np
import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.model.attention import KeyValueCache
from polyad.parallel.weights import load_model
from tests.helpers.runs import evaluation, run, write_config

pytestmark = pytest.mark.distributed

GRAPH = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 32, "graph": "attention"}
LEAKY = GRAPH | {"sigma": 4.0, "causal_graph": False, "allow_leak": True}
LENGTH = 32


@pytest.fixture(scope="module")
def short(tmp_path_factory, texts, prepared_path):
    """The usual text, of which few tokens are held out."""
    folder = tmp_path_factory.mktemp("short")
    held = json.loads(texts.read_text().splitlines()[0])["text"][:1500]
    (folder / "held.txt").write_text(held)
    prepare(str(texts), str(prepared_path), folder / "data", test_fraction=0.0,
            validation_source=str(folder / "held.txt"), report=lambda line: None)  # fmt: skip
    return folder / "data"


@pytest.fixture(scope="module")
def leaky(workers, tmp_path_factory, short):
    """A finished run of a model whose tokens choose experts by later ones."""
    folder = tmp_path_factory.mktemp("leaky")
    changes = {"model__feed_forward": LEAKY, "train__steps": 20, "checkpoint__every": 0}
    workers(1).run(run, write_config(folder / "config.yaml", short, **changes))
    return folder / "run"


@pytest.fixture(scope="module")
def whole(workers, leaky):
    """Every token of the split scored in all ways."""
    return workers(1).run(evaluation, leaky, leak=10**9)[0]


@pytest.fixture(scope="module")
def stream(short):
    """The split's tokens behind an end of text."""
    data = PreparedData.open(short)
    split, end = data.split("validation"), data.manifest.tokenizer.end_of_text_id
    return torch.tensor([end, *split.read(0, split.num_tokens).tolist()])


def losses(logits_TV, targets_T):
    return -logits_TV.double().log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


@pytest.fixture(scope="module")
@torch.no_grad()
def by_hand(leaky, stream):
    """Nats of every token in its window, and with the text cut before it, for each window."""
    model, found = load_model(leaky), []
    for begin in range(0, len(stream) - 1, LENGTH):
        window = stream[begin : begin + LENGTH + 1]
        inputs, targets = window[:-1], window[1:]
        # The evaluation pads the last window, and padding is a later token like any other.
        padded = torch.cat([inputs, stream[:1].expand(LENGTH - len(inputs))])
        seen = losses(model(padded[None]).logits[0, : len(inputs)], targets)
        cut = [
            losses(model(inputs[None, : t + 1]).logits[0, -1:], targets[t : t + 1])
            for t in range(len(inputs))
        ]
        found.append((seen.numpy(), torch.cat(cut).numpy()))
    return found


def test_prefixes_equal_a_loop_over_tokens(whole, by_hand, stream):
    leak = whole["leak"]
    seen, cut = (np.concatenate(part) for part in zip(*by_hand, strict=True))
    assert leak["prefix_tokens"] == len(stream) - 1 == len(seen)
    assert leak["prefix_loss"] == pytest.approx(cut.mean(), abs=1e-5)
    assert leak["prefix_loss_in_window"] == pytest.approx(seen.mean(), abs=1e-5)
    # The same tokens in batches of other sizes, in fp32.
    assert leak["prefix_loss_in_window"] == pytest.approx(whole["loss"], abs=1e-7)
    assert leak["prefix_difference"] == pytest.approx((cut - seen).mean(), abs=1e-5)
    assert np.abs(cut - seen).max() > 0.01  # later tokens do matter here
    # The spread of such a mean over windows that are drawn again and again.
    differences, sizes = (np.array(x) for x in zip(
        *(((c - s).sum(), len(s)) for s, c in by_hand), strict=True
    ))  # fmt: skip
    draw = np.random.default_rng(0).integers(len(sizes), size=(4000, len(sizes)))
    means = differences[draw].sum(1) / sizes[draw].sum(1)
    assert leak["prefix_standard_error"] == pytest.approx(means.std(), rel=0.1)


@pytest.mark.slow
def test_a_sample_is_spread_over_split_and_window(workers, leaky, whole, by_hand):
    results = [workers(size).run(evaluation, leaky, leak=200)[0]["leak"] for size in (1, 2)]
    assert results[1] == pytest.approx(results[0], abs=1e-6)  # whatever the processes
    found = results[0]
    assert 150 <= found["prefix_tokens"] <= 250
    assert found["prefix_wanted"] == 200
    error = math.hypot(found["prefix_standard_error"], 1e-6)
    wanted = whole["leak"]["prefix_difference"]
    assert abs(found["prefix_difference"] - wanted) < 4 * error
    assert found["masked_loss"] == pytest.approx(whole["leak"]["masked_loss"], abs=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_with_the_mask_it_is_what_generation_computes(leaky, whole, stream):
    model, total = load_model(leaky), 0.0
    for begin in range(0, len(stream) - 1, LENGTH):
        window = stream[begin : begin + LENGTH + 1]
        cache = KeyValueCache(model.config.num_layers, LENGTH)
        logits = [model(token[None, None], cache).logits[0] for token in window[:-1]]
        total += losses(torch.cat(logits), window[1:]).sum().item()
    masked = whole["leak"]["masked_loss"]
    assert masked == pytest.approx(total / (len(stream) - 1), abs=1e-5)
    assert abs(masked - whole["loss"]) > 1e-4
    # The model is as it was.
    assert whole["leak"]["masked_tokens"] == whole["tokens_scored"]


@pytest.mark.slow
def test_windows_that_overlap_score_each_token_once(workers, leaky, stream):
    options = {"leak": 10**9, "overrides": ("evaluation.stride=20",)}
    result = workers(1).run(evaluation, leaky, **options)[0]
    assert result["leak"]["prefix_tokens"] == len(stream) - 1
    # Two ways to the same fp32 losses: a mean of 1,000 near 5, each rounded by up to 2.4e-7, is off
    # by 4e-9. A token that is scored twice, or not at all, moves it by 1e-3.
    assert result["leak"]["prefix_loss_in_window"] == pytest.approx(result["loss"], abs=1e-7)


@pytest.mark.slow
def test_the_command_says_all_three(leaky, capfd):
    file = leaky.parent / "leak.json"
    assert polyad(["evaluate", str(leaky), "--leak", "64", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows = dict(line.split("  ", 1) for line in capfd.readouterr().out.splitlines())
    assert rows["with the mask"].strip().startswith(f"{result['leak']['masked_loss']:.4f} nats")
    estimate = result["loss"] + result["leak"]["prefix_difference"]
    assert rows["from the prefix"].strip().startswith(f"{estimate:.4f} nats per token, ")


def line_of(capfd, *arguments):
    assert polyad(["evaluate", *map(str, arguments)]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_what_cannot_be_measured_is_one_line(leaky, trained, capfd):
    line = line_of(capfd, trained("smoe"), "--leak", "64")
    assert "--leak: " in line
    assert "has model.feed_forward.causal_graph: true, so no token sees later ones" in line
    assert "has model.feed_forward.kind: mumoe, which has no token graph" in line_of(
        capfd, trained("cp"), "--leak", "64"
    )
    assert "--leak: '0' is not a whole number" in line_of(capfd, leaky, "--leak", "0")
    assert "--leak: 9 is not allowed with --compare" in line_of(
        capfd, leaky, "--leak", "9", "--compare", leaky
    )
