"""Sparse upcycling: what a dense model becomes computes what it computed, and trains."""

import json

import pytest
import torch
import yaml

from polyad.launch.cli import run as polyad
from polyad.model.build import build_model, initial_value
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import conversion_table, convert
from polyad.train.exchange.experts import Upcycling
from tests.helpers.decoders import theirs
from tests.helpers.dense import logits_of, write_weights
from tests.helpers.everyday import everyday
from tests.helpers.huggingface import save_reference
from tests.helpers.runs import records, run, write_config

DENSE = {
    "kind": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip


# What the family has and its mixture has not.
UNUSUAL = {
    "qwen3": {"use_sliding_window": False},
    "llama": {"attention_bias": False, "mlp_bias": False},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Dense models by name: a folder of safetensors, checkpoints, one of transformers."""
    folder = tmp_path_factory.mktemp("dense")
    write_weights(folder / "plain", DENSE)
    write_weights(folder / "no-bias", DENSE | {"bias": False, "feed_forward": {"hidden_size": 48}})
    for name, source in {"checkpoint": "plain", "no-bias-checkpoint": "no-bias"}.items():
        convert(folder / source, folder / name, "polyad")
    save_reference(folder / "huggingface", n_layer=4, n_inner=80, shard_size="20KB")
    return folder


CASES = [
    ("plain", "num_experts=4"),
    ("plain", "num_experts=4,top_k=4,placement=2,score=cosine"),
    ("checkpoint", "num_experts=4,top_k=3,graph=attention,placement=[0,3],balancing_rate=0.01"),
    ("checkpoint", "num_experts=3,top_k=2,graph=similarity,similarity=cosine"),
    ("no-bias", "num_experts=8,score=random,graph=attention"),
    ("no-bias-checkpoint", "num_experts=2,top_k=2,placement=[1]"),
    ("huggingface", "num_experts=4"),
    ("huggingface", "num_experts=5,top_k=5,placement=2,graph=similarity"),
    ("huggingface", "num_experts=4,placement=[1,2],graph=attention,final_top_k=4"),
]


@everyday(("source", "text"), CASES, keep=CASES[1:4])
def test_copied_experts_give_the_dense_logits(sources, tmp_path, source, text):
    result = convert(sources / source, tmp_path / "new", "polyad", Upcycling(text))
    assert "its initial logits equal the dense model's, up to rounding" in result["notes"]
    model = load_model(tmp_path / "new")
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    routing = [block.feed_forward for block in model.blocks if block.feed_forward.gate_columns()]
    config = model.config.feed_forward
    assert len(routing) == sum(config.routes(block) for block in range(4)) > 0
    dense = logits_of(load_model(sources / source))
    torch.testing.assert_close(logits_of(model), dense, atol=1e-10, rtol=0)
    # Whoever is chosen: with other routers, and however far top_k has grown.
    generator = torch.Generator().manual_seed(2)
    for layer in routing:
        for tensor in (*layer.router.score.parameters(), *layer.router.score.buffers()):
            tensor.data += torch.randn(tensor.shape, generator=generator).abs()
        layer.router.selection.update(torch.rand(config.num_experts, generator=generator), 0.7)
    torch.testing.assert_close(logits_of(model), dense, atol=1e-10, rtol=0)


@everyday("family", ["llama", "qwen3"], keep=["qwen3"])
def test_feed_forwards_with_a_gate_are_copied_whole(tmp_path, family):
    theirs(family).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "plain", "polyad")
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))

    def logits(folder):
        with torch.no_grad():
            return load_model(folder).double().eval()(ids).logits

    for number, text in enumerate(("num_experts=4", "num_experts=3,top_k=3,placement=[1]")):
        new = tmp_path / f"new{number}"
        result = convert(tmp_path / "dense", new, "polyad", Upcycling(text))
        assert "its initial logits equal the dense model's, up to rounding" in result["notes"]
        torch.testing.assert_close(logits(new), logits(tmp_path / "plain"), atol=1e-12, rtol=0)
    experts = load_model(tmp_path / "new0").blocks[0].feed_forward.experts
    dense = load_model(tmp_path / "plain").blocks[0].feed_forward
    for name in ("gate", "up", "down"):
        for expert in getattr(experts, name):
            assert torch.equal(expert.T, getattr(dense, name).weight)


@everyday(
    ("dense", "sparse"), [("qwen3", "qwen3_moe"), ("llama", "mixtral")], [("qwen3", "qwen3_moe")]
)
def test_an_upcycled_decoder_is_a_mixture_of_transformers(tmp_path, dense, sparse):
    theirs(dense, **UNUSUAL[dense]).save_pretrained(tmp_path / "dense")
    upcycling = Upcycling("num_experts=4,top_k=2")
    convert(tmp_path / "dense", tmp_path / "new", "polyad", upcycling)
    convert(tmp_path / "new", tmp_path / "out", "huggingface")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.model_type == sparse
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=2e-4, rtol=0)


def test_a_dense_decoder_with_relu_becomes_experts_with_relu(tmp_path):
    dense = {
        "kind": "decoder", "num_layers": 2, "hidden_size": 32, "num_heads": 4,
        "sequence_length": 32, "vocab_size": 400, "activation": "relu",
        "feed_forward": {"kind": "dense", "hidden_size": 48},
    }  # fmt: skip
    write_weights(tmp_path / "dense", dense)
    text = "num_experts=4,score=cosine"
    convert(tmp_path / "dense", tmp_path / "new", "polyad", Upcycling(text))
    model = load_model(tmp_path / "new")
    assert model.config.feed_forward.activation == "relu"
    ids = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, dense = (
            load_model(tmp_path / name).double().eval()(ids).logits for name in ("new", "dense")
        )
    torch.testing.assert_close(ours, dense, atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="score"):
        convert(tmp_path / "new", tmp_path / "out", "huggingface")


def test_a_router_starts_as_in_a_new_run_of_the_seed(sources, tmp_path):
    text = "num_experts=4,score=random,graph=attention,final_top_k=3,seed=6"
    convert(sources / "plain", tmp_path / "new", "polyad", Upcycling(text))
    upcycled = Checkpoint(tmp_path / "new")
    fresh = build_model(upcycled.model_config())
    buffers = {name for name, fields in upcycled.tensors.items() if "buffer" in fields}
    assert {name.partition("router.")[2] for name in buffers} == {
        "score.weight", "graph.head_entropy", "selection.num_selected",
    }  # fmt: skip
    for name in buffers:
        assert torch.equal(upcycled.buffer(name), initial_value(fresh, name, 6)), name
    text = "num_experts=4,score=cosine,seed=6"
    convert(sources / "plain", tmp_path / "cosine", "polyad", Upcycling(text))
    name, upcycled = (
        "blocks.1.feed_forward.router.score.projection",
        Checkpoint(tmp_path / "cosine"),
    )
    fresh = build_model(upcycled.model_config())
    assert torch.equal(upcycled.whole(name), initial_value(fresh, name, 6))
    assert not torch.equal(upcycled.whole(name), initial_value(fresh, name, 7))


def test_noise_is_added_to_the_experts_weights_and_is_seeded(sources, tmp_path):
    def weights(folder, text):
        convert(sources / "plain", tmp_path / folder, "polyad", Upcycling(text))
        checkpoint = Checkpoint(tmp_path / folder)
        return {name: checkpoint.whole(name) for name in checkpoint.shapes()}

    exact = weights("exact", "num_experts=4,placement=2")
    noisy = weights("noisy", "num_experts=4,placement=2,noise=1e-2")
    again = weights("again", "num_experts=4,placement=2,noise=0.01")
    other = weights("other", "num_experts=4,placement=2,noise=0.01,seed=2")
    for name, value in exact.items():
        assert torch.equal(again[name], noisy[name]), name
        if not name.endswith(("experts.up", "experts.down")):
            assert torch.equal(noisy[name], value), name
            continue
        assert not torch.equal(other[name], noisy[name]), name
        added = (noisy[name] - value).std().item()
        assert added == pytest.approx(0.01 * value[0].std().item(), rel=0.05)
    logits = [logits_of(load_model(tmp_path / folder)) for folder in ("exact", "noisy")]
    assert 1e-4 < (logits[0] - logits[1]).abs().max() < 1


@pytest.mark.parametrize(
    "text", ["num_experts=4,top_k=1", "num_experts=4,combine=softmax", "num_experts=4,noise=0.5"]
)
def test_a_note_says_where_logits_differ_and_they_do(sources, tmp_path, text):
    result = convert(sources / "plain", tmp_path / "new", "polyad", Upcycling(text))
    note = "its initial logits differ from the dense model's"
    assert note in result["notes"]
    assert f"note         {note}" in conversion_table(result)
    difference = logits_of(load_model(tmp_path / "new")) - logits_of(load_model(sources / "plain"))
    assert difference.abs().max() > 1e-2


def test_the_command_says_what_it_made_and_safetensors_are_possible(sources, tmp_path, capfd):
    text = "num_experts=4,top_k=2"
    command = ["convert", str(sources / "checkpoint"), str(tmp_path / "new"), "--upcycle", text]
    assert polyad([*command, "--to", "polyad", "--json", "-"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["format"] == "polyad"
    state = Checkpoint(tmp_path / "new").state
    assert state.upcycled == text
    assert state.converted_from == str(sources / "checkpoint")
    command[1:3] = [str(sources / "plain"), str(tmp_path / "weights")]
    assert polyad([*command, "--to", "safetensors"]) == 0
    direct, plain = load_model(tmp_path / "new"), load_model(tmp_path / "weights")
    assert torch.equal(logits_of(plain), logits_of(direct))


def test_sources_and_formats_that_are_none_are_one_line(sources, tmp_path, capfd):
    def refused(source, to):
        command = ["convert", str(source), str(tmp_path / "new"), "--to", to]
        assert polyad([*command, "--upcycle", "num_experts=4"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert not (tmp_path / "new").exists()
        return line

    for name in ("plain", "checkpoint", "huggingface"):
        line = refused(sources / name, "huggingface")
        assert "smoe" in line
    convert(sources / "plain", tmp_path / "sparse", "polyad", Upcycling("num_experts=4"))
    capfd.readouterr()
    line = refused(tmp_path / "sparse", "polyad")
    assert f"{tmp_path / 'sparse'}: model.feed_forward.kind: 'smoe' is not allowed" in line
    assert "no such folder" in refused(tmp_path / "none", "polyad")


@pytest.fixture(scope="module")
def upcycled(trained, tmp_path_factory):
    """A trained dense run, with its tokenizer, as a sparse mixture."""
    folder = tmp_path_factory.mktemp("upcycled") / "start"
    text = "num_experts=4,top_k=2,graph=attention"
    assert convert(trained("dense"), folder, "polyad", Upcycling(text))["tokenizer"]
    return folder


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_with_experts_over_processes_goes_on_from_the_dense_loss(
    workers, trained, upcycled, tmp_path, prepared_path
):
    def losses(name, source, steps, **changes):
        (tmp_path / name).mkdir()
        config = write_config(
            tmp_path / name / "config.yaml", prepared_path, checkpoint__init_from=str(source),
            train__steps=steps, evaluation__every=0, **changes,
        )  # fmt: skip
        assert workers(2).run(run, config) == [steps, steps]
        return [line["loss"] for line in records(tmp_path / name / "run")]

    dense = losses("dense", trained("dense"), 4)
    section = yaml.safe_load((upcycled / "config.yaml").read_text())["model"]["feed_forward"]
    sparse = losses(
        "sparse", upcycled, 4, model__feed_forward=section,
        parallel__expert_parallel_size=2, parallel__zero_stage=1,
    )  # fmt: skip
    assert sparse[0] == pytest.approx(dense[0], abs=1e-5)
    assert sparse == pytest.approx(dense, abs=0.1)  # on the same batches
    # Each expert saw tokens of its own, and is a copy no longer.
    (newest,) = (tmp_path / "sparse" / "run" / "checkpoints").glob("step-00000004")
    up_EDF = Checkpoint(newest).whole("blocks.1.feed_forward.experts.up")
    assert all((up_EDF[0] - other_DF).abs().max() > 1e-4 for other_DF in up_EDF[1:])
