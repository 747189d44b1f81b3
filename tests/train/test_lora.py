"""Runs with LoRA and with groups: what they start from, save, go on with, and become."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from polyad.launch.cli import run as polyad
from polyad.model.build import build_model, materialize
from polyad.model.lora import LoRAConfig, add_lora
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model, open_weights
from polyad.train.exchange.convert import convert
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

LORA = {
    "rank": 4,
    "alpha": 8.0,
    "targets": ["attention.qkv", "attention.projection", "feed_forward.*"],
}


def lora_config(folder, data, base, **changes):
    """A run of 6 steps that adapts what another run has trained."""
    defaults = {
        "adapt__lora": LORA, "checkpoint__init_from": str(base), "optimizer__learning_rate": 0.02,
        "optimizer__weight_decay": 0.0, "model__dropout": 0.1,
    }  # fmt: skip
    return write_config(folder / "config.yaml", data, **defaults | changes)


@pytest.fixture(scope="session")
def adapted(workers, finished, tmp_path_factory, prepared_path):
    """The folder of a finished run with LoRA, its configuration, and what it said."""
    folder = tmp_path_factory.mktemp("adapted")
    config = lora_config(folder, prepared_path, finished)
    results = workers(2).run(run_and_listen, config)
    assert [steps for steps, _ in results] == [6, 6]
    return folder / "run", config, results[0][1]


@pytest.fixture
def some_ids():
    return torch.randint(400, (3, 32), generator=torch.Generator().manual_seed(1))


def unmerged(folder, base):
    """The model of a run as it was trained: the base's weights and adapters beside them."""
    checkpoint, weights = Checkpoint(newest(folder)), load_model(base).state_dict()
    model = build_model(checkpoint.model_config())
    add_lora(model, LoRAConfig.model_validate(LORA))
    materialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = ".lora." in name
            parameter.copy_(checkpoint.whole(name) if own else weights[name])
    return model.eval()


def test_a_start_says_what_is_trained_and_a_checkpoint_has_that_alone(adapted, finished):
    folder, _, said = adapted
    # By hand: rank 4, width 32, inner width 128, two blocks.
    numbers = 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    frozen = sum(p.numel() for p in load_model(finished).parameters())
    assert f"trains {numbers:,} parameters; {frozen:,} are frozen" in said
    saved = tensors(newest(folder))
    assert all(".lora." in name for name, _ in saved)
    assert sum(value.numel() for value in saved.values()) == 3 * numbers
    state = json.loads((newest(folder) / "state.json").read_text())
    assert len(state["base_digest"]) == 32
    sizes = [
        sum(path.stat().st_size for path in newest(each).glob("*.safetensors"))
        for each in (folder, finished)
    ]
    assert sizes[0] < 0.2 * sizes[1]


@pytest.mark.slow
def test_resuming_is_bitwise_at_any_base_of_equal_weights(
    workers, adapted, finished, exported, prepared_path, tmp_path
):
    folder, *_ = adapted
    half = lora_config(tmp_path, prepared_path, finished, train__steps=3)
    assert workers(2).run(run, half) == [3, 3]
    # The base may have moved, and be in another format: its digest is what counts.
    overrides = ("train.steps=6", f"checkpoint.init_from={exported}")
    assert workers(2).run(run, half, *overrides) == [6, 6]
    straight, resumed = tensors(newest(folder)), tensors(newest(tmp_path / "run"))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_merged_and_unmerged_weights_and_peft_give_equal_logits(
    adapted, finished, exported, tmp_path, some_ids
):
    folder, *_ = adapted
    result = convert(folder, tmp_path / "peft", "peft")
    assert result["files"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    convert(folder, tmp_path / "merged", "huggingface", merge=True)
    convert(folder, tmp_path / "plain", "safetensors", merge=True)
    convert(folder, tmp_path / "polyad", "polyad", merge=True)
    base = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    # What peft does not find it leaves out with no more than a warning.
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    loaded = {
        name.replace(".default", ""): p for name, p in theirs.named_parameters() if "lora_" in name
    }
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    with torch.no_grad():
        expected = unmerged(folder, finished)(some_ids).logits
        others = {
            "peft": theirs(some_ids).logits,
            "transformers": merged.eval()(some_ids).logits,
            "run": load_model(folder)(some_ids).logits,
            "peft, read": load_model(open_weights(tmp_path / "peft", base=exported))(
                some_ids
            ).logits,
            **{name: load_model(tmp_path / name)(some_ids).logits for name in ("plain", "polyad")},
        }
        before = load_model(finished)(some_ids).logits
    for name, logits in others.items():
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, msg=name)
    assert (expected - before).abs().max() > 0.01


