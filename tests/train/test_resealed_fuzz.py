"""Checkpoints and folders of weights with fields at random: refused in one line, or harmless."""

import copy
import json
import shutil

import pytest
import torch

from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.verification import read_contents, verify_contents
from polyad.parallel.weights import load_model, open_checkpoint, open_weights
from polyad.train.config.plan import plan_run
from polyad.train.tasks.vocabulary import tokenizer_of
from tests.helpers.resealed import WEIGHT, mutations, outcome

pytestmark = pytest.mark.distributed


def everything(folder):
    """All tensors that a run that goes on would take."""
    checkpoint = Checkpoint(folder)
    return {
        (name, field): checkpoint.whole(name, field)
        for name, fields in checkpoint.tensors.items()
        for field in fields
    }


def fuzz(resealed, count):
    few = {WEIGHT, "blocks.0.attention_norm.bias", "rank-00000.torch"}
    few |= {name for name, f in resealed.good["index.json"]["tensors"].items() if "buffer" in f}
    before, refused, passed = everything(resealed.checkpoint), 0, 0
    for name in ("index.json", "state.json", "manifest.json"):
        tree = resealed.good[name]
        part = copy.deepcopy(tree)
        if name == "index.json":  # a few tensors of each kind; the others stay as they are
            part["tensors"] = {key: part["tensors"][key] for key in sorted(few)}
        if name == "manifest.json":
            del part["xxh3"]
        for what, mutated in mutations(part, name, count):
            if name == "index.json" and isinstance(mutated.get("tensors"), dict):
                mutated["tensors"] = {
                    key: value for key, value in tree["tensors"].items() if key not in few
                } | mutated["tensors"]
            resealed.write(name, mutated)
            opened = outcome(lambda: read_contents(resealed.checkpoint))
            if opened is not None:
                assert opened.startswith(str(resealed.checkpoint)), (name, what, opened)
                refused += 1
                if refused % 5 == 0:  # it takes most of the time
                    planned = outcome(lambda: plan_run(resealed.config, [], 1))
                    assert planned is not None, (name, what)
                continue
            planned = outcome(lambda: plan_run(resealed.config, [], 1))
            passed += 1
            verified = outcome(lambda: verify_contents(resealed.checkpoint))
            found = {}
            read = outcome(lambda found=found: found.update(everything(resealed.checkpoint)))
            assert (verified is None) == (read is None), (name, what)
            for key, value in found.items():
                assert torch.equal(value, before[key]), (name, what, key)
            if planned is None and read is None:
                plan = plan_run(resealed.config, [], 1)
                assert plan.start_state(plan.resume).step == 6, (name, what)
    return refused, passed


@pytest.mark.slow
def test_no_mutation_of_a_field_is_believed(resealed):
    refused, passed = fuzz(resealed, 50)
    assert refused > 80
    assert passed < refused


@pytest.mark.slow
def test_no_mutation_of_many_is_believed(resealed):
    refused, _ = fuzz(resealed, 500)
    assert refused > 1000


def test_json_that_is_none_is_refused(resealed):
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"null"):
        for name in ("index.json", "state.json"):
            resealed.write(name, content)
            line = outcome(lambda: open_checkpoint(resealed.run))
            assert line.startswith(f"{resealed.checkpoint / name}: damaged: "), line


@pytest.mark.slow
def test_mutations_of_a_folder_of_transformers_are_refused_or_harmless(exported, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text())
    index = {"metadata": {"total_size": 1}, "weight_map": {"transformer.wte.weight": "x"}}
    index["weight_map"]["transformer.wte.weight"] = "model.safetensors"
    about = json.loads((folder / "tokenizer_config.json").read_text())
    good = {
        "config.json": config,
        "model.safetensors.index.json": index,
        "tokenizer_config.json": about,
    }
    expected = load_model(exported).state_dict()

    def opened():
        weights = open_weights(folder)
        tokenizer_of(weights)
        assert torch.equal(weights.whole(WEIGHT), expected[WEIGHT])

    refused = 0
    for name, tree in good.items():
        for _, mutated in mutations(tree, name, 80):
            (folder / name).write_text(json.dumps(mutated))
            refused += outcome(opened) is not None
        (folder / name).write_text(json.dumps(tree))
    assert refused > 40
