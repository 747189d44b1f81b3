"""Mixtures that only transformers opens, through the one interface of their experts; and families
of ours through the same door, where both must say the same."""

import json

import pytest
import torch

import polyad
from polyad.launch.cli import run as command
from polyad.model.families.keys import WeightsError
from polyad.parallel.foreign import TheirWeights
from polyad.parallel.weights import load_model
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from tests.helpers.decoders import ROUTED, commands_on, hub_with_text, prepared_for, write_tokenizer
from tests.helpers.everyday import everyday
from tests.helpers.little_memory import little_memory
from tests.helpers.mixtures import PAGE, kinds, logits_of, random_model, rows_of, verify
from tests.helpers.runs import write_config

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
TEXT = "def main(): return 1"


@everyday("kind", kinds(), keep=["glm4_moe", "granitemoehybrid"])
def test_the_page_says_what_is_verified_of_every_type(kind):
    assert rows_of(PAGE.read_text("utf-8"))[kind] == verify(kind)


@everyday("case", ROUTED, keep=["olmoe", "deepseek_v3"])
def test_families_of_ours_are_read_alike_through_both_doors(case, tmp_path):
    _, data = hub_with_text(tmp_path, case)
    ours = polyad.load(tmp_path / "hub")
    theirs = polyad.load(tmp_path / "hub", attn_implementation="eager")
    assert isinstance(theirs._weights, TheirWeights)
    expected, found = ours.evaluate(data), theirs.evaluate(data)
    assert found["tokens_scored"] == expected["tokens_scored"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    routed = ours.experts(TEXT).layers
    for name, layer in theirs.experts(TEXT).layers.items():
        weights, order = routed[name].weights.sort(descending=True, stable=True)
        assert torch.equal(layer.experts, routed[name].experts.gather(1, order))
        torch.testing.assert_close(layer.weights, weights, atol=1e-5, rtol=1e-4)
        if layer.layer.block not in theirs.model.without_scores:
            torch.testing.assert_close(layer.scores, routed[name].scores, atol=1e-5, rtol=1e-4)
    last = theirs.experts(TEXT)
    block = [*last.layers.values()][-1].layer.block
    for how in (
        "zero",
        "renormalize",
        "prune",
        "scale,value=2",
        "swap,to=0",
        "steer,value=2",
    ):
        change = f"layer={block},expert=1,how={how}"
        with ours.intervened(change), theirs.intervened(change):
            one, other = (run.evaluate(data)["loss"] for run in (ours, theirs))
        assert other == pytest.approx(one, abs=1e-5)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A folder of a family that we have not, and prepared text."""
    tmp_path = tmp_path_factory.mktemp("glm")
    folder = tmp_path / "hub"
    random_model("glm4_moe", vocab_size=320).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)
    return folder, prepared_for(folder, tmp_path)


def test_a_mixture_that_lies_on_disk_is_changed_as_the_whole_one(glm, tmp_path):
    folder, _ = glm
    blocks = {f"model.layers.{number}": "disk" for number in (1, 2)}
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(parts, "cpu") | blocks
    run = polyad.load(folder, device_map=places, offload_folder=str(tmp_path))
    assert {each.device.type for each in run.model.parameters()} == {"cpu", "meta"}
    change = ["layer=1,expert=1,how=prune"]
    (one, other) = (each.show(TEXT, interventions=change) for each in (run, polyad.load(folder)))
    assert one.changed.losses == other.changed.losses
    assert one.changed.loss != one.plain.loss


def test_commands_read_a_mixture_of_transformers(glm, tmp_path, capfd):
    folder, data = glm
    for words in commands_on(folder, str(data), 1):
        assert command([str(word) for word in words]) == 0, capfd.readouterr().err
    smaller = tmp_path / "smaller"
    few = ["--data", str(data), "--tokens", "64", "--keep", "0.5", "--by", "reap"]
    assert command(["experts", "prune", str(folder), str(smaller), *few]) == 0
    config = json.loads((smaller / "config.json").read_text())
    assert (config["n_routed_experts"], config["dtype"]) == (4, "bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smaller)
    assert theirs(torch.arange(8)[None]).logits.isfinite().all()


def test_what_needs_a_family_of_ours_is_refused(glm, tmp_path, prepared_path, refused):
    folder, _ = glm
    line = refused("convert", folder, tmp_path / "x", "--to", "safetensors")
    assert "not trained, converted" in line
    config = load_config(write_config(tmp_path / "c.yaml", prepared_path))
    model = TheirWeights(folder).model_config()
    with pytest.raises(ConfigError, match=r"model\.kind: transformers"):
        validate(config.model_copy(update={"model": model}), 1)
    with pytest.raises(WeightsError, match="evaluated and analysed, but not trained"):
        TheirWeights(folder).whole("x")


def test_a_mixture_that_does_not_fit_into_memory_is_refused(glm, refused):
    folder, data = glm
    with little_memory():
        assert "not block by block" in refused("evaluate", str(folder), "--data", str(data))


def test_a_model_in_memory_and_its_tokenizer(glm):
    folder, data = glm
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    run, stored = polyad.load(theirs, tokenizer=tokenizer), polyad.load(folder)
    assert run.evaluate(data)["loss"] == pytest.approx(stored.evaluate(data)["loss"], rel=1e-6)
    assert run.generate("def ", max_tokens=4, temperature=0) == stored.generate(
        "def ", max_tokens=4, temperature=0
    )
    before = logits_of(run.model)
    with run.intervened("layer=1,expert=2,how=prune"):
        assert not torch.equal(logits_of(run.model), before)
    assert torch.equal(logits_of(run.model), before)


def test_a_name_of_the_hub_that_is_not_reached_says_what_to_type(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(WeightsError, match="`hf download someone/something --local-dir something`"):
        polyad.load("someone/something")


def test_a_type_that_nobody_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing_of_the_kind"}')
    with pytest.raises(WeightsError, match="nothing_of_the_kind"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(WeightsError, match="no experts that transformers calls"):
        load_model(tmp_path)
