"""`polyad experts splice`: the same feed-forwards in models of transformers, copies, processes."""

from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.launch.cli import run as polyad
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.measures.splice import Splicing
from tests.helpers.decoders import hub_with_text, prepared_for, tokens, write_tokenizer
from tests.helpers.prepared import windows_of
from tests.helpers.reference import save_reference
from tests.helpers.runs import QUIET, both_forms, frame_of, records, run, write_config

pytestmark = pytest.mark.distributed

DENSE = {"kind": "dense", "hidden_size": 24}
SMOE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16}
SHAPE = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": 320}


def distilled(tmp_path, data, model, teacher, feed_forward, blocks, **changes):
    """A run whose blocks learn from a folder of weights."""
    replaced = {"blocks": blocks, "feed_forward": feed_forward}
    given = QUIET | {"model": model | {"replaced": replaced}, "train__steps": 12}
    given |= {"distill__teacher": str(teacher), "distill__blocks": "normalized"}
    return write_config(tmp_path / "config.yaml", data, **given | changes)


@pytest.fixture(scope="module")
def gpt2(workers, tmp_path_factory):
    """A random GPT-2 of transformers, text in its tokens, and a run with two other blocks."""
    root = tmp_path_factory.mktemp("gpt2")
    theirs = save_reference(root / "hub", **SHAPE)
    write_tokenizer(root / "hub")
    data = prepared_for(root / "hub", root)
    model = FamilyWeights(root / "hub").config.model_dump(mode="json")
    config = distilled(root, data, model, root / "hub", SMOE, [0, 2])
    assert workers(1).run(run, config) == [12]
    return theirs, data, root


@torch.inference_mode()
def loss_of(theirs, data):
    result = [
        cross_entropy(theirs(torch.tensor([read])).logits[0], torch.tensor(after), reduction="none")
        for read, after in windows_of(data, 24)
    ]
    return torch.cat(result).double().mean().item()


@contextmanager
def in_place_of(feed_forwards, output):
    """Replaces feed-forwards of transformers, by block: `output` makes of a block, what enters it
    and what it gives [B, T, D] what is given instead; None: the same."""

    def replacing(block):
        def hook(_, given, out):
            y_BTD, *rest = out if isinstance(out, tuple) else (out,)
            y_BTD = output(block, given[0], y_BTD)
            return None if y_BTD is None else (y_BTD, *rest) if rest else y_BTD

        return hook

    handles = [each.register_forward_hook(replacing(n)) for n, each in feed_forwards.items()]
    yield
    for handle in handles:
        handle.remove()