@pytest.mark.slow
def test_commands_take_a_checkpoint_of_adapters(adapted, workers, finished, capfd):
    folder, config, _ = adapted
    after, before = (workers(1).run(evaluation, each)[0] for each in (folder, finished))
    assert after["loss"] < before["loss"]
    assert after["step"] == 6
    arguments = ["generate", str(folder), "--prompt", "import ", "--max-tokens", "3"]
    assert polyad([*arguments, "--json", "-"]) == 0
    assert len(json.loads(capfd.readouterr().out)["text"]) > 0
    assert polyad(["validate", str(config), "--json", "-"]) == 0
    about = json.loads(capfd.readouterr().out)
    frozen = sum(p.numel() for p in load_model(finished).parameters())
    assert about["model"]["trained_parameters"] == 4096
    assert about["model"]["parameters"] == frozen + 4096
    assert about["memory_bytes_per_process"]["gradients"] == 4 * 4096
    assert polyad(["validate", str(config)]) == 0
    assert ", 4,096 of them trained" in capfd.readouterr().out


def test_adapters_of_another_base_are_refused(
    workers, adapted, trained, finished, prepared_path, tmp_path, capfd
):
    folder, _, _ = adapted
    other = tmp_path / "other"
    result = convert(finished, other, "safetensors")
    assert result["parameters"] > 0
    weights = load_file(other / "model.safetensors")
    weights["blocks.1.feed_forward.down.weight"][3, 5] += 1e-3  # of all numbers one
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    config = lora_config(tmp_path, prepared_path, finished)
    shutil.copytree(folder, tmp_path / "run")
    changed = ("train.steps=8", f"checkpoint.init_from={other}")
    message = refusal(workers(1), config, *changed)
    assert "its adapters belong to a different base model: digest " in message
    assert str(other) in message
    # And where the checkpoint is only read, its base has gone, or become another model's.
    moved = tmp_path / "run"
    path = newest(moved) / "config.yaml"
    for base, why in (
        (other, "its adapters belong to a different base model: digest"),
        (tmp_path / "gone", "cannot be used"),
        (trained("smoe"), "is a different model"),
    ):
        path.write_text(
            (newest(folder) / "config.yaml").read_text().replace(str(finished), str(base))
        )
        reseal(newest(moved))
        with pytest.raises(CheckpointError, match=why):
            open_weights(moved)
        assert polyad(["evaluate", str(moved)]) == 2
        (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("polyad")]
        assert why in line


