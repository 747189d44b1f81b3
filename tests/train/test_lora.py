"""Runs with LoRA and with groups: what they start from, save, go on with, and become."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.weights import load_model, open_weights
from polyad.train.exchange.convert import convert
from tests.helpers.adapted import assert_all_loaded, unmerged
from tests.helpers.decoders import tokens
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import (
    FEED_FORWARDS,
    evaluation,
    newest,
    refusal,
    reseal,
    run,
    run_and_listen,
    write_config,
)
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed

LORA = {"rank": 4, "alpha": 8.0,
        "targets": ["attention.qkv", "attention.projection", "feed_forward.*"]}  # fmt: skip


def lora_config(folder, data, base, **changes):
    """A run of 6 steps that adapts what another run has trained."""
    defaults = {"adapt__lora": LORA, "checkpoint__init_from": str(base), "model__dropout": 0.1}
    defaults |= {"optimizer__learning_rate": 0.02, "optimizer__weight_decay": 0.0}
    return write_config(folder / "config.yaml", data, **defaults | changes)


@pytest.fixture(scope="session")
def adapted(workers, finished, tmp_path_factory, prepared_path):
    """The folder of a finished run with LoRA, its configuration, and what it said."""
    folder = tmp_path_factory.mktemp("adapted")
    config = lora_config(folder, prepared_path, finished)
    results = workers(2).run(run_and_listen, config)
    assert [steps for steps, _ in results] == [6, 6]
    return folder / "run", config, results[0][1]


def test_a_start_says_what_is_trained_and_a_checkpoint_has_that_alone(adapted, finished):
    folder, _, said = adapted
    # By hand: rank 4, width 32, inner width 128, two blocks.
    numbers = 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    frozen = sum(p.numel() for p in load_model(finished).parameters())
    assert f"trains {numbers:,} parameters; {frozen:,} are frozen" in said
    saved = tensors(newest(folder))
    assert all(".lora." in name for name, _ in saved)
    assert sum(value.numel() for value in saved.values()) == 3 * numbers


@pytest.mark.slow
def test_resuming_is_bitwise_at_any_base_of_equal_weights(
    workers, adapted, finished, exported, prepared_path, tmp_path
):
    config = lora_config(tmp_path, prepared_path, finished)
    assert workers(2).run(run, config, "train.steps=3") == [3, 3]
    # The base may have moved, and be in another format: its digest is what counts.
    assert workers(2).run(run, config, f"checkpoint.init_from={exported}") == [6, 6]
    assert_equal_state(newest(tmp_path / "run"), newest(adapted[0]))


def test_merged_and_unmerged_weights_and_peft_give_equal_logits(
    adapted, finished, exported, tmp_path
):
    folder, *_ = adapted
    convert(folder, tmp_path / "peft", "peft")
    for name in ("huggingface", "safetensors", "polyad"):
        convert(folder, tmp_path / name, name, merge=True)
    base = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    assert_all_loaded(theirs, tmp_path / "peft")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", local_files_only=True)
    others = {"peft": theirs, "transformers": merged.eval(), "run": load_model(folder)}
    others["peft, read"] = load_model(open_weights(tmp_path / "peft", base=exported))
    others |= {name: load_model(tmp_path / name) for name in ("safetensors", "polyad")}
    with torch.no_grad():
        expected = unmerged(folder, finished, LORA)(tokens()).logits
        for name, model in others.items():
            logits = model(tokens()).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, msg=name)
        assert (expected - load_model(finished)(tokens()).logits).abs().max() > 0.01


@pytest.mark.slow
def test_commands_take_a_checkpoint_of_adapters(adapted, workers, finished, capfd):
    folder, config, _ = adapted
    after, before = (workers(1).run(evaluation, each)[0] for each in (folder, finished))
    assert after["loss"] < before["loss"]
    assert polyad(["validate", str(config), "--json", "-"]) == 0
    about = json.loads(capfd.readouterr().out)
    frozen = sum(p.numel() for p in load_model(finished).parameters())
    assert about["model"]["trained_parameters"] == 4096
    assert about["model"]["parameters"] == frozen + 4096
    assert about["memory_bytes_per_process"]["gradients"] == 4 * 4096


def copied(folder, place, base, other):
    """A copy of a run with adapters that names another base; gives its checkpoint."""
    shutil.copytree(folder, place)
    path = newest(place) / "config.yaml"
    path.write_text(path.read_text().replace(str(base), str(other)))
    reseal(newest(place))
    return newest(place)


def test_adapters_of_another_base_are_refused(
    workers, adapted, trained, finished, prepared_path, tmp_path, refused
):
    folder, *_ = adapted
    other = tmp_path / "other"
    convert(finished, other, "safetensors")
    weights = load_file(other / "model.safetensors")
    weights["blocks.1.feed_forward.down.weight"][3, 5] += 1e-3  # of all numbers one
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    shutil.copytree(folder, tmp_path / "run")
    config = lora_config(tmp_path, prepared_path, finished)
    changed = ("train.steps=8", f"checkpoint.init_from={other}")
    digest = "its adapters belong to a different base model: digest "
    assert digest in refusal(workers(1), config, *changed)
    # And where the checkpoint is only read, its base has gone, or become another model's.
    for number, (base, why) in enumerate((
        (other, digest), (tmp_path / "gone", "cannot be used"),
        (trained("smoe"), "is a different model"),
    )):  # fmt: skip
        moved = copied(folder, tmp_path / str(number), finished, base)
        with pytest.raises(CheckpointError, match=why):
            open_weights(moved)
        assert why in refused("evaluate", moved)


@pytest.mark.slow
def test_commands_are_told_where_a_base_has_moved(
    adapted, finished, exported, trained, tmp_path, capfd, refused
):
    folder, *_ = adapted
    moved = copied(folder, tmp_path / "run", finished, tmp_path / "gone")

    def said(*words):
        capfd.readouterr()
        assert polyad([str(word) for word in words]) == 0
        return capfd.readouterr().out

    convert_ = ("convert", moved, tmp_path / "merged", "--to", "safetensors", "--merge")
    assert "(checkpoint.init_from) cannot be used" in refused(*convert_)
    said(*convert_, "--base", exported)
    ours, theirs = (load_model(each).state_dict() for each in (tmp_path / "merged", folder))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    one, two = (
        json.loads(said("evaluate", *words, "--json", "-"))["loss"]
        for words in ((folder,), (moved, "--base", finished))
    )
    assert one == two
    written = ("generate", moved, "--prompt", "import ", "--max-tokens", "3", "--base", finished)
    assert said(*written).startswith("import ")
    for path, base, why in (
        (moved, folder, "a different base model: digest"),
        (moved, trained("smoe"), "their base (--base) cannot be used: "),
        (finished, exported, f"--base: {exported} is not allowed"),
    ):
        assert why in refused("evaluate", path, "--base", base)


STARTS = [
    ("adapt.lora.targets=[attn.c_attn]", "adapt.lora.targets: 'attn.c_attn' matches nothing"),
    ("adapt.lora.experts=true", "adapt.lora.experts: true is not allowed with a model that"),
    ("checkpoint.init_from=null", "checkpoint.init_from: null is not allowed with adapt"),
    ("optimizer.groups=[{match: blocks.9.*}]", "groups.0.match: 'blocks.9.*' matches"),
    ("optimizer.groups=[{match: '*', freeze: true}]", "optimizer.groups: freeze"),
]
CONVERSIONS = [
    ("adapted", ["--to", "safetensors"], "--merge to merge them"),
    ("adapted", ["--to", "peft", "--merge"], "--to peft to write them alone"),
    ("finished", ["--to", "peft"], "holds no adapters"),
    ("finished", ["--to", "polyad", "--merge"], "--merge: "),
]


def test_what_does_not_fit_adapters_is_one_line(adapted, finished, tmp_path, refused):
    folder, config, _ = adapted
    new, places = tmp_path / "new", {"adapted": folder, "finished": finished}
    for change, why in STARTS:
        assert why in refused("validate", config, f"run.folder={new}", change)
    for name, options, why in CONVERSIONS:
        assert why in refused("convert", places[name], new, *options)
    assert not new.exists()


@pytest.mark.slow
def test_a_run_with_experts_adapts_them_and_starts_from_another_with_lora(
    workers, trained, prepared_path, tmp_path
):
    base, lora = trained("smoe"), {"rank": 4, "experts": True, "trained": ["final_norm.*"]}
    changes = {"model__feed_forward": FEED_FORWARDS["smoe"], "model__dropout": 0.0}
    first, second = tmp_path / "first", tmp_path / "second"
    config = lora_config(
        tmp_path, prepared_path, base, run__folder=str(first), adapt__lora=lora, train__steps=2,
        checkpoint__every=1, parallel__expert_parallel_size=2, **changes,
    )  # fmt: skip
    workers(2).run(run, config)
    saved = {name for name, _ in tensors(first / "checkpoints" / "step-00000002")}
    assert "blocks.1.feed_forward.experts.up_lora.A" in saved
    assert "blocks.1.feed_forward.experts.up" not in saved
    assert "blocks.1.feed_forward.router.graph.head_entropy" in saved  # buffers change
    # A second one beside the merged weights of the first: it starts with them.
    config = lora_config(
        tmp_path, prepared_path, first, run__folder=str(second), train__steps=1,
        optimizer__learning_rate=1e-30, adapt__lora={"rank": 4}, **changes,
    )  # fmt: skip
    assert workers(2).run(run, config) == [1, 1]
    of_base, one, two = (open_weights(each) for each in (base, first, second))
    ends = ("qkv.weight", "projection.weight")
    for name in of_base.shapes():
        assert torch.equal(one.whole(name), two.whole(name))
        adapted = ".experts." in name and not name.endswith("bias")
        adapted |= name.endswith(ends) or name.startswith("final_norm")
        assert torch.equal(of_base.whole(name), one.whole(name)) != adapted, name
