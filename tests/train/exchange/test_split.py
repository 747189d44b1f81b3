"""A dense model in groups of units computes what it computed, trains, and is made dense again."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from sklearn.preprocessing import normalize

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from polyad.train.exchange.experts import Merging, Splitting, Upcycling
from tests.helpers.decoders import hub_folder
from tests.helpers.dense import IMAGES, logits_of, with_nan, write_weights
from tests.helpers.everyday import everyday
from tests.helpers.huggingface import save_reference
from tests.helpers.runs import newest, records, run, weights_of, write_config
from tests.model.emoe.test_splitting import objective

TEXT = {
    "kind": "gpt2", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
    "vocab_size": 400,
}  # fmt: skip
MODELS = {
    "gpt2": TEXT,
    "no-bias": TEXT | {"bias": False, "feed_forward": {"hidden_size": 48}},
    "vit": IMAGES | {"kind": "vit", "num_layers": 4, "num_heads": 4},
    "mixer": IMAGES | {"kind": "mixer", "num_layers": 4, "token_feed_forward": {"hidden_size": 24}},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Dense models by name, their weights and biases far from initial values."""
    folder = tmp_path_factory.mktemp("dense")
    for name, section in MODELS.items():
        write_weights(folder / name, section)
    save_reference(folder / "huggingface", n_layer=4, n_inner=80)
    return folder


CASES = [
    ("gpt2", "num_experts=16,top_k=16"),
    ("gpt2", "num_experts=8,top_k=8,blocks=[0,3],by=random"),
    ("no-bias", "num_experts=4,top_k=4,blocks=2"),
    ("huggingface", "num_experts=8,top_k=8,blocks=[2]"),
    ("vit", "num_experts=16,top_k=16,blocks=[1,3]"),
    ("vit", "num_experts=8,top_k=8"),
    ("mixer", "num_experts=16,top_k=16"),
    ("mixer", "num_experts=6,top_k=6,section=token_feed_forward,blocks=[3]"),
]


@everyday(
    ("source", "text"),
    CASES,
    keep=[
        ("gpt2", "num_experts=8,top_k=8,blocks=[0,3],by=random"),
        ("huggingface", "num_experts=8,top_k=8,blocks=[2]"),
        ("mixer", "num_experts=6,top_k=6,section=token_feed_forward,blocks=[3]"),
    ],
)
def test_all_experts_give_the_dense_logits_and_merged_weights_are_bitwise_the_dense_ones(
    sources, tmp_path, source, text
):
    result = convert(sources / source, tmp_path / "split", "polyad", Splitting(text))
    assert "its outputs equal the dense model's, up to rounding" in result["notes"]
    dense, model = load_model(sources / source), load_model(tmp_path / "split")
    assert result["parameters"] == sum(p.numel() for p in dense.parameters())
    torch.testing.assert_close(logits_of(model), logits_of(dense), atol=1e-10, rtol=0)
    single = (
        logits_of(load_model(path), torch.float32)
        for path in (tmp_path / "split", sources / source)
    )
    torch.testing.assert_close(*single, atol=1e-5, rtol=1e-5)
    merged = convert(tmp_path / "split", tmp_path / "merged", "safetensors", Merging())
    assert "every token uses all units again, as in the dense model" in merged["notes"]
    again = load_model(tmp_path / "merged")
    expected = load_model(sources / source).state_dict()
    assert list(again.state_dict()) == list(expected)
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)


def test_a_mixer_is_split_twice(sources, tmp_path):
    first = Splitting("num_experts=6,top_k=6,section=token_feed_forward,by=random")
    convert(sources / "mixer", tmp_path / "one", "safetensors", first)
    convert(tmp_path / "one", tmp_path / "two", "polyad", Splitting("num_experts=8,top_k=8"))
    one, two = (load_model(tmp_path / name).state_dict() for name in ("one", "two"))
    for name in (f"blocks.{block}.token_feed_forward.unit" for block in range(4)):
        assert torch.equal(one[name], two[name])
    convert(tmp_path / "two", tmp_path / "merged", "safetensors", merge=True)
    dense, merged = (load_model(p).state_dict() for p in (sources / "mixer", tmp_path / "merged"))
    assert list(merged) == list(dense)
    assert all(torch.equal(merged[name], value) for name, value in dense.items())


