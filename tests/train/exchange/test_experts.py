"""A dense model with copied experts or with groups of units computes what it computed, and trains;
groups are made dense again, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM

from polyad.launch.cli import run as polyad
from polyad.model.build import build_model, initial_value, initial_values, read_model_config
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.change import Merging, Splitting, Upcycling
from polyad.train.exchange.convert import conversion_table, convert
from tests.helpers.bert import padded_input, their_bert
from tests.helpers.decoders import hub_folder, theirs, tokens
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_tensors
from tests.helpers.reference import save_reference
from tests.helpers.runs import newest, records, run, weights_of, write_config

TEXT = {
    "kind": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip
IMAGES = {"num_layers": 2, "hidden_size": 32, "image_size": 16, "patch_size": 4, "num_classes": 7}


def write_weights(folder: Path, section: dict[str, Any], spread: float = 0.1) -> Path:
    """Writes config.yaml and model.safetensors, with noise of this deviation added to all
    weights."""
    config = read_model_config(section)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: value + spread * torch.randn(value.shape, generator=generator)
        for name, value in initial_values(build_model(config), 3)
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": config.model_dump(mode="json")}))
    return folder


@torch.no_grad()
def logits_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
    """A model's logits for random input of its kind, of a BERT those of no padding."""
    generator, given = torch.Generator().manual_seed(1), padded_input()
    kind = model.config.kind
    if kind in ("gpt2", "decoder"):
        given = (torch.randint(model.config.vocab_size, (3, 32), generator=generator),)
    elif kind != "bert":
        given = (torch.randn(3, 3, 16, 16, generator=generator, dtype=dtype),)
    logits: Tensor = model.to(dtype)(*given).logits
    return logits[padded_input()[1]] if kind == "bert" else logits


