"""The recipes in docs/recipes/ on small runs, beside numbers that are found in other ways."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

import polyad
from polyad.data.text.prepare import prepare
from polyad.train.measures.removal import Removal
from tests.helpers.decoders import hub_folder
from tests.helpers.runs import both_forms, run, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).resolve().parents[2] / "docs/recipes"
TOKENS = 32 * 48
EXPERTS = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 16, "top_k": 3}


def recipe(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(workers, prepared_path, tmp_path_factory):
    """A run whose weights are so large that tokens are routed apart."""
    folder = tmp_path_factory.mktemp("recipes")
    changes = {"model__feed_forward": EXPERTS, "model__initializer_range": 0.3}
    workers(1).run(run, write_config(folder / "config.yaml", prepared_path, **changes))
    return folder / "run"


@pytest.fixture(scope="module")
def numbers(prepared_path, tmp_path_factory):
    """Another text in the same tokens."""
    folder = tmp_path_factory.mktemp("numbers")
    lines = [json.dumps({"text": " ".join(f"{n * 7919 % 1000}" for n in range(at, at + 60))})
             for at in range(40)]  # fmt: skip
    (folder / "numbers.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = str(prepared_path / "tokenizer.json")
    prepare(str(folder / "numbers.jsonl"), tokenizer, folder / "data", validation_fraction=0.25)
    return folder / "data"


@pytest.mark.parametrize(
    "name", ["atlas_of_olmoe", "audit", "contrast", "patch", "probe", "subset"]
)
def test_a_recipe_is_at_most_100_lines(name):
    assert len((HERE / f"{name}.py").read_text().splitlines()) <= 100


def test_an_audit_ranks_the_experts_of_each_token(trained):
    audit = recipe("audit")
    rows = audit.changes(str(trained), positions=20, tokens=TOKENS)
    assert rows.groupby(["module", "token"]).size().eq(3).all()
    table = audit.audit(rows).set_index(["module", "ranked by"])
    for module, of_layer in rows.groupby("module", observed=True):
        # A token's experts stand in the order of their weights.
        high = of_layer.loc[of_layer["slot"] == 0, "change"].to_numpy()
        low = of_layer.loc[of_layer["slot"] == 2, "change"].to_numpy()
        line = table.loc[(module, "own_weight")]
        assert line["without highest"] == pytest.approx(high.mean())
        assert line["without lowest"] == pytest.approx(low.mean())
        assert line["p"] == pytest.approx(ttest_rel(high, low).pvalue)
        difference = high - low
        d = difference.mean() / np.sqrt(((difference - difference.mean()) ** 2).sum() / 19)
        assert line["d"] == pytest.approx(d)
    # One statistic by hand: an expert's mean weight where it is used.
    trace = polyad.load(trained).read(tokens=TOKENS).trace()
    means = trace.groupby(["module", "expert"], observed=True)["weight"].mean()
    for row in rows.iloc[::13].itertuples():
        assert row.mean_weight == pytest.approx(means[row.module, row.expert], rel=1e-4)


def test_a_subset_costs_what_a_pruned_model_does(trained, tmp_path):
    (whole, half) = (
        recipe("subset")
        .subset(str(trained), keep=(0.5,), examples=TOKENS, tokens=TOKENS)
        .to_dict("records")
    )
    pruned = {"output": tmp_path / "pruned", "by": "probability", "keep": 0.5, "tokens": TOKENS}
    result, _ = both_forms(trained, Removal, **pruned)
    losses = [row["loss"] for row in result["losses"]]
    assert [whole["loss"], half["loss"]] == pytest.approx(losses[:2], rel=1e-5)
    assert len({half["loss"], *(half[f"random {number}"] for number in (1, 2, 3))}) == 4


def test_a_contrast_forces_the_experts_that_one_text_uses_more(trained, numbers):
    contrast = recipe("contrast")
    experts, moved, losses = contrast.contrast(str(trained), str(numbers), 2, 1, TOKENS)
    model = polyad.load(trained)
    for name, data in (("first", None), ("second", numbers)):
        trace = model.read(data, "train", tokens=TOKENS).trace()
        for row in experts.iloc[::3].itertuples():
            of_expert = (trace["layer"] == row.layer) & (trace["expert"] == row.expert)
            share = 3 * of_expert.sum() / (trace["layer"] == row.layer).sum()
            assert getattr(row, name) == pytest.approx(share, abs=1e-3)
        loss = model.read(data, tokens=TOKENS).losses()["loss"].mean()
        assert losses.loc["unchanged", name] == pytest.approx(loss)
    deltas = experts.set_index(["layer", "expert"])["delta"]
    assert deltas.abs().is_monotonic_decreasing
    with model.intervened(*moved):
        trace = model.read(tokens=TOKENS).trace()
    for each in moved:
        layer, expert, how = (part.partition("=")[2] for part in each.split(","))
        assert (deltas[int(layer), int(expert)] > 0) == (how == "force")
        of_layer = trace[trace["layer"] == int(layer)]
        share = 3 * (of_layer["expert"] == int(expert)).mean()
        assert share == pytest.approx(1 if how == "force" else 0)
    assert [each.rpartition("=")[2] for each in moved].count("force") == 2
    assert losses.loc["moved"].ne(losses.loc["unchanged"]).all()
    assert len(losses) == 5


def test_a_probe_finds_a_planted_unit_and_nothing_in_noise(trained):
    probe, chance = recipe("probe"), np.random.default_rng(0)
    label, part = np.tile([True, False], 40), np.repeat([0, 0, 1, 2], 20)
    hidden = chance.normal(size=(80, 64))
    noise = [probe.probe(chance.normal(size=(80, 64)), label, part, 1)[1] for _ in range(32)]
    assert np.mean(noise) == pytest.approx(0.5, abs=0.08)
    hidden[:, 17] += 9 * label
    assert probe.probe(hidden, label, part, 3) == [1, 1]
    found = probe.probes(str(trained), units=(1, 4), samples=64, candidates=2, tokens=32 * 200)
    assert found.groupby(["module", "class", "k", "shuffled"])["expert"].nunique().le(2).all()
    table = probe.summary(found).set_index(["module", "class", "k", "shuffled"])
    for key, group in found.groupby(["module", "class", "k", "shuffled"]):
        best = group.iloc[group["choosing"].to_numpy().argmax()]
        assert (table.loc[key, "f1"], table.loc[key, "expert"]) == (best["f1"], best["expert"])
        assert table.loc[key, "mean"] == pytest.approx(group["f1"].mean())
    assert "characters: letters" in table.index.get_level_values("class")


def test_an_atlas_of_two_corpora_is_one_file_and_one_page(tmp_path, monkeypatch):
    hub_folder(tmp_path / "OLMoE", "olmoe")
    for name in ("train", "data"):
        text = [path.read_text("utf-8") for path in sorted((HERE.parents[1] / name).glob("*.py"))]
        (tmp_path / f"{name}.txt").write_text("\n".join(text[:8]))
    corpora = [str(tmp_path / "train.txt"), str(tmp_path / "data.txt")]
    words = ["--model", str(tmp_path / "OLMoE"), "--corpora", *corpora, "--layers", "1"]
    few = ["--tokens", "128", "--length", "64"]
    monkeypatch.setattr("sys.argv", ["atlas", str(tmp_path / "out"), *words, *few])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    recipe("atlas_of_olmoe").main()
    result = json.loads((tmp_path / "out" / "atlas.json").read_text())
    assert [len(each["experts"]) for each in result["atlases"].values()] == [8, 8]
    assert result["agreement"][0]["experts"] == 8
    assert "<html" in (tmp_path / "out" / "atlas.html").read_text()


def test_a_patched_expert_is_that_of_the_clean_run(tmp_path):
    model = hub_folder(tmp_path / "OLMoE", "olmoe").eval()
    tokenizer = polyad.load(tmp_path / "OLMoE").tokenizer
    words = [f"{n} is {n} and x" for n in range(1, 7)]
    files = [tmp_path / "pairs.json", tmp_path / "others.json"]
    for file, part in zip(files, (words[:2], words[2:4]), strict=True):
        pairs = [{"clean": each, "corrupted": f"9{each[1:]}", "right": "a", "wrong": "b"}
                 for each in part]  # fmt: skip
        file.write_text(json.dumps(pairs))
    patch = recipe("patch")
    table, families = patch.patch(str(tmp_path / "OLMoE"), *map(str, files), size=3)
    assert list(families.index) == [
        "corrupted",
        "family",
        *(f"random {n}" for n in range(5)),
        "clean",
    ]
    assert table["recovered"].is_monotonic_decreasing
    # The same with transformers alone: its weights of an expert to 0, and what these were worth.
    name, expert = table.index[0]
    experts = model.get_submodule(f"model.layers.{name.split('.')[1]}.mlp.experts")

    def difference(ids, patched=None):
        outputs = []

        def run_without(module, arguments):
            hidden, chosen, weights = arguments
            whole = module.forward(hidden, chosen, weights)
            without = module.forward(hidden, chosen, weights.masked_fill(chosen == expert, 0))
            outputs.append((whole - without, without))

        def put_in(module, arguments, output):
            return output if patched is None else outputs[0][1] + patched

        handles = [experts.register_forward_pre_hook(run_without),
                   experts.register_forward_hook(put_in)]  # fmt: skip
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        for handle in handles:
            handle.remove()
        right, wrong = (tokenizer.encode(each)[0] for each in "ab")
        return float(logits[right] - logits[wrong]), outputs[0][0]

    rows = []
    for pair in json.loads(files[0].read_text()):
        ids = [tokenizer.encode(pair[each]) for each in ("clean", "corrupted")]
        clean, own = difference(ids[0])
        rows.append((clean, difference(ids[1])[0], difference(ids[1], own)[0]))
    clean, corrupted, patched = np.mean(rows, axis=0)
    line = table.loc[(name, expert)]
    assert line["difference"] == pytest.approx(patched, abs=1e-5)
    assert line["recovered"] == pytest.approx((patched - corrupted) / (clean - corrupted), rel=1e-3)