@pytest.mark.slow
def test_commands_are_told_where_a_base_has_moved(
    adapted, finished, exported, trained, tmp_path, capfd
):
    folder, *_ = adapted
    shutil.copytree(folder, tmp_path / "run")
    moved = newest(tmp_path / "run")
    path = moved / "config.yaml"
    path.write_text(path.read_text().replace(str(finished), str(tmp_path / "gone")))
    reseal(moved)

    def said(status, *words):
        assert polyad([str(word) for word in words]) == status
        captured = capfd.readouterr()
        return captured.out if status == 0 else captured.err.splitlines()[-1]

    convert_ = ("convert", moved, tmp_path / "merged", "--to", "safetensors", "--merge")
    assert "(checkpoint.init_from) cannot be used" in said(2, *convert_)
    said(0, *convert_, "--base", exported)
    ours, theirs = (load_model(each).state_dict() for each in (tmp_path / "merged", folder))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    scored = [
        json.loads(said(0, "evaluate", *words, "--json", "-"))["loss"]
        for words in ((folder,), (moved, "--base", finished))
    ]
    assert scored[0] == scored[1]
    written = ("generate", moved, "--prompt", "import ", "--max-tokens", "3", "--base", finished)
    assert said(0, *written).startswith("import ")
    assert "a different base model: digest" in said(2, "evaluate", moved, "--base", folder)
    line = said(2, "evaluate", moved, "--base", trained("smoe"))
    assert "holds adapters, and their base (--base) cannot be used: " in line
    line = said(2, "evaluate", finished, "--base", exported)
    assert f"--base: {exported} is not allowed" in line
    assert "holds no adapters, and only adapters have a base" in line
    assert "holds no adapters" in said(
        2, "convert", exported, tmp_path / "x", "--to", "polyad", "--base", finished
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapt.lora.targets=[attn.c_attn]"], "adapt.lora.targets: 'attn.c_attn' matches nothing"),
        (["adapt.lora.experts=true"], "adapt.lora.experts: true is not allowed with a model that"),
        (["checkpoint.init_from=null"], "checkpoint.init_from: null is not allowed with adapt"),
        (["optimizer.groups=[{match: blocks.9.*}]"], "groups.0.match: 'blocks.9.*' matches"),
        (["optimizer.groups=[{match: '*', freeze: true}]"], "optimizer.groups: freeze"),
    ],
    ids=str,
)  # fmt: skip
def test_what_matches_nothing_ends_a_start_with_one_line(
    adapted, tmp_path, capfd, overrides, message
):
    _, config, _ = adapted
    words = [f"run.folder={tmp_path / 'run'}", *overrides]
    assert polyad(["validate", str(config), *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_conversion_says_what_to_do_with_adapters(adapted, finished, tmp_path, capfd):
    folder, *_ = adapted
    for source, options, message in (
        (
            folder,
            ["--to", "safetensors"],
            "--merge merges them",
        ),
        (finished, ["--to", "peft"], "holds no adapters"),
        (finished, ["--to", "polyad", "--merge"], "--merge: "),
        (folder, ["--to", "peft", "--merge"], "--to peft, without it"),
    ):
        assert polyad(["convert", str(source), str(tmp_path / "new"), *options]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_run_with_experts_adapts_them_and_starts_from_another_with_lora(
    workers, trained, prepared_path, tmp_path
):
    base, lora = trained("smoe"), {"rank": 4, "experts": True, "trained": ["final_norm.*"]}
    changes = {"model__feed_forward": FEED_FORWARDS["smoe"], "model__dropout": 0.0}
    (tmp_path / "first").mkdir()
    config = lora_config(
        tmp_path / "first", prepared_path, base, adapt__lora=lora, train__steps=2,
        checkpoint__every=1, parallel__expert_parallel_size=2, **changes,
    )  # fmt: skip
    workers(2).run(run, config)
    first = tmp_path / "first" / "run"
    saved = {name for name, _ in tensors(first / "checkpoints" / "step-00000002")}
    assert "blocks.1.feed_forward.experts.up_lora.A" in saved
    assert "blocks.1.feed_forward.experts.up" not in saved
    assert "blocks.1.feed_forward.router.graph.head_entropy" in saved  # buffers change
    # A second one beside the merged weights of the first: it starts with them.
    config = lora_config(
        tmp_path, prepared_path, first, train__steps=1, optimizer__learning_rate=1e-30,
        adapt__lora={"rank": 4}, **changes,
    )  # fmt: skip
    assert workers(2).run(run, config) == [1, 1]
    of_base, one, two = (open_weights(each) for each in (base, first, tmp_path / "run"))
    for name in of_base.shapes():
        assert torch.equal(one.whole(name), two.whole(name))
        adapted = ".experts." in name and not name.endswith("bias")
        adapted |= name.endswith(("qkv.weight", "projection.weight"))
        adapted |= name.startswith("final_norm")
        assert torch.equal(of_base.whole(name), one.whole(name)) != adapted, name