MODELS = {
    "gpt2": TEXT,
    "no-bias": TEXT | {"bias": False, "feed_forward": {"hidden_size": 48}},
    "relu": TEXT | {"kind": "decoder", "activation": "relu", "feed_forward": {"hidden_size": 48}},
    "vit": IMAGES | {"kind": "vit", "num_layers": 4, "num_heads": 4},
    "mixer": IMAGES | {"kind": "mixer", "num_layers": 4, "token_feed_forward": {"hidden_size": 24}},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Dense models by name, their weights and biases far from initial values."""
    folder = tmp_path_factory.mktemp("dense")
    for name, section in MODELS.items():
        write_weights(folder / name, section)
    convert(folder / "gpt2", folder / "checkpoint", "polyad")
    save_reference(folder / "huggingface", n_layer=4, n_inner=80, shard_size="20KB")
    their_bert("BertForMaskedLM").save_pretrained(folder / "bert")
    hub_folder(folder / "llama", "llama")
    return folder


def assert_equal_weights(folder, other):
    assert_equal_tensors(*(load_model(path).state_dict() for path in (folder, other)))


SPLIT = [
    ("gpt2", "num_experts=16,top_k=16"),
    ("gpt2", "num_experts=8,top_k=8,blocks=[0,3],by=random"),
    ("no-bias", "num_experts=4,top_k=4,blocks=2"),
    ("huggingface", "num_experts=8,top_k=8,blocks=[2]"),
    ("vit", "num_experts=16,top_k=16,blocks=[1,3]"),
    ("mixer", "num_experts=16,top_k=16"),
    ("mixer", "num_experts=6,top_k=6,section=token_feed_forward,blocks=[3]"),
    ("bert", "num_experts=8,top_k=8,blocks=[1]"),
    ("llama", "num_experts=4,top_k=4"),
    ("llama", "num_experts=6,top_k=6,by=random,blocks=[1]"),
]


@everyday(("source", "text"), SPLIT, keep=[SPLIT[1], SPLIT[3], SPLIT[6], SPLIT[7], SPLIT[9]])
def test_all_groups_give_the_dense_logits_and_merged_weights_are_bitwise_the_dense_ones(
    sources, tmp_path, source, text
):
    result = convert(sources / source, tmp_path / "split", "polyad", Splitting(text))
    assert "its outputs equal the dense model's, up to rounding" in result["notes"]
    dense, model = load_model(sources / source), load_model(tmp_path / "split")
    assert result["parameters"] == sum(p.numel() for p in dense.parameters())
    torch.testing.assert_close(logits_of(model), logits_of(dense), atol=1e-10, rtol=0)
    single = (logits_of(each, torch.float32) for each in (model, dense))
    torch.testing.assert_close(*single, atol=1e-5, rtol=1e-5)
    merged = convert(tmp_path / "split", tmp_path / "merged", "safetensors", Merging())
    assert "every token uses all units again, as in the dense model" in merged["notes"]
    assert_equal_weights(tmp_path / "merged", sources / source)


def test_a_mixer_is_split_twice(sources, tmp_path):
    first = Splitting("num_experts=6,top_k=6,section=token_feed_forward,by=random")
    convert(sources / "mixer", tmp_path / "one", "safetensors", first)
    convert(tmp_path / "one", tmp_path / "two", "polyad", Splitting("num_experts=8,top_k=8"))
    one, two = (load_model(tmp_path / name).state_dict() for name in ("one", "two"))
    for name in (f"blocks.{block}.token_feed_forward.unit" for block in range(4)):
        assert torch.equal(one[name], two[name])
    convert(tmp_path / "two", tmp_path / "merged", "safetensors", merge=True)
    assert_equal_weights(tmp_path / "merged", sources / "mixer")


def test_groups_are_those_of_directions_or_of_the_seed_for_each_block_on_its_own(sources, tmp_path):
    spread = {}
    for by in ("clustering", "random"):
        units = {}
        for name, seed in (("one", 6), ("same", 6), ("other", 7)):
            text = f"num_experts=16,top_k=4,blocks=[0,2],by={by},seed={seed}"
            result = convert(sources / "gpt2", tmp_path / f"{by}-{name}", "polyad", Splitting(text))
            assert "its outputs differ from the dense model's" in result["notes"]
            checkpoint = Checkpoint(tmp_path / f"{by}-{name}")
            units[name] = [checkpoint.buffer(f"blocks.{n}.feed_forward.unit") for n in (0, 2)]
        assert all(map(torch.equal, units["one"], units["same"]))
        assert not torch.equal(units["one"][0], units["other"][0])
        assert not torch.equal(*units["one"])
        keys_EFD = checkpoint.whole("blocks.2.feed_forward.experts.keys")
        directions_EFD = normalize(keys_EFD.double(), dim=-1)
        spread[by] = (directions_EFD - directions_EFD.mean(1, keepdim=True)).square().sum().item()
    assert spread["clustering"] < 0.9 * spread["random"]


def test_a_split_model_goes_through_safetensors_and_a_merged_one_to_transformers(
    sources, tmp_path, capfd
):
    plain, text = str(tmp_path / "plain"), "num_experts=8,top_k=4,blocks=[1]"
    words = ["convert", str(sources / "huggingface"), plain, "--to", "safetensors"]
    assert polyad([*words, "--split", text]) == 0
    assert polyad(["convert", plain, str(tmp_path / "split"), "--to", "polyad"]) == 0
    assert_equal_weights(tmp_path / "split", tmp_path / "plain")
    capfd.readouterr()
    words = ["convert", plain, str(tmp_path / "back"), "--to", "huggingface"]
    assert polyad([*words, "--merge", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["format"] == "huggingface"
    assert_equal_weights(tmp_path / "back", sources / "huggingface")


UPCYCLE = [
    ("gpt2", "num_experts=4"),
    ("gpt2", "num_experts=4,top_k=4,placement=2,score=cosine"),
    ("checkpoint", "num_experts=4,top_k=3,graph=attention,placement=[0,3],balancing_rate=0.01"),
    ("checkpoint", "num_experts=3,top_k=2,graph=similarity,similarity=cosine"),
    ("no-bias", "num_experts=8,score=random,graph=attention"),
    ("huggingface", "num_experts=5,top_k=5,placement=2,graph=similarity"),
    ("huggingface", "num_experts=4,placement=[1,2],graph=attention,final_top_k=4"),
    ("vit", "num_experts=4,top_k=2,score=cosine,placement=[1,3]"),
    ("bert", "num_experts=4,top_k=2,graph=similarity"),
    ("relu", "num_experts=4,score=cosine"),
    ("llama", "num_experts=3,top_k=3,placement=[1]"),
]


@everyday(("source", "text"), UPCYCLE, keep=[*UPCYCLE[1:4], UPCYCLE[7], *UPCYCLE[9:]])
def test_copied_experts_give_the_dense_logits(sources, tmp_path, source, text):
    result = convert(sources / source, tmp_path / "new", "polyad", Upcycling(text))
    assert "its initial logits equal the dense model's, up to rounding" in result["notes"]
    model, dense = load_model(tmp_path / "new"), load_model(sources / source)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    routing = [block.feed_forward for block in model.blocks if block.feed_forward.gate_columns()]
    config = model.config.feed_forward
    assert len(routing) == sum(config.routes(n) for n in range(len(model.blocks))) > 0
    # In fp32 experts are grouped products, in fp64 a loop.
    single = (logits_of(each, torch.float32) for each in (model, dense))
    torch.testing.assert_close(*single, atol=1e-5, rtol=1e-5)
    expected = logits_of(dense)
    torch.testing.assert_close(logits_of(model), expected, atol=1e-10, rtol=0)
    # Whoever is chosen: with other routers, and however far top_k has grown.
    generator = torch.Generator().manual_seed(2)
    for layer in routing:
        for tensor in (*layer.router.score.parameters(), *layer.router.score.buffers()):
            tensor.data += torch.randn(tensor.shape, generator=generator).abs()
        layer.router.selection.update(torch.rand(config.num_experts, generator=generator), 0.7)
    torch.testing.assert_close(logits_of(model), expected, atol=1e-10, rtol=0)


# What the family has and its mixture has not.
UNUSUAL = {
    "qwen3": ("qwen3_moe", {"use_sliding_window": False}),
    "llama": ("mixtral", {"attention_bias": False, "mlp_bias": False}),
}


@everyday("family", UNUSUAL, keep=["qwen3"])
def test_an_upcycled_decoder_is_a_mixture_of_transformers(tmp_path, family):
    sparse, settings = UNUSUAL[family]
    theirs(family, **settings).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "new", "polyad", Upcycling("num_experts=4,top_k=2"))
    convert(tmp_path / "new", tmp_path / "out", "huggingface")
    model, dense = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("out", "dense")
    )
    assert model.config.model_type == sparse
    with torch.no_grad():
        logits, expected = (each(tokens()).logits for each in (model, dense))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("score=random,graph=attention,final_top_k=3",
         {"score.weight", "graph.head_entropy", "selection.num_selected"}),
        ("score=cosine", {"score.projection", "score.embedding", "score.temperature"}),
    ],
)  # fmt: skip
def test_a_router_starts_as_in_a_new_run_of_the_seed(sources, tmp_path, keys, names):
    change = Upcycling(f"num_experts=4,{keys},seed=6")
    convert(sources / "gpt2", tmp_path / "new", "polyad", change)
    model = load_model(tmp_path / "new")
    state = {name: value for name, value in model.state_dict().items() if ".router." in name}
    assert {name.partition("router.")[2] for name in state} == names
    fresh = build_model(model.config)
    for name, value in state.items():
        assert torch.equal(value, initial_value(fresh, name, 6)), name
    assert any(not torch.equal(each, initial_value(fresh, n, 7)) for n, each in state.items())


def test_noise_is_added_to_the_experts_weights_and_is_seeded(sources, tmp_path):
    def weights(folder, more):
        text = f"num_experts=4,placement=2{more}"
        convert(sources / "gpt2", tmp_path / folder, "polyad", Upcycling(text))
        return weights_of(tmp_path / folder)

    exact, noisy = weights("exact", ""), weights("noisy", ",noise=1e-2")
    again, other = weights("again", ",noise=0.01"), weights("other", ",noise=0.01,seed=2")
    for name, value in exact.items():
        assert torch.equal(again[name], noisy[name]), name
        if not name.endswith(("experts.up", "experts.down")):
            assert torch.equal(noisy[name], value), name
            continue
        assert not torch.equal(other[name], noisy[name]), name
        added = (noisy[name] - value).std().item()
        assert added == pytest.approx(0.01 * value[0].std().item(), rel=0.05)


@pytest.mark.parametrize(
    ("more", "at_least"),
    [("top_k=1", 1e-2), ("combine=scores", 1e-2), ("noise=0.5", 1e-2), ("activation=relu", 1e-3)],
)
def test_a_note_says_where_logits_differ_and_they_do(sources, tmp_path, more, at_least):
    upcycling = Upcycling(f"num_experts=4,{more}")
    result = convert(sources / "gpt2", tmp_path / "new", "polyad", upcycling)
    note = "its initial logits differ from the dense model's"
    assert f"note         {note}" in conversion_table(result)
    difference = logits_of(load_model(tmp_path / "new")) - logits_of(load_model(sources / "gpt2"))
    assert difference.abs().max() > at_least


def test_a_checkpoint_says_what_it_was_made_of(sources, tmp_path):
    text = "num_experts=4,top_k=2"
    words = ["convert", str(sources / "checkpoint"), str(tmp_path / "new"), "--to", "polyad"]
    assert polyad([*words, "--upcycle", text]) == 0
    state = Checkpoint(tmp_path / "new").state
    assert (state.upcycled, state.converted_from) == (text, str(sources / "checkpoint"))


def test_what_is_not_dense_cannot_be_split_and_what_is_not_split_cannot_be_merged(
    sources, tmp_path, refused
):
    def line_of(source, *words):
        line = refused("convert", source, tmp_path / "new", "--to", "polyad", *words)
        assert not (tmp_path / "new").exists()
        return line

    split = ("--split", "num_experts=8,top_k=4")
    convert(sources / "gpt2", tmp_path / "emoe", "polyad", Splitting(split[1]))
    convert(sources / "gpt2", tmp_path / "smoe", "polyad", Upcycling("num_experts=4"))
    for kind in ("emoe", "smoe"):
        expected = f"{tmp_path / kind}: model.feed_forward.kind: {kind!r} is not allowed: a dense"
        for change in (split, ("--upcycle", "num_experts=4")):
            assert expected in line_of(tmp_path / kind, *change)
    assert "--merge" in line_of(tmp_path / "smoe", "--merge")
    assert "--merge" in line_of(sources / "gpt2", "--merge")
    assert "--merge" in line_of(sources / "gpt2", "--merge", *split)
    damaged = shutil.copytree(sources / "gpt2", tmp_path / "nan")
    weights = load_file(damaged / "model.safetensors")
    weights["blocks.1.feed_forward.up.weight"].view(-1)[3] = torch.nan
    save_file(weights, damaged / "model.safetensors")
    assert "NaN or infinity in blocks.1.feed_forward.up.weight" in line_of(damaged, *split)
    words = ["convert", str(damaged), str(tmp_path / "new"), "--to", "polyad"]
    assert polyad([*words, "--split", f"{split[1]},by=random"]) == 0


CHANGES = {
    "split": (Splitting("num_experts=16,top_k=16,blocks=[0,1]"), {"parallel__zero_stage": 3}),
    "copies": (
        Upcycling("num_experts=4,top_k=2,graph=attention"),
        {"parallel__expert_parallel_size": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_from_the_dense_loss(workers, trained, tmp_path, prepared_path, name):
    change, layout = CHANGES[name]
    assert convert(trained("dense"), tmp_path / "start", "polyad", change)["tokenizer"]
    section = yaml.safe_load((tmp_path / "start" / "config.yaml").read_text())["model"]

    def losses(folder, source, **changes):
        config = write_config(
            folder / "config.yaml", prepared_path, checkpoint__init_from=str(source),
            optimizer__kind="sgd", evaluation__every=0, **changes,
        )  # fmt: skip
        assert workers(2).run(run, config) == [6, 6]
        return [line["loss"] for line in records(folder / "run")]

    dense = losses(tmp_path / "dense", trained("dense"))
    new = tmp_path / "new"
    changed = losses(new, tmp_path / "start", model__feed_forward=section["feed_forward"], **layout)
    assert changed[0] == pytest.approx(dense[0], abs=1e-5)
    if name == "copies":
        assert changed == pytest.approx(dense, abs=0.1)  # on the same batches
        # Each expert saw tokens of its own, and is a copy no longer.
        up_EDF = weights_of(newest(new / "run"))["blocks.1.feed_forward.experts.up"]
        assert not any(torch.equal(up_EDF[0], other_DF) for other_DF in up_EDF[1:])
        return
    # With all groups it is merged to what the dense model is tuned to.
    assert changed == pytest.approx(dense, rel=1e-5)
    convert(new / "run", tmp_path / "merged", "polyad", Merging())
    expected = weights_of(newest(tmp_path / "dense" / "run"))
    torch.testing.assert_close(weights_of(tmp_path / "merged"), expected, atol=2e-6, rtol=1e-5)
    before = weights_of(newest(trained("dense")))
    assert not any(torch.equal(before[name], expected[name]) for name in before if "up" in name)


NO_UPCYCLING = [
    ("top_k=2", "num_experts "),
    ("num_experts=8,top_j=2", "model.feed_forward.top_j; the nearest is model.feed_forward.top_k"),
    ("num_experts=8,kind=smoe", "kind "),
    ("num_experts=8,top_k", "top_k: "),
    ("", "key=value"),
    ("num_experts=8,num_experts=9", "num_experts "),
    ("num_experts=8,placement=[1", "placement=[1: "),
    ("num_experts=8,top_k=9", "model.feed_forward.top_k: 9 "),
    ("num_experts=1", "model.feed_forward.num_experts: 1 "),
    ("num_experts=8,placement=[1,4]", "placement: [1, 4] "),
    ("num_experts=8,expert_hidden_size=64", "model.feed_forward.expert_hidden_size: 64 "),
    ("num_experts=8,placement=2,dense_hidden_size=127", "feed_forward.dense_hidden_size: 127 "),
    ("num_experts=8,capacity_factor=1.0", "allowed: null"),
    ("num_experts=8,noise=-0.1", "noise: -0.1 "),
    ("num_experts=8,noise=.nan", "noise: nan "),
    ("num_experts=8,seed=1.5", "seed: 1.5 "),
    ("num_experts=9000000000000000000", "more elements than a tensor can have"),
    ("num_experts=100000000000", " bytes, "),
]
NO_SPLIT = [
    ("top_k=2", "num_experts "),
    ("num_experts=8,blcks=2", "model.feed_forward.blcks; the nearest is model.feed_forward.blocks"),
    ("num_experts=8,by=kmeans", "by: 'kmeans' "),
    ("num_experts=7,top_k=2", "model.feed_forward.num_experts: 7 "),
    ("num_experts=8,blocks=[1,4]", "model.feed_forward.blocks: [1, 4] "),
    ("num_experts=8,hidden_size=64", "model.feed_forward.hidden_size: 64"),
    ("num_experts=8,seed=-1", "seed: -1 "),
    ("num_experts=8,section=mlp", "section: 'mlp' "),
    ("num_experts=8,capacity_factor=1.5", "allowed: null"),
]
REFUSED = [("--upcycle", *case) for case in NO_UPCYCLING]
REFUSED += [("--split", *case) for case in NO_SPLIT]


@pytest.mark.parametrize(("option", "text", "key"), REFUSED)
def test_what_does_not_make_sense_is_one_line_and_leaves_nothing(
    sources, tmp_path, refused, option, text, key
):
    line = refused(
        "convert", sources / "gpt2", tmp_path / "new", "--to", "polyad", f"{option}={text}"
    )
    assert f"{option} {text}: " in line
    assert key in line
    assert list(tmp_path.iterdir()) == []
