"""`polyad experts prune`: the smaller model is that of an intervention, and transformers has it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyad.parallel import comm
from polyad.parallel.weights import load_model, open_weights
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.probing import routed_layers
from polyad.train.measures.removal import Removal
from polyad.train.reading import Subject, open_evaluated
from polyad.train.tasks.samples import TextSamples
from tests.helpers.decoders import hub_with_text
from tests.helpers.everyday import everyday
from tests.helpers.runs import both_forms, frame_of, newest

FAMILIES = ["olmoe", "mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "deepseek_v2", "gpt_oss"]
EVERYDAY = ["olmoe", "mixtral", "qwen3_moe"]


def prune(path, output, **options):
    return both_forms(path, Removal, output=output, **options)


@torch.no_grad()
def under_intervention(model, result, ids_BT):
    """Logits of the first model where all experts but those that stay are pruned."""
    changes = []
    for layer in routed_layers(model):
        kept = {expert for (expert,) in frame_of(result, "kept", module=layer.name)["made_of"]}
        gone = tuple(each for each in range(layer.num_experts) if each not in kept)
        changes.append(Intervention(layer=layer.block, experts=gone, how="prune"))
    with intervened(model, changes):
        return model(ids_BT).logits


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


@everyday("case", FAMILIES, keep=EVERYDAY)
def test_a_smaller_folder_is_read_by_transformers(case, tmp_path):
    hub, folder = tmp_path / "hub", tmp_path / "small"
    _, data = hub_with_text(tmp_path, case)
    # Groups that a router is limited to keep half of their two experts each.
    result, text = prune(hub, folder, by="reap", keep=0.5, data=str(data))
    experts = open_weights(folder).model_config().feed_forward.num_experts
    assert result["experts_left"] == experts == round(result["experts"] / 2)
    ids_BT = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))
    theirs, about = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [type(theirs).__name__] == settings_of(hub)["architectures"]
    with torch.no_grad():
        logits = load_model(folder)(ids_BT).logits
        wanted = theirs.eval()(ids_BT).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    before = under_intervention(load_model(hub), result, ids_BT)
    torch.testing.assert_close(logits, before, rtol=1e-4, atol=1e-4)
    losses = frame_of(result, "losses")
    assert len(losses) == 2 + 3
    assert (losses["loss"] > 0).all()
    assert "these experts" in text


def test_the_types_of_a_folder_stay(tmp_path):
    """In bf16 as it came, with its other keys."""
    hub, folder = tmp_path / "hub", tmp_path / "small"
    model, data = hub_with_text(tmp_path, "olmoe")
    model.to(torch.bfloat16).save_pretrained(hub)
    prune(hub, folder, by="frequency", keep=0.5, data=str(data))
    tensors = load_file(folder / "model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    assert settings_of(folder) == settings_of(hub) | {"num_experts": 4}


@pytest.fixture(scope="module")
def finished(run_of):
    """A run of ours whose tokens are routed apart."""
    experts = {
        "kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "balancing_rate": 0.01,
        "graph": "similarity", "score": "cosine",
    }  # fmt: skip
    return run_of(2, model__feed_forward=experts, model__initializer_range=0.3)


@pytest.mark.distributed
@pytest.mark.parametrize("by", ["frequency", pytest.param("atlas", marks=pytest.mark.slow)])
def test_a_checkpoint_keeps_its_buffers_and_keys(by, finished, tmp_path):
    result, _ = prune(finished, tmp_path / "small", by=by, keep=0.75, tokens=640)
    whole, small = load_model(newest(finished)), load_model(tmp_path / "small")
    ids_BT = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        results = small(ids_BT).logits
    torch.testing.assert_close(results, under_intervention(whole, result, ids_BT))
    for layer in routed_layers(whole):
        kept = [expert for (expert,) in frame_of(result, "kept", module=layer.name)["made_of"]]
        assert len(kept) == 6
        name = f"{layer.name}.router.selection.balancing_bias"
        assert torch.equal(small.get_buffer(name), whole.get_buffer(name)[kept])
    if by == "frequency":  # those that are used least are gone
        whole, smaller, *_ = frame_of(result, "losses")["loss"]
        assert smaller != whole


@pytest.mark.slow
@pytest.mark.distributed
def test_merged_experts_are_means_by_use(finished, tmp_path):
    result, text = prune(
        finished, tmp_path / "small", by="frequency", keep=0.5, tokens=640, merge=True
    )
    whole, small = load_model(newest(finished)), load_model(tmp_path / "small")
    opened = open_evaluated(newest(finished), None, ())
    layers = routed_layers(whole)
    samples = TextSamples(opened.task, "train", 640, hidden=True)
    with comm.left_again():
        moments = Subject(whole, layers, samples, 4).moments(comm.initialize())
    assert any(len(row["made_of"]) > 1 for row in result["kept"])
    for layer in layers:
        groups = list(frame_of(result, "kept", module=layer.name)["made_of"])
        assert sorted(expert for group in groups for expert in group) == list(range(8))
        used_S = moments[layer.name].statistics()["frequency"]
        for number, group in enumerate(groups):
            share = used_S[group] / used_S[group].sum()
            if not used_S[group].sum():
                share = torch.full_like(share, 1 / len(group))
            for name in ("experts.up", "experts.down", "output_bias"):
                before = whole.get_submodule(layer.name).get_parameter(name)[group].double()
                after = small.get_submodule(layer.name).get_parameter(name)[number]
                expected = torch.tensordot(share, before, 1).float()
                torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    assert "merged" in text


@pytest.mark.parametrize(
    ("case", "words", "key"),
    [
        ("olmoe", ["small", "--by", "reap", "--keep", "0.1"], "num_experts"),
        ("olmoe", ["small", "--by", "reap", "--keep", "1.0"], "--keep"),
        ("olmoe", ["small", "--by", "random", "--keep", "0.5"], "--by"),
        ("olmoe", ["small", "--by", "reap"], "--keep"),
        # DeepSeek-V3 ranks its groups by their best two experts: here 8 experts in 4 groups of two.
        ("deepseek_v3", ["small", "--by", "reap", "--keep", "0.5"], "num_groups"),
        ("deepseek_v3", ["small", "--by", "reap", "--keep", "0.5", "--merge"], "--merge"),
        ("olmoe", ["there", "--by", "reap", "--keep", "0.5"], "there"),
    ],
)
def test_what_is_not_allowed_is_known_before_the_reading(case, words, key, tmp_path, refused):
    _, data = hub_with_text(tmp_path, case)
    (tmp_path / "there").write_text("mine")
    output, *words = words
    line = refused("experts", "prune", tmp_path / "hub", tmp_path / output, *words, "--data", data)
    assert key in line
    assert not (tmp_path / "small").exists()