def test_groups_are_those_of_directions_and_by_chance_others(sources, tmp_path):
    result = {}
    for by in ("clustering", "random"):
        text = f"num_experts=16,top_k=4,blocks=[2],by={by}"
        convert(sources / "gpt2", tmp_path / by, "polyad", Splitting(text))
        checkpoint = Checkpoint(tmp_path / by)
        keys_EFD = checkpoint.whole("blocks.2.feed_forward.experts.keys")
        unit_U = checkpoint.buffer("blocks.2.feed_forward.unit")
        assert sorted(unit_U.tolist()) == list(range(128))
        dense = load_model(sources / "gpt2").blocks[2].feed_forward.up.weight
        assert torch.equal(keys_EFD.flatten(0, 1), dense[unit_U])
        group_U = torch.arange(128) // 8
        result[by] = objective(normalize(keys_EFD.flatten(0, 1).double().numpy()), group_U.numpy())
    assert result["clustering"] < 0.9 * result["random"]


def test_a_seed_decides_and_blocks_are_grouped_on_their_own(sources, tmp_path):
    def units(folder, text):
        convert(sources / "gpt2", tmp_path / folder, "polyad", Splitting(text))
        checkpoint = Checkpoint(tmp_path / folder)
        return [checkpoint.buffer(f"blocks.{n}.feed_forward.unit") for n in range(2)]

    for by in ("random", "clustering"):
        text = f"num_experts=8,top_k=4,blocks=[0,1],by={by}"
        one = units(f"{by}-one", text + ",seed=6")
        same, other = units(f"{by}-same", text + ",seed=6"), units(f"{by}-other", text + ",seed=7")
        assert all(map(torch.equal, one, same))
        assert not torch.equal(one[0], other[0])
        assert not torch.equal(one[0], one[1])


def test_a_note_says_that_outputs_differ(sources, tmp_path):
    text = "num_experts=8,top_k=3,select=not_top_k,score=linear"
    notes = convert(sources / "gpt2", tmp_path / "new", "polyad", Splitting(text))["notes"]
    assert "its outputs differ from the dense model's" in notes
    merged = convert(tmp_path / "new", tmp_path / "merged", "polyad", Merging())
    assert "every token uses all units again, as in the dense model" in merged["notes"]


def test_a_split_model_goes_through_safetensors_and_a_merged_one_to_transformers(
    sources, tmp_path, capfd
):
    text = "num_experts=8,top_k=4,blocks=[1]"
    source = ["convert", str(sources / "huggingface")]
    assert polyad([*source, str(tmp_path / "plain"), "--to", "safetensors", "--split", text]) == 0
    plain = ["convert", str(tmp_path / "plain")]
    assert polyad([*plain, str(tmp_path / "split"), "--to", "polyad"]) == 0
    direct = load_model(tmp_path / "plain").state_dict()
    again = load_model(tmp_path / "split").state_dict()
    assert all(torch.equal(again[name], value) for name, value in direct.items())
    assert polyad([*plain, str(tmp_path / "x"), "--to", "huggingface"]) == 2
    assert "emoe" in capfd.readouterr().err
    command = [*plain, str(tmp_path / "back"), "--to", "huggingface", "--merge", "--json", "-"]
    assert polyad(command) == 0
    assert json.loads(capfd.readouterr().out)["format"] == "huggingface"
    (theirs,) = (sources / "huggingface").glob("*.safetensors")
    before, after = load_file(theirs), load_file(tmp_path / "back" / "model.safetensors")
    shared = before.keys() & after.keys()
    assert len(shared) > 40
    assert all(torch.equal(before[name].float(), after[name]) for name in shared)


def test_copied_experts_of_a_vit_are_the_dense_ones_with_their_activation(sources, tmp_path):
    # GMoE: copies with a cosine score. In fp32 the experts are grouped products, in fp64 a loop.
    text = "num_experts=4,top_k=2,score=cosine,placement=[1,3]"
    notes = convert(sources / "vit", tmp_path / "copies", "polyad", Upcycling(text))["notes"]
    assert "its initial logits equal the dense model's, up to rounding" in notes
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ours, theirs = (
            logits_of(load_model(path), dtype) for path in (tmp_path / "copies", sources / "vit")
        )
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
    text += ",activation=gelu_tanh"
    notes = convert(sources / "vit", tmp_path / "others", "polyad", Upcycling(text))["notes"]
    assert "its initial logits differ from the dense model's" in notes
    ours, theirs = (
        logits_of(load_model(tmp_path / "others")),
        logits_of(load_model(sources / "vit")),
    )
    assert 0 < (ours - theirs).abs().max() < 5e-3


