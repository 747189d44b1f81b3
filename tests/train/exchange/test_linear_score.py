"""Attentive scores as linear ones: the same outputs, and a model that trains on."""

import math

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from polyad.train.exchange.linear_score import LinearScores
from tests.helpers.dense import IMAGES, output_of, write_weights
from tests.helpers.runs import evaluation, records, run, write_config

EXPERTS = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 24, "score": "attentive"}
FOLLOWING = EXPERTS | {"expert_keys": "hidden_means"}
GPT2 = {
    "kind": "gpt2", "num_layers": 3, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip
MODELS = {
    "learned": GPT2 | {"feed_forward": EXPERTS | {"graph": "similarity"}},
    "hidden_means": GPT2 | {"feed_forward": FOLLOWING | {"placement": [0, 2]}},
    "no bias": GPT2 | {"bias": False, "feed_forward": FOLLOWING | {"balancing_rate": 0.1}},
    "vit": {"kind": "vit", "num_heads": 4, "feed_forward": FOLLOWING} | IMAGES,
    "mixer": {
        "kind": "mixer", "token_feed_forward": EXPERTS, "channel_feed_forward": FOLLOWING,
    } | IMAGES,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_linear_score_gives_the_logits_of_the_attentive_one(tmp_path, name):
    source = write_weights(tmp_path / "source", MODELS[name], spread=0.2)
    result = convert(source, tmp_path / "linear", "polyad", LinearScores())
    (note,) = (note for note in result["notes"] if "attentive" in note)
    assert note.startswith("its outputs equal the attentive model's, up to rounding")
    attentive, linear = load_model(source), load_model(tmp_path / "linear")
    assert result["parameters"] == sum(p.numel() for p in linear.parameters())
    sections = linear.config.feed_forwards()
    assert {each.score for each in sections.values()} == {"linear"}
    assert not any("mean_input" in each for each, _ in linear.named_buffers())
    ours, theirs = output_of(linear), output_of(attentive)
    # The weight is fp32 in the checkpoint.
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=1e-5)
    for new, old in zip(ours.routing, theirs.routing, strict=True):
        assert torch.equal(new.load_E, old.load_E)
        torch.testing.assert_close(new.z_loss, old.z_loss, atol=1e-6, rtol=1e-6)
    # In fp64, by loops: w_e = sum_s k_es W_q[s] / sqrt(S), k = W_k (mean W_up + b), as written.
    if name == "hidden_means":
        layer = attentive.blocks[2].feed_forward
        score, experts = layer.router.score, layer.experts
        for e in range(4):
            hidden_F = score.mean_input[e].double() @ experts.up[e] + experts.up_bias[e]
            column_D = (score.key_projection @ hidden_F) @ score.query / math.sqrt(8)
            found_D = linear.blocks[2].feed_forward.router.score.weight[e]
            assert torch.equal(found_D.float(), column_D.float()) or torch.allclose(
                found_D, column_D, rtol=1e-6, atol=1e-8
            )


@pytest.mark.slow
def test_a_trained_run_has_the_same_loss_as_a_linear_one_and_trains_on(
    workers, tmp_path, prepared_path
):
    (tmp_path / "first").mkdir()
    config = write_config(
        tmp_path / "first" / "config.yaml", prepared_path, model__feed_forward=FOLLOWING
    )
    assert workers(2).run(run, config) == [6, 6]
    trained, linear = tmp_path / "first" / "run", tmp_path / "linear"
    command = ["convert", str(trained), str(linear), "--to", "polyad", "--linear-score"]
    assert polyad(command) == 0
    assert Checkpoint(linear).state.linear_score == "true"
    first, again = (
        evaluation(path, data=str(prepared_path), overrides=("evaluation.max_windows=5",))["loss"]
        for path in (trained, linear)
    )
    assert again == pytest.approx(first, rel=1e-6)
    section = FOLLOWING | {"score": "linear", "expert_keys": "learned", "router_bias": False}
    (tmp_path / "then").mkdir()
    config = write_config(
        tmp_path / "then" / "config.yaml", prepared_path, model__feed_forward=section,
        checkpoint__init_from=str(linear),
    )  # fmt: skip
    assert workers(1).run(run, config) == [6]
    losses = [record["loss"] for record in records(tmp_path / "then" / "run") if "loss" in record]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (EXPERTS | {"score": "cosine"}, "has model.feed_forward.score: cosine; only score: attent"),
        (EXPERTS | {"score": "linear"}, "has model.feed_forward.score: linear; only score: attent"),
        ({"kind": "dense"}, "has no sparse experts; only score: attentive has a linear score"),
    ],
)
def test_another_score_is_refused_in_one_line(tmp_path, capfd, section, words):
    source = write_weights(tmp_path / "source", GPT2 | {"feed_forward": section})
    command = ["convert", str(source), str(tmp_path / "new"), "--to", "polyad", "--linear-score"]
    assert polyad(command) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"--linear-score: {source}: {words}" in line
    assert not (tmp_path / "new").exists()
