"""A dense model as the start of factorized experts: itself, or what numpy leaves of it."""

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from polyad.train.exchange.factorize import Factorizing
from tests.helpers import dense
from tests.helpers.bert import their_bert
from tests.helpers.decoders import theirs
from tests.helpers.dense import IMAGES, with_nan, write_weights
from tests.helpers.everyday import everyday
from tests.helpers.runs import evaluation, run, write_config

TEXT = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
        "vocab_size": 400}  # fmt: skip
MODELS = {
    "gpt2": {"kind": "gpt2"} | TEXT,
    "no-bias": {"kind": "gpt2", "bias": False, "feed_forward": {"hidden_size": 48}} | TEXT,
    "vit": {"kind": "vit", "num_heads": 4} | IMAGES,
    "mixer": {"kind": "mixer", "token_feed_forward": {"hidden_size": 24}} | IMAGES,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Dense models by name, their weights and biases far from initial values."""
    folder = tmp_path_factory.mktemp("dense")
    for name, section in MODELS.items():
        write_weights(folder / name, section)
    their_bert("BertForSequenceClassification").save_pretrained(folder / "bert")
    return folder


def logits_of(model):
    """In fp64; a GPT-2 has exact GELU, as factorized experts do."""
    if model.config.kind == "gpt2":
        for block in model.blocks:
            if hasattr(block.feed_forward, "activation"):
                block.feed_forward.activation = torch.nn.GELU()
    return dense.logits_of(model)


CASES = [
    ("gpt2", "num_experts=[8],rank=33"),
    ("gpt2", "factorization=tr,num_experts=[4,2],rank=9,gate=softmax,seed=4"),
    ("no-bias", "num_experts=8,rank=40,gate_input=normalized,noise=0"),
    ("vit", "num_experts=[8],rank=33,gate_norm=batch"),
    ("mixer", "factorization=tr,num_experts=[8],rank=17,expert_rank=2"),
    ("mixer", "num_experts=[8],rank=24,section=token_feed_forward"),
    ("bert", "factorization=tr,num_experts=[8],rank=12"),
]


@pytest.mark.parametrize(("source", "text"), CASES)
def test_with_enough_rank_it_computes_what_the_dense_model_does(sources, tmp_path, source, text):
    notes = convert(sources / source, tmp_path / "new", "polyad", Factorizing(text))["notes"]
    (note,) = (note for note in notes if "its initial outputs" in note)
    exact = "its initial outputs equal the dense model's, up to rounding"
    of_gpt2 = (
        "its initial outputs differ from the dense model's: experts use exact GELU, the dense "
        "layers gelu_tanh"
    )
    assert note == (of_gpt2 if source in ("gpt2", "no-bias") else exact)
    assert sum("the factors lose 0.00% of the matrix" in note for note in notes) == 4
    still = "noise is 0: all experts start equal and stay equal in training"
    assert (still in notes) == ("noise=0" in text)
    dense = logits_of(load_model(sources / source))
    model = load_model(tmp_path / "new")
    torch.testing.assert_close(logits_of(model), dense, rtol=1e-5, atol=1e-5)
    assert (dense - dense.mean()).abs().max() > 0.1
    # With equal experts for any gate.
    for block in model.blocks:
        for _, gate in (each for each in block.named_modules() if each[0].endswith("gate")):
            gate.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    close = torch.allclose(logits_of(model), dense, rtol=1e-5, atol=1e-5)
    assert close == ("noise=0" in text)


@pytest.mark.parametrize(
    "text", ["num_experts=[8],rank=13", "factorization=tr,num_experts=8,rank=3"]
)
def test_with_less_rank_it_computes_what_numpy_leaves_of_the_matrices(sources, tmp_path, text):
    notes = convert(sources / "vit", tmp_path / "new", "polyad", Factorizing(text))["notes"]
    rank = 13 if "rank=13" in text else 4 * 3
    said = (
        "its initial outputs differ from the dense model's: the matrices of up have rank "
        f"{rank} of 33; the matrices of down have rank {rank} of 32"
    )
    assert said in notes
    dense = load_model(sources / "vit")
    for block, layers in enumerate(dense.blocks):
        for which in ("up", "down"):
            layer = layers.feed_forward.get_submodule(which)
            with_bias = np.vstack([layer.weight.detach().T, layer.bias.detach()]).astype(float)
            u, values, v = np.linalg.svd(with_bias, full_matrices=False)
            near = torch.from_numpy(u[:, :rank] * values[:rank] @ v[:rank]).float()
            with torch.no_grad():
                layer.weight.copy_(near[:-1].T)
                layer.bias.copy_(near[-1])
            share = np.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
            line = (
                f"blocks.{block}.feed_forward.{which}: the factors lose {share:.2%} of the matrix"
            )
            assert share > 0.3
            assert f"{line} (Frobenius norm)" in notes
    ours = logits_of(load_model(tmp_path / "new"))
    torch.testing.assert_close(ours, logits_of(dense), rtol=1e-5, atol=1e-5)


@everyday("family", ["llama", "qwen3"], keep=["llama"])
@pytest.mark.parametrize(
    "text", ["num_experts=[6],rank=64", "factorization=tr,num_experts=[4,2],rank=16"]
)
def test_feed_forwards_with_a_gate_become_three_factorized_layers(tmp_path, family, text):
    theirs(family).save_pretrained(tmp_path / "dense")
    notes = convert(tmp_path / "dense", tmp_path / "new", "polyad", Factorizing(text))["notes"]
    assert "its initial outputs equal the dense model's, up to rounding" in notes
    left_out = [note for note in notes if "the factors lose 0.00% of the matrix" in note]
    assert {note.partition(":")[0].rpartition(".")[2] for note in left_out} == {
        "up_gate", "up", "down",
    }  # fmt: skip
    model, before = load_model(tmp_path / "new"), load_model(tmp_path / "dense")
    assert model.config.feed_forward.activation == "swiglu"
    assert len(left_out) == 3 * len(model.blocks)
    for block in model.blocks:  # the experts' gate, which is not the dense layers'
        assert not block.feed_forward.gate.weight.any()
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, dense = (each.double().eval()(ids).logits for each in (model, before))
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)
    assert (dense - dense.mean()).abs().max() > 0.1


def test_an_activation_without_a_gate_does_not_fit_one_with(sources, tmp_path, capfd):
    theirs("llama").save_pretrained(tmp_path / "llama")
    for source, given, found in (
        (tmp_path / "llama", "gelu", "swiglu"),
        (sources / "gpt2", "swiglu", "gelu_tanh"),
    ):
        text = f"num_experts=4,activation={given}"
        command = ["convert", str(source), str(tmp_path / "new"), "--to", "polyad"]
        assert polyad([*command, "--factorize", text]) == 2
        line = capfd.readouterr().err.splitlines()[-1]
        assert line == (
            f"polyad: error: --factorize {text}: activation: {given!r} does not fit: the dense "
            f"layers of {source} have {found}"
        )
    other = Factorizing("num_experts=4,activation=geglu,rank=64")
    notes = convert(tmp_path / "llama", tmp_path / "new", "polyad", other)["notes"]
    assert any(note.endswith("experts use geglu, the dense layers swiglu") for note in notes)


def test_a_mixer_may_be_factorized_twice_and_the_gates_start_anew(sources, tmp_path):
    first = "num_experts=[8],rank=24,section=token_feed_forward,gate_norm=batch"
    convert(sources / "mixer", tmp_path / "one", "safetensors", Factorizing(first))
    weights = load_file(tmp_path / "one" / "model.safetensors")
    mean = "blocks.0.token_feed_forward.gate.norm.running_mean"
    weights[mean] += 0.25
    save_file(weights, tmp_path / "one" / "model.safetensors")
    convert(tmp_path / "one", tmp_path / "two", "polyad", Factorizing("num_experts=[8],rank=33"))
    both = Checkpoint(tmp_path / "two")
    assert torch.equal(both.buffer(mean), weights[mean])
    for name, value in weights.items():
        if ".token_feed_forward." in name and "running" not in name:
            assert torch.equal(both.whole(name), value)
    assert not both.whole("blocks.1.channel_feed_forward.gate.weight").any()
    assert both.state.factorized == "num_experts=[8],rank=33"


def test_nan_other_formats_and_models_that_are_not_dense_are_one_line(sources, tmp_path, capfd):
    def refused(source, to="polyad"):
        command = ["convert", str(source), str(tmp_path / "new"), "--to", to]
        assert polyad([*command, "--factorize", "num_experts=8"]) == 2
        assert not (tmp_path / "new").exists()
        return capfd.readouterr().err.splitlines()[-1]

    assert "'mumoe'" in refused(sources / "gpt2", "huggingface")
    convert(sources / "gpt2", tmp_path / "once", "polyad", Factorizing("num_experts=8"))
    assert "model.feed_forward.kind: 'mumoe' is not allowed: a dense" in refused(tmp_path / "once")
    damaged = with_nan(sources / "gpt2", tmp_path / "nan", "blocks.1.feed_forward.down.bias")
    assert "NaN or infinity in blocks.1.feed_forward.down.weight" in refused(damaged)


@pytest.mark.slow
@pytest.mark.distributed
@everyday(("noise", "apart"), [(1.0, True), (0.0, False)], keep=[(1.0, True)])
def test_a_run_goes_on_from_it_and_experts_part_where_they_were_set_apart(
    workers, trained, tmp_path, prepared_path, noise, apart
):
    start = tmp_path / "start"
    convert(trained("dense"), start, "polyad", Factorizing(f"num_experts=8,rank=40,noise={noise}"))
    section = yaml.safe_load((start / "config.yaml").read_text())["model"]["feed_forward"]
    dense = workers(1).run(evaluation, trained("dense"), data=str(prepared_path))[0]
    config = write_config(
        tmp_path / "config.yaml", prepared_path, checkpoint__init_from=str(start),
        model__feed_forward=section, train__steps=8, optimizer__learning_rate=0.003,
    )  # fmt: skip
    at_first = workers(1).run(evaluation, start, data=str(prepared_path))[0]
    # But for the form of GELU.
    assert at_first["loss"] == pytest.approx(dense["loss"], rel=1e-4)
    workers(2).run(run, config)
    assert workers(1).run(evaluation, tmp_path / "run")[0]["loss"] < at_first["loss"]
    ended = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000008")
    gate_ND = ended.whole("blocks.1.feed_forward.gate.weight")
    factor = "blocks.1.feed_forward.up.expert_factor_0"
    moved_NR = ended.whole(factor) - Checkpoint(start).whole(factor)
    assert bool(gate_ND.abs().max() > 1e-4) == apart
    assert bool((moved_NR - moved_NR[0]).abs().max() > 1e-4) == apart
