"""`polyad.load`: a trained model in Python, against the command line and the model's own output."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import polyad
from polyad.launch.cli import run as command
from polyad.train.errors import ConfigError
from polyad.train.evaluation.generate import Sampling
from tests.helpers.everyday import everyday
from tests.helpers.generated import generated
from tests.helpers.runs import FEED_FORWARDS, evaluation

pytestmark = pytest.mark.distributed
TEXT = "def polyad(tokens):\n    return [experts for experts in tokens]"


def test_importing_polyad_imports_nothing_heavy():
    code = (
        "import sys, polyad\n"
        "assert {'load', 'Run'} <= set(dir(polyad))\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'deepspeed', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="module 'polyad' has no attribute 'lod'"):
        _ = polyad.lod


@everyday("kind", [kind for kind in FEED_FORWARDS if kind != "dense"], keep=["smoe", "tr"])
def test_experts_are_those_that_the_model_counts(trained, kind):
    run = polyad.load(trained(kind))
    found = run.experts(TEXT[:40], top=3)
    ids = run.tokenizer.encode(TEXT[:40])
    assert found.token_ids.tolist() == ids
    assert "".join(found.tokens) == TEXT[:40]
    with torch.inference_mode():
        routing = run.model(torch.tensor([ids])).routing
    assert [stats.name for stats in routing] == list(found.layers)
    for stats, layer in zip(routing, found.layers.values(), strict=True):
        usage_S = stats.load_E if stats.usage_E is None else stats.usage_E
        is_table = kind in ("mxd", "transcoder")
        # Weights of a sparse gate are no shares: its load is what has one, of 4 at most.
        used_MS = (layer.scores > 0) / 4 if is_table else layer.scores
        torch.testing.assert_close(used_MS.mean(0), usage_S.float())
        assert layer.experts.shape == layer.weights.shape
        if is_table or kind in ("cp", "tr"):  # every expert has a coefficient
            torch.testing.assert_close(layer.weights, layer.scores.gather(1, layer.experts))
            levels = layer.layer.levels
            assert layer.experts.shape[1] == sum(min(3, count) for count in levels)
            assert layer.weights[:, 0].equal(layer.scores[:, : levels[0]].amax(1))
        else:
            counts_E = torch.bincount(layer.experts.flatten(), minlength=len(stats.load_E))
            torch.testing.assert_close(counts_E / layer.experts.numel(), stats.load_E.float())


def test_the_table_says_the_same_as_the_tensors(trained):
    found = polyad.load(trained("smoe")).experts("import os")
    layer = found.layers["blocks.1.feed_forward"]
    table = found.table()
    assert set(table["module"]) == set(found.layers)
    own = table[table["module"] == "blocks.1.feed_forward"]
    places = own["position"].to_numpy(copy=True)
    for column, values in (
        ("expert", layer.experts.flatten()), ("weight", layer.weights.flatten()),
        ("score", layer.scores.gather(1, layer.experts).flatten()),
        ("token_id", found.token_ids[places]),
    ):  # fmt: skip
        assert own[column].tolist() == values.tolist(), column
    entropies = torch.from_numpy(own["entropy"].to_numpy(copy=True))
    torch.testing.assert_close(entropies, torch.special.entr(layer.scores).sum(-1)[places])
    header, *lines = str(found).splitlines()
    assert header.split("  ")[-1] == "block 1"
    assert len(lines) == len(found.tokens)
    assert lines[-1].endswith(f"{layer.experts[-1, -1]} {layer.weights[-1, -1]:.2f}")
    # Experts of several levels are named by level.
    found = polyad.load(trained("tr")).experts("import os", top=1)
    table = found.table()
    assert table["level"].tolist()[:2] == [0, 1]
    assert f"0.{table['expert'][0]} " in str(found).splitlines()[1]


@pytest.mark.slow
def test_a_run_generates_and_evaluates_as_the_commands_do(trained, tmp_path):
    folder, file = trained("smoe"), tmp_path / "scores.json"
    run = polyad.load(folder)
    assert str(run.path) in repr(run)
    expected = generated(folder, "def ", max_tokens=9, sampling=Sampling(top_k=5, seed=2))
    assert run.generate("def ", max_tokens=9, top_k=5, seed=2) == expected.text
    assert command(["evaluate", str(folder), "--json", str(file)]) == 0
    theirs, ours = json.loads(file.read_text()), run.evaluate()
    assert ours.keys() == theirs.keys()
    assert all(ours[key] == theirs[key] for key in ours if "second" not in key)
    with torch.no_grad():  # what is evaluated is the model in memory
        run.model.final_norm.weight.zero_()
    assert run.evaluate(batch_size=1)["loss"] > ours["loss"] + 0.1
    assert not torch.distributed.is_initialized()


def test_a_folder_of_weights_is_loaded_and_evaluated_with_data(
    workers, exported, finished, prepared_path
):
    run = polyad.load(str(exported))
    with pytest.raises(ValueError, match="is a folder of weights, which names no data; data names"):
        run.evaluate()
    (expected,) = workers(1).run(evaluation, finished)
    found = run.evaluate(prepared_path)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["tokens_scored"] == expected["tokens_scored"]
    with pytest.raises(ValueError, match="the model is dense: it has no experts"):
        run.experts("x")


def test_a_snapshot_of_the_hub_is_made_of_links(exported, tmp_path):
    """`snapshots/REVISION` holds links to `blobs` beside it, and nowhere else."""
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "607a30d", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(exported, blobs)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    expected = dict(polyad.load(exported).model.named_parameters())
    for name, value in polyad.load(snapshot).model.named_parameters():
        assert torch.equal(value, expected[name])


def test_arguments_that_do_not_fit_are_one_line(trained, tmp_path):
    run = polyad.load(trained("smoe"))
    for text in ("", TEXT * 9):
        with pytest.raises(ValueError, match=r"tokens are not allowed; the model reads 1 to 32"):
            run.experts(text)
    for read in (run.experts, run.show, run.generate):
        for texts in (["def main():", 1], None, b"x", "\udc00"):
            with pytest.raises(ConfigError, match=r"(text|prompt): .+(is not one text|udc00)"):
                read(texts)
    with pytest.raises(ValueError, match=r"precision: 'fp8' is not allowed: "):
        polyad.load(trained("smoe"), precision="fp8")
    with pytest.raises(ValueError, match=str(tmp_path)):
        polyad.load(tmp_path)


def test_lists_of_texts_are_lists_of_documents(trained):
    run = polyad.load(trained("smoe"))
    texts = ["def main():", "x = 1"]
    for found, text in zip(run.experts(texts), texts, strict=True):
        assert torch.equal(found.layers[1].experts, run.experts(text).layers[1].experts)
        assert found.layers[1] is found.layers["blocks.1.feed_forward"]
    assert run.generate(texts, max_new_tokens=3) == [run.generate(t, max_tokens=3) for t in texts]
    views = run.show(texts)
    assert [view.plain.losses for view in views] == [run.show(t).plain.losses for t in texts]
    with pytest.raises(KeyError, match="7: there are blocks"):
        run.experts("x").layers[7]


def from_python(folder, data):
    """Trains in this process, continues in it, and returns the folder of the weights."""
    model = {"kind": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4,
             "sequence_length": 16, "feed_forward": {"kind": "smoe", "num_experts": 4}}  # fmt: skip
    config = {"model": model, "train": {"global_batch_size": 4, "micro_batch_size": 2},
              "evaluation": {"batch_size": 64}}  # fmt: skip
    polyad.train(config, data__path=data, run__folder=str(folder), train__steps=2)
    return polyad.train(folder, train__steps=3).path.name


def test_training_and_analyses_are_functions(workers, prepared_path, tmp_path, capfd):
    folder = tmp_path / "run"
    assert workers(1).run(from_python, folder, str(prepared_path)) == ["step-00000003"]
    run = polyad.load(folder, progress=False)
    file = tmp_path / "atlas.json"
    words = ["atlas", str(folder), "--tokens", "128", "--layers", "1", "--json", str(file)]
    assert command(["experts", *words]) == 0
    expected = json.loads(file.read_text())
    capfd.readouterr()
    atlas = run.atlas(tokens=128, layers=[1])
    assert not capfd.readouterr().err
    assert json.loads(json.dumps(atlas["experts"].to_dict("records"))) == expected["experts"]
    assert atlas["tokens_scored"] == expected["tokens_scored"]
    assert "<table" in atlas._repr_html_()
    assert str(atlas) == atlas.text()
    found = run.knockout(layers=1, experts=[0, 2], tokens=128)["experts"]
    assert found["expert"].tolist() == [0, 2]
    assert found["change"].tolist() == pytest.approx(atlas["experts"]["change"][[0, 2]].tolist())
    assert run.specialize()["levels"]["experts"].tolist() == [4, 4]
    assert run.trace(tmp_path / "trace.parquet", tokens=64)["rows"] == 2 * 2 * 64
    assert len(run.prune(tmp_path / "small", by="frequency", keep=0.5, tokens=64)["losses"]) == 5
    assert "page.html" in run.report(tmp_path / "page.html")["output"]
    assert run.convert(tmp_path / "plain", "safetensors")["format"] == "safetensors"
    for ask, why in (
        (lambda: run.trace(tmp_path / "trace.parquet"), "^output: .*already exists"),
        (lambda: run.measure("alias"), "name: 'alias' is no measure; there are specialize"),
        (lambda: run.atlas(layer=1), "layer: is no option of atlas; there are layers"),
        (lambda: run.atlas(how="away"), "how: 'away' is not allowed"),
        (lambda: run.generate("a", temperature=-1), "^temperature: -1"),
    ):
        with pytest.raises(ValueError, match=why):
            ask()
    public = {"atlas", "convert", "evaluate", "experts", "generate", "knockout", "prune", "trace"}
    assert public < {name for name in dir(run) if not name.startswith("_")}
