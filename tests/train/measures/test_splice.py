"""`polyad experts splice`: the same feed-forwards in models of transformers, copies, processes."""

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from polyad.train.measures.splice import Splicing
from polyad.train.reading import open_evaluated
from tests.helpers.decoders import hub_folder, prepared_for, tokens, write_tokenizer
from tests.helpers.everyday import everyday
from tests.helpers.huggingface import save_reference
from tests.helpers.runs import both_forms, frame_of, records, run, write_config

pytestmark = pytest.mark.distributed

DENSE = {"kind": "dense", "hidden_size": 24}
SMOE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16}
SHAPE = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24, "vocab_size": 320}


def distilled(tmp_path, data, model, teacher, feed_forward, blocks, **changes):
    """A run whose blocks learn from a folder of weights."""
    replaced = {"blocks": blocks, "feed_forward": feed_forward}
    given = {"model": model | {"replaced": replaced}, "log__trackers": [], "train__steps": 12}
    given |= {"distill__teacher": str(teacher), "distill__blocks": "normalized"}
    given |= {"evaluation__every": 0, "checkpoint__every": 0}
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


def windows(data):
    """Windows of 24 tokens over the validation split, and the token after each."""
    opened = PreparedData.open(data)
    stream, end = opened.split("validation"), opened.tokenizer().end_of_text_id
    ids = torch.tensor([end, *stream.read(0, stream.num_tokens).tolist()])
    return [(ids[at : at + 24], ids[at + 1 : at + 25]) for at in range(0, len(ids) - 1, 24)]


@torch.inference_mode()
def loss_of(theirs, data):
    result = [
        cross_entropy(theirs(read[None, : len(after)]).logits[0], after, reduction="none")
        for read, after in windows(data)
    ]
    return torch.cat(result).double().mean().item()


def in_place_of(layers, blocks, output):
    """Hooks on feed-forwards of transformers; `output` makes of a block and its input [B, T, D]."""
    return [
        layers[block].mlp.register_forward_hook(
            lambda _, given, found, block=block: (
                (output(block, given[0]), *found[1:])
                if isinstance(found, tuple)
                else output(block, given[0])
            )
        )
        for block in blocks
    ]


def test_losses_are_those_of_transformers_with_the_same_feed_forwards(workers, gpt2):
    theirs, data, root = gpt2
    result, text = workers(1).run(both_forms, root / "run", Splicing)[0]
    ours = load_model(root / "run")

    def spliced(block, x_BTD):
        return ours.blocks[block].feed_forward(x_BTD, x_BTD)[0]

    assert result["loss"] == pytest.approx(loss_of(theirs, data), rel=1e-5)
    assert result["tokens"] == sum(len(after) for _, after in windows(data))
    cases = {"blocks.0.feed_forward": [0], "blocks.2.feed_forward": [2], "together": [0, 2]}
    for name, blocks in cases.items():
        (results,) = frame_of(result, "blocks", module=name).to_dict("records")
        for way, output in (("zeroed", lambda _, x: torch.zeros_like(x)), ("spliced", spliced)):
            hooks = in_place_of(theirs.transformer.h, blocks, output)
            assert results[way] == pytest.approx(loss_of(theirs, data), rel=1e-5), (name, way)
            for hook in hooks:
                hook.remove()
        zeroed, kept = results["zeroed"], results["spliced"]
        assert results["recovered"] == pytest.approx((zeroed - kept) / (zeroed - result["loss"]))
        assert f"{results['spliced']:.4f}" in text
    hooks = in_place_of(theirs.transformer.h, [0, 2], spliced)
    with torch.inference_mode():
        for read, after in windows(data)[:2]:
            wanted, logits = (each(read[None, : len(after)]).logits for each in (theirs, ours))
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    for hook in hooks:
        hook.remove()


def test_active_experts_are_counted_at_tokens_of_the_text(workers, gpt2, tmp_path):
    theirs, data, root = gpt2
    model = FamilyWeights(root / "hub").config.model_dump(mode="json")
    mxd = {"kind": "mxd", "num_experts": 64, "top_k": 40, "hidden_size": 16}
    workers(1).run(run, distilled(tmp_path, data, model, root / "hub", mxd, [1]))
    result = workers(1).run(both_forms, tmp_path / "run", Splicing)[0][0]
    gate, active = load_model(tmp_path / "run").blocks[1].feed_forward.gate, []
    hook = theirs.transformer.h[1].mlp.register_forward_hook(
        lambda _, given, y_BTD: active.append((gate(given[0][0]).weights_NK > 0).sum(-1))
    )
    loss_of(theirs, data)
    hook.remove()
    wanted = torch.cat(active).double().mean().item()
    assert result["blocks"][0]["active"] == pytest.approx(wanted, rel=1e-3)
    assert 0 < wanted < 40
    assert len(windows(data)[-1][1]) < 24


