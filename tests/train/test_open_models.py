"""Folders as the hub has them, used as they are: with every command, and as transformers does."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import polyad
from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as command
from polyad.model.build import read_model_config
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_model
from polyad.parallel.families import FamilyWeights
from polyad.train.config.run import load_config
from polyad.train.describe import inspect
from polyad.train.errors import ConfigError
from polyad.train.evaluation.generate import Sampling
from polyad.train.exchange.convert import convert
from tests.helpers import sequences
from tests.helpers.decoders import (
    IDS,
    ROUTED,
    WORDS,
    commands_on,
    hub_folder,
    hub_with_text,
    theirs,
    tokens,
)
from tests.helpers.everyday import everyday
from tests.helpers.generated import generated
from tests.helpers.runs import compare, evaluation, records, run, write_config

pytestmark = pytest.mark.distributed

FAMILIES = ["olmoe", "deepseek_v3", "gpt_oss", "qwen3_moe", "granitemoeshared"]


@torch.no_grad()
def loss_by_transformers(model, data, length, stride, not_scored=-1):
    """The mean loss of the validation split in windows, one after the other; and of how many tokens
    it is."""
    stream = PreparedData.open(data).split("validation")
    info = PreparedData.open(data).manifest.tokenizer
    tokens = torch.from_numpy(stream.read(0, stream.num_tokens)).long()
    tokens = torch.cat([torch.tensor([info.end_of_text_id]), tokens])
    total, scored, start, count = 0.0, 0, 0, 0
    while scored < len(tokens) - 1:
        window = tokens[start : start + length + 1]
        logits = model(window[None, :-1], use_cache=False).logits[0].double()
        losses = cross_entropy(logits, window[1:], reduction="none")
        new = start + len(losses) - scored
        counts = window[-new:] != not_scored
        total, count = total + losses[-new:][counts].sum().item(), count + int(counts.sum())
        scored, start = scored + new, start + stride
    return total / count, count


@everyday("case", [*FAMILIES, "mixtral", "qwen2_moe", "llama 3"], keep=["olmoe", "gpt_oss"])
@everyday(("length", "stride"), [(64, 20), (16, 16)], keep=[(64, 20)])
def test_perplexity_is_that_of_transformers(case, length, stride, tmp_path):
    model, data = hub_with_text(tmp_path, case)
    overrides = f"evaluation.stride={stride}", f"model.sequence_length={length}"
    found = evaluation(tmp_path / "hub", data=str(data), overrides=overrides)
    loss, scored = loss_by_transformers(model, data, length, stride)
    assert found["tokens_scored"] == scored > 200
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


@everyday("case", FAMILIES, keep=["deepseek_v3"])
def test_commands_take_a_folder_as_it_is(case, tmp_path, capfd):
    folder, (_, data) = tmp_path / "hub", hub_with_text(tmp_path, case)
    for words in commands_on(folder, str(data), inspect(folder)["routed_blocks"][-1]):
        told = tmp_path / "told.json"
        assert command([*map(str, words), "--json", str(told)]) == 0, capfd.readouterr().err
        assert json.loads(told.read_text())
    page = (folder / "report.html").read_text()
    assert "Training" not in page
    assert "step 0" not in page
    found = polyad.load(folder).experts("def number_1(x)")
    assert len(found.layers) == len(found.table()) / len(found.tokens) / 2


def trained_further(case, tmp_path, **changes):
    """A configuration that trains a folder of the hub for two steps; and its data."""
    _, data = hub_with_text(tmp_path, case)
    model = FamilyWeights(tmp_path / "hub").config.model_dump(mode="json")
    start = {"checkpoint__init_from": str(tmp_path / "hub"), "train__steps": 2, "model": model}
    return write_config(tmp_path / "config.yaml", data, **start | changes), data


@everyday("case", [*FAMILIES, "llama yarn"], keep=["olmoe"])
def test_a_trained_model_goes_back_to_its_family(case, workers, tmp_path):
    folder, back = tmp_path / "hub", tmp_path / "back"
    pools = POOLS if case == "olmoe" else {}  # a matter of training alone
    config, data = trained_further(case, tmp_path, model__sequence_length=24, **pools)
    workers(1).run(run, config)
    workers(1).run(run, config, "train.steps=3")  # continues from its own checkpoint
    convert(tmp_path / "run", back, to="huggingface")
    before, after = (load_file(each / "model.safetensors") for each in (folder, back))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    for name in ("config.json", "tokenizer_config.json"):
        given, ours = (json.loads((each / name).read_text()) for each in (folder, back))
        assert ours == given
    ids = tokens(20)
    again = AutoModelForCausalLM.from_pretrained(back).eval()
    with torch.no_grad():
        wanted = polyad.load(tmp_path / "run").model(ids).logits
        found = again(ids, use_cache=False).logits
    assert (wanted - found).abs().max() < 1e-5
    assert wanted.abs().max() > 0.5
    if case in ROUTED:
        changed = compare(tmp_path / "run", folder, data=str(data), tokens=200)
        assert (changed["step"], changed["compared_step"]) == (3, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"feed_forward": {"graph": "similarity"}}, "model.feed_forward"),
        ({"head": {"kind": "classification", "num_classes": 2}}, "model.head"),
    ],
)
def test_another_model_is_not_written_as_its_family(change, why, tmp_path):
    theirs("mixtral").save_pretrained(tmp_path)
    section = FamilyWeights(tmp_path).config.model_dump(mode="json")
    for key, value in change.items():
        section[key] = (section[key] or {}) | value
    with pytest.raises(WeightsError, match=re.escape(why)):
        family_of_model(read_model_config(section))


POOLS = {"model__feed_forward__pool": "prefix", "model__feed_forward__pool_most": 4}
EVERYTHING = {
    "a graph of similar tokens": {"model__feed_forward__graph": "similarity"},
    "a graph of attention": {"model__feed_forward__graph": "attention"},
    "fluctuation": {"log__fluctuation": True, "evaluation__every": 1, "checkpoint__every": 1},
    "a teacher": {"checkpoint__init_from": None, "distill__teacher": "hub"},
    "classes": {"model__head": {"kind": "classification"}, "data__kind": "sequences"},
    "adapters of attention": {"adapt__lora": {"rank": 2, "targets": ["attention.*"]}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ["olmoe", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_what_there_is_for_experts_trains_a_published_mixture(name, case, workers, tmp_path):
    """Puts it onto a trained mixture, trains on, and reads the run with commands."""
    changes = {"model__sequence_length": 24} | EVERYTHING[name]
    if name == "a teacher":
        changes["distill__teacher"] = str(tmp_path / "hub")
    elif name == "classes":
        changes["data__path"] = str(sequences.folder_of(tmp_path / "rows"))
    config, _ = trained_further(case, tmp_path, **changes)
    if case == "deepseek_v3" and name == "a graph of attention":
        with pytest.raises(ConfigError, match="reads plain attention; allowed: none, similarity"):
            load_config(config, ())
        return
    workers(1).run(run, config)
    lines = records(tmp_path / "run")
    assert [each["step"] for each in lines if "loss" in each][-1] == 2
    assert math.isfinite(evaluation(tmp_path / "run")["loss"])
    assert command(["report", str(tmp_path / "run"), "--tokens", "64"]) == 0
    if name != "classes":
        assert command(["experts", "atlas", str(tmp_path / "run"), "--tokens", "64"]) == 0


def test_a_token_that_begins_documents_is_read_and_not_scored(tmp_path):
    folder = tmp_path / "hub"
    model, data = hub_with_text(tmp_path, "deepseek_v3", add_bos_token=True)
    split = PreparedData.open(data).manifest.splits["validation"]
    loss, scored = loss_by_transformers(model, data, 64, 64, not_scored=0)
    ours = polyad.load(folder)
    found = ours.evaluate(data)
    assert found["tokens_scored"] == scored == split.tokens - split.documents
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, add_bos_token=True)
    ids = theirs("def one(x)").input_ids
    assert ids[0] == 0
    assert ours.experts("def one(x)").token_ids.tolist() == ids
    for prompt, expected in (("def one(x)", ids), ("", [0])):
        assert generated(folder, prompt, max_tokens=2).prompt_ids == expected


def test_more_rows_than_ids_are_never_chosen_and_fewer_are_refused(tmp_path):
    folder, (_, data) = tmp_path / "hub", hub_with_text(tmp_path, "llama")
    found = generated(folder, "x", max_tokens=100, sampling=Sampling(temperature=50.0))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert max(found.token_ids) < IDS < rows
    theirs("llama").save_pretrained(folder)  # as many rows as `WORDS`
    with pytest.raises(ConfigError, match=f"vocab_size: {WORDS} is less than the {IDS} tokens"):
        polyad.load(folder).evaluate(data)
    with pytest.raises(ConfigError, match=f"the tokenizer has {IDS} tokens, the model {WORDS}"):
        generated(folder, "x", max_tokens=1)


@everyday(
    ("in_config", "in_generation", "ends_after"),
    [
        (3, None, 3),
        ([6, 3], None, 3),
        ([3], {}, None),  # generation_config.json alone counts where there is one
        (3, {"eos_token_id": None}, None),
        (3, {"eos_token_id": 6}, 6),
        (None, {"eos_token_id": [6, 3]}, 3),
        (None, None, None),
    ],
    keep=[([6, 3], None, 3), (3, {"eos_token_id": 6}, 6)],
)
def test_a_text_ends_where_transformers_ends_it(in_config, in_generation, ends_after, tmp_path):
    """Numbers are positions in the text that nothing ends, in place of ids."""
    folder, prompt = tmp_path / "hub", "def number_1(x)"
    model = hub_folder(folder, "llama", eos_token="<|endoftext|>")
    ids = torch.tensor([generated(folder, prompt, max_tokens=1).prompt_ids])

    def by_transformers(model):
        given = {"suppress_tokens": list(range(IDS, IDS + 20)), "do_sample": False}
        return model.generate(ids, max_new_tokens=9, **given)[0, ids.shape[1] :].tolist()

    model.generation_config.eos_token_id = None
    free = by_transformers(model)
    assert len({*free[:7]}) == 7

    def token(value):
        return [free[n] for n in value] if isinstance(value, list) else value and free[value]

    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": token(in_config)}
    (folder / "config.json").write_text(json.dumps(config))
    generation = folder / "generation_config.json"
    generation.unlink()
    if in_generation is not None:
        tree = {key: token(value) for key, value in in_generation.items()}
        generation.write_text(json.dumps(tree))
    wanted = free[:ends_after]
    end = [] if ends_after is None else [free[ends_after]]
    assert by_transformers(AutoModelForCausalLM.from_pretrained(folder).eval()) == wanted + end
    convert(folder, tmp_path / "ours", "polyad")
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    for place in (folder, tmp_path / "ours", tmp_path / "back"):
        ours = generated(place, prompt, max_tokens=9, sampling=Sampling(temperature=0))
        assert ours.token_ids == wanted, place
        text = polyad.load(place).generate(prompt, max_tokens=9, temperature=0)
        assert text == ours.text


@pytest.mark.parametrize("value", ["4", 1.5, True, [2, None], {"id": 4}, -1])
def test_a_token_that_ends_a_text_is_an_id(value, tmp_path):
    hub_folder(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"eos_token_id: .* is no token id"):
        generated(tmp_path, "def", max_tokens=1)


def test_a_run_takes_its_model_from_a_folder(workers, tmp_path):
    _, data = hub_with_text(tmp_path, "olmoe")
    shipped = Path("finetune/olmoe-1b-7b-lora")
    words = [
        f"model.from={tmp_path / 'hub'}",
        f"data.path={data}",
        f"run.folder={tmp_path / 'run'}",
    ]
    config, model = load_config(shipped, words), FamilyWeights(tmp_path / "hub").model_config()
    length = min(model.sequence_length, load_config(shipped).model.sequence_length)
    kept = {key: getattr(config.model, key) for key in ("dropout", "recompute", "compile")}
    assert config.model == model.model_copy(update=kept | {"sequence_length": length})
    assert config.checkpoint.init_from == str(tmp_path / "hub")
    assert load_config(shipped, [*words, "model.dropout=0.25"]).model.dropout == 0.25
    few = ("train.steps=2", "train.global_batch_size=2", "train.micro_batch_size=1",
           "model.sequence_length=16", "parallel.expert_parallel_size=1")  # fmt: skip
    assert workers(1).run(run, shipped, *words, *few) == [2]
    assert "adapt" in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"model\.from: .*no-such"):
        load_config(shipped, [f"model.from={tmp_path / 'no-such'}"])