def test_what_is_not_dense_cannot_be_split_and_what_is_not_split_cannot_be_merged(
    sources, tmp_path, capfd
):
    def refused(source, *options):
        command = ["convert", str(source), str(tmp_path / "new"), "--to", "polyad", *options]
        assert polyad(command) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert not (tmp_path / "new").exists()
        return line

    split = ("--split", "num_experts=8,top_k=4")
    convert(sources / "gpt2", tmp_path / "split", "polyad", Splitting("num_experts=8,top_k=4"))
    convert(sources / "gpt2", tmp_path / "sparse", "polyad", Upcycling("num_experts=4"))
    capfd.readouterr()
    for name, kind in {"split": "emoe", "sparse": "smoe"}.items():
        line = refused(tmp_path / name, *split)
        expected = f"{tmp_path / name}: model.feed_forward.kind: {kind!r} is not allowed: a dense"
        assert expected in line
    assert "--merge" in refused(tmp_path / "sparse", "--merge")
    assert "--merge" in refused(sources / "gpt2", "--merge")
    assert "--merge" in refused(sources / "gpt2", "--merge", *split)


def test_keys_that_are_nan_are_not_clustered(sources, tmp_path, capfd):
    damaged = with_nan(sources / "gpt2", tmp_path / "nan", "blocks.1.feed_forward.up.weight")
    command = ["convert", str(damaged), str(tmp_path / "new"), "--to", "polyad", "--split"]
    assert polyad([*command, "num_experts=8,top_k=4"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "NaN or infinity in blocks.1.feed_forward.up.weight" in line
    assert not (tmp_path / "new").exists()
    assert polyad([*command, "num_experts=8,top_k=4,by=random"]) == 0


@pytest.fixture(scope="module")
def split_run(trained, tmp_path_factory):
    """A trained dense run, with its tokenizer, in groups."""
    folder = tmp_path_factory.mktemp("split") / "start"
    text = "num_experts=16,top_k=16,blocks=[0,1]"
    assert convert(trained("dense"), folder, "polyad", Splitting(text))["tokenizer"]
    return folder


@pytest.mark.slow
@pytest.mark.distributed
def test_tuned_with_all_experts_it_is_merged_to_what_the_dense_model_is_tuned_to(
    workers, trained, split_run, tmp_path, prepared_path
):
    def tuned(name, source, **changes):
        (tmp_path / name).mkdir()
        config = write_config(
            tmp_path / name / "config.yaml", prepared_path, checkpoint__init_from=str(source),
            optimizer__kind="sgd", evaluation__every=0, **changes,
        )  # fmt: skip
        assert workers(2).run(run, config) == [6, 6]
        return tmp_path / name / "run"

    section = yaml.safe_load((split_run / "config.yaml").read_text())["model"]["feed_forward"]
    dense = tuned("dense", trained("dense"))
    split = tuned("split", split_run, model__feed_forward=section, parallel__zero_stage=3)
    losses = [[line["loss"] for line in records(each)] for each in (dense, split)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    convert(split, tmp_path / "merged", "polyad", Merging())
    expected, merged = weights_of(newest(dense)), weights_of(tmp_path / "merged")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, atol=2e-6, rtol=1e-5)
    changed = [name for name, value in expected.items() if "feed_forward.up" in name]
    before = weights_of(newest(trained("dense")))
    assert not any(torch.equal(before[name], merged[name]) for name in changed)


GATED = {
    "clustering": "num_experts=4,top_k=4",
    "random": "num_experts=6,top_k=6,by=random,blocks=[1]",
}


@everyday("by", GATED, keep=["random"])
def test_a_llama_in_groups_is_the_dense_model_and_back_bitwise(tmp_path, by):
    folder, text = tmp_path / "hub", GATED[by]
    hub_folder(folder, "llama")
    result = convert(folder, tmp_path / "split", "polyad", Splitting(text))
    assert "its outputs equal the dense model's, up to rounding" in result["notes"]
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    dense, split = (load_model(tmp_path / name).double() for name in ("hub", "split"))
    with torch.no_grad():
        difference = dense(ids).logits - split(ids).logits
    assert difference.abs().max() < 1e-12
    convert(tmp_path / "split", tmp_path / "merged", "polyad", Merging())
    for name, value in load_model(tmp_path / "merged").named_parameters():
        assert torch.equal(value, load_model(folder).get_parameter(name)), name