def test_losses_and_errors_are_those_of_transformers_with_the_same_feed_forwards(workers, gpt2):
    theirs, data, root = gpt2
    result, text = workers(1).run(both_forms, root / "run", Splicing)[0]
    ours, parts = load_model(root / "run"), {n: theirs.transformer.h[n].mlp for n in (0, 2)}

    def spliced(block, x_BTD, _):
        return ours.blocks[block].feed_forward(x_BTD, x_BTD)[0]

    def zeroed(block, x_BTD, _):
        return torch.zeros_like(x_BTD)

    sums = {block: [0.0, 0.0] for block in parts}

    def measured(block, x_BTD, y_BTD):
        error_BTD = spliced(block, x_BTD, None) - y_BTD
        sums[block][0] += error_BTD.double().square().sum().item()
        sums[block][1] += y_BTD.double().square().sum().item()

    with in_place_of(parts, measured):
        assert result["loss"] == pytest.approx(loss_of(theirs, data), rel=1e-5)
    windows = windows_of(data, 24)
    assert result["tokens"] == sum(len(after) for _, after in windows)
    cases = {"blocks.0.feed_forward": [0], "blocks.2.feed_forward": [2], "together": [0, 2]}
    for name, blocks in cases.items():
        (results,) = frame_of(result, "blocks", module=name).to_dict("records")
        for output in (zeroed, spliced):
            with in_place_of({block: parts[block] for block in blocks}, output):
                expected = loss_of(theirs, data)
            assert results[output.__name__] == pytest.approx(expected, rel=1e-5), name
        without, kept = results["zeroed"], results["spliced"]
        assert results["recovered"] == pytest.approx((without - kept) / (without - result["loss"]))
        assert f"{kept:.4f}" in text
        if len(blocks) == 1:
            error, square = sums[blocks[0]]
            assert results["nmse"] == pytest.approx(error / square, rel=1e-4)
            assert 0 < results["nmse"] < 1.5
    with in_place_of(parts, spliced), torch.inference_mode():
        for read, _ in windows[:2]:
            wanted, logits = (each(torch.tensor([read])).logits for each in (theirs, ours))
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_active_experts_are_counted_at_tokens_of_the_text(workers, gpt2, tmp_path):
    theirs, data, root = gpt2
    model = FamilyWeights(root / "hub").config.model_dump(mode="json")
    mxd = {"kind": "mxd", "num_experts": 64, "top_k": 40, "hidden_size": 16}
    workers(1).run(run, distilled(tmp_path, data, model, root / "hub", mxd, [1]))
    result = workers(1).run(both_forms, tmp_path / "run", Splicing)[0][0]
    gate, active = load_model(tmp_path / "run").blocks[1].feed_forward.gate, []

    def counted(_, x_BTD, y_BTD):
        active.append((gate(x_BTD[0]).weights_NK > 0).sum(-1))

    with in_place_of({1: theirs.transformer.h[1].mlp}, counted):
        loss_of(theirs, data)
    wanted = torch.cat(active).double().mean().item()
    assert result["blocks"][0]["active"] == pytest.approx(wanted, rel=1e-3)
    assert 0 < wanted < 40
    assert len(windows_of(data, 24)[-1][1]) < 24


@pytest.mark.slow
def test_two_processes_find_what_one_finds(workers, gpt2):
    _, _, root = gpt2
    options = {"overrides": ("evaluation.batch_size=3",), "tokens": 300}
    one, two = (
        workers(size).run(both_forms, root / "run", Splicing, **options)[0][0] for size in (1, 2)
    )
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    pd.testing.assert_frame_equal(*(frame_of(each, "blocks") for each in (one, two)), rtol=1e-6)


def test_the_command_shows_what_was_found_and_says_what_it_needs(gpt2, tmp_path, capfd, refused):
    _, data, root = gpt2
    run, splice = root / "run", ("experts", "splice")
    assert polyad([*splice, str(run), "--tokens", "100"]) == 0
    shown = capfd.readouterr().out
    assert "recovered" in shown
    assert "together" in shown
    for words, part in (
        ((*splice, root / "hub", "--data", data), "has no model.replaced"),
        ((*splice, run, "--teacher", run), "--teacher: "),
        (("convert", run, tmp_path / "x", "--to", "huggingface"), "model.replaced"),
    ):
        assert part in refused(*words)


@pytest.mark.slow
@pytest.mark.parametrize("feed_forward", [DENSE, SMOE])
def test_a_block_of_an_opened_mixture_becomes_another(workers, tmp_path, feed_forward):
    theirs, data = hub_with_text(tmp_path, "olmoe")
    model = FamilyWeights(tmp_path / "hub").config.model_dump(mode="json") | {"sequence_length": 24}
    config = distilled(tmp_path, data, model, tmp_path / "hub", feed_forward, [1], train__steps=30)
    assert workers(1).run(run, config) == [30]
    losses = [each["loss"] for each in records(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]
    ours, ids = load_model(tmp_path / "run"), tokens(20)
    with (
        in_place_of(
            {1: theirs.model.layers[1].mlp},
            lambda block, x, _: ours.blocks[block].feed_forward(x, x)[0],
        ),
        torch.inference_mode(),
    ):
        wanted = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    result, _ = workers(1).run(both_forms, tmp_path / "run", Splicing)[0]
    assert [row["module"] for row in result["blocks"]] == ["blocks.1.feed_forward"]


def test_without_a_teacher_the_original_is_named(run_of):
    model = {"replaced": {"blocks": [1], "feed_forward": SMOE}}
    model |= {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 32}
    folder = run_of(model=model, train__steps=1)
    with pytest.raises(ConfigError, match=r"names no distill\.teacher; use --teacher"):
        both_forms(folder, Splicing)