def test_errors_are_those_on_what_enters_the_original_blocks(workers, gpt2):
    theirs, data, root = gpt2
    result, _ = workers(1).run(both_forms, root / "run", Splicing)[0]
    ours, sums = load_model(root / "run"), {block: [0.0, 0.0] for block in (0, 2)}

    def keep(block):
        def hook(_, given, y_BTD):
            results = ours.blocks[block].feed_forward(given[0], given[0])[0]
            sums[block][0] += (results - y_BTD).double().square().sum().item()
            sums[block][1] += y_BTD.double().square().sum().item()

        return theirs.transformer.h[block].mlp.register_forward_hook(hook)

    hooks = [keep(block) for block in (0, 2)]
    loss_of(theirs, data)
    for hook in hooks:
        hook.remove()
    for block, (error, square) in sums.items():
        (nmse,) = frame_of(result, "blocks", module=f"blocks.{block}.feed_forward")["nmse"]
        assert nmse == pytest.approx(error / square, rel=1e-4)
        assert 0 < nmse < 1.5


@pytest.mark.slow
def test_two_processes_find_what_one_finds(workers, gpt2):
    _, _, root = gpt2
    options = {"overrides": ("evaluation.batch_size=3",), "tokens": 300}
    one, two = (
        workers(size).run(both_forms, root / "run", Splicing, **options)[0][0] for size in (1, 2)
    )
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    pd.testing.assert_frame_equal(*(frame_of(each, "blocks") for each in (one, two)), rtol=1e-6)


def test_the_command_shows_what_was_found_and_says_what_it_needs(gpt2, tmp_path, capfd):
    _, data, root = gpt2
    assert polyad(["experts", "splice", str(root / "run"), "--tokens", "100"]) == 0
    shown = capfd.readouterr().out
    assert "recovered" in shown
    assert "together" in shown
    words = ["experts", "splice", str(root / "hub"), "--data", str(data)]
    assert polyad(words) == 2
    assert "has no model.replaced" in capfd.readouterr().err
    assert polyad(["experts", "splice", str(root / "run"), "--teacher", str(root / "run")]) == 2
    assert "--teacher: " in capfd.readouterr().err
    assert polyad(["convert", str(root / "run"), str(tmp_path / "x"), "--to", "huggingface"]) == 2
    assert "model.replaced: Hugging Face" in capfd.readouterr().err


@pytest.mark.slow
@everyday("feed_forward", [DENSE, SMOE], keep=[DENSE])
def test_a_block_of_an_opened_mixture_becomes_another(workers, tmp_path, feed_forward):
    theirs = hub_folder(tmp_path / "hub", "olmoe")
    data = prepared_for(tmp_path / "hub", tmp_path)
    model = FamilyWeights(tmp_path / "hub").config.model_dump(mode="json") | {"sequence_length": 24}
    config = distilled(tmp_path, data, model, tmp_path / "hub", feed_forward, [1], train__steps=30)
    assert workers(1).run(run, config) == [30]
    losses = [each["loss"] for each in records(tmp_path / "run")]
    assert losses[-1] < 0.8 * losses[0]
    ours = load_model(tmp_path / "run")
    hooks = in_place_of(
        theirs.model.layers, [1], lambda block, x: ours.blocks[block].feed_forward(x, x)[0]
    )
    ids = tokens(20)
    with torch.inference_mode():
        wanted = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    for hook in hooks:
        hook.remove()
    result, _ = workers(1).run(both_forms, tmp_path / "run", Splicing)[0]
    assert [row["module"] for row in result["blocks"]] == ["blocks.1.feed_forward"]


@pytest.mark.slow
def test_a_copy_of_the_original_recovers_everything(workers, tmp_path, prepared_path):
    """A replaced dense block as wide as the teacher's, with its weights."""
    config = write_config(tmp_path / "teacher.yaml", prepared_path, train__steps=2)
    assert workers(1).run(run, config, f"run.folder={tmp_path / 'teacher'}") == [2]
    model = load_config(config).model.model_dump(mode="json")
    model = model | {"replaced": {"blocks": [1], "feed_forward": {"kind": "dense"}}}
    copy = write_config(
        tmp_path / "copy.yaml", prepared_path, model=model,
        distill__teacher=str(tmp_path / "teacher"), distill__blocks="squared",
        optimizer__kind="sgd", optimizer__learning_rate=1.0e-12, train__steps=1,
        run__folder=str(tmp_path / "copy"),
    )  # fmt: skip
    assert workers(1).run(run, copy) == [1]
    opened = open_evaluated(tmp_path / "copy", None, ())
    spliced = load_model(opened.weights)
    theirs = load_model(tmp_path / "teacher").get_submodule("blocks.1.feed_forward")
    spliced.get_submodule("blocks.1.feed_forward").load_state_dict(theirs.state_dict())
    measure = Splicing()
    measure.check(opened, "validation")
    measure.begin(measure.subject_of(opened, "validation", spliced))
    measure.read()
    result = measure.result()
    (block,), loss = result.frames["blocks"].to_dict("records"), result.facts["loss"]
    assert (block["spliced"], block["recovered"], block["nmse"]) == (loss, 1, 0)
    assert block["zeroed"] != loss


def test_without_a_teacher_the_original_is_named(workers, tmp_path, prepared_path):
    model = {"replaced": {"blocks": [1], "feed_forward": SMOE}}
    model |= {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 32}
    config = write_config(tmp_path / "config.yaml", prepared_path, model=model, train__steps=1)
    assert workers(1).run(run, config) == [1]
    with pytest.raises(ConfigError, match=r"names no distill\.teacher; use --teacher"):
        both_forms(tmp_path / "run", Splicing)
