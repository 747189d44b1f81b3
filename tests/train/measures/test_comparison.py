"""`polyad compare` and `--attack` on whole runs."""

import json
import math
import shutil

import pytest
import torch

from polyad.data.text.attack import WordSwap
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from tests.helpers.prepared import windows_of
from tests.helpers.runs import compare, evaluated, evaluation, records, reseal

pytestmark = pytest.mark.distributed

LOG = {"fluctuation": True, "fluctuation_tokens": 320}
RUNS = {
    "smoe": (1, {
        "log": LOG,
        "model__feed_forward": {
            "kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "graph": "similarity",
        },
    }),
    # Its weights are cut while it trains, and whole where they are compared.
    "mumoe": (2, {
        "log": LOG, "parallel__zero_stage": 3,
        "model__feed_forward": {"kind": "mumoe", "factorization": "cp", "num_experts": [6, 2]},
    }),
    "dense": (1, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(run_of):
    """A finished run of each kind, with checkpoints of steps 3 and 6."""
    return {kind: run_of(processes, **changes) for kind, (processes, changes) in RUNS.items()}


def checkpoint(run_folder, step):
    return run_folder / "checkpoints" / f"step-{step:08}"


@pytest.mark.parametrize("kind", ["smoe", "mumoe"])
def test_two_checkpoints_differ_as_the_loop_says(workers, runs, kind):
    # The loop measured the same on its way, with the engine that trained.
    result = workers(1).run(compare, runs[kind], checkpoint(runs[kind], 3), tokens=320)[0]
    record = records(runs[kind])[-1]
    assert (result["step"], result["compared_step"], result["probe_tokens"]) == (6, 3, 320)
    assert 0 < result["mean_top1"] < 1
    for layer in result["layers"]:
        name = layer["module"]
        for measure in ("top1", "set", "entropy_ratio"):
            logged = record[f"fluctuation/{name}/{measure}"]
            assert layer[measure] == pytest.approx(logged, abs=2 / 320)
        ratio = layer["entropy"] / layer["compared_entropy"]
        assert layer["entropy_ratio"] == pytest.approx(ratio)
        assert 0 < layer["entropy"] < math.log(12)


def test_shares_are_those_of_the_routers_by_hand(workers, runs, prepared_path):
    # The experts of every token, straight from the routers; the last window is not full.
    (*whole, last), results = [read for read, _ in windows_of(prepared_path)], []
    assert len(last) < 32
    for step in (3, 6):
        model, seen = load_model(checkpoint(runs["smoe"], step)), []
        model.blocks[0].feed_forward.router.register_forward_hook(
            lambda module, given, output, seen=seen: seen.append(output[0].expert_ids_NK)
        )
        for reads in (whole, [last]):
            with torch.no_grad():
                model(torch.tensor(reads))
        results.append(torch.cat(seen))
    before, now = results
    options = {"tokens": 10**6, "overrides": ("evaluation.batch_size=16",)}
    result = workers(1).run(compare, runs["smoe"], checkpoint(runs["smoe"], 3), **options)[0]
    layer = result["layers"][0]
    assert result["probe_tokens"] == len(now)
    first = (before[:, 0] != now[:, 0]).double().mean().item()
    other = (before.sort(-1).values != now.sort(-1).values).any(-1).double().mean().item()
    assert 0 < first <= other < 1
    assert layer["top1"] == pytest.approx(first, abs=2 / len(now))
    assert layer["set"] == pytest.approx(other, abs=2 / len(now))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("evaluate", "--attack", "word-swap"), "--rate"),
        (("evaluate", "--attack", "letters", "--rate", "0.1"), "--attack"),
        (("evaluate", "--attack", "word-swap", "--rate", "1.5"), "--rate: '1.5'"),
        (("evaluate", "--attack", "word-swap", "--rate", "nan"), "--rate: 'nan'"),
        (("evaluate", "--attack", "word-swap", "--rate", "0", "--seed", "x"), "--seed: 'x'"),
        (("evaluate", "--rate", "0.1"), "--rate: 0.1"),
        (("evaluate", "--seed", "0"), "--seed: 0"),
        (("compare", "--with", ".", "--tokens", "0"), "--tokens: '0'"),
        (("compare", "--with", "nowhere"), "nowhere"),
        (("compare",), "--with"),
    ],
)
def test_bad_options_are_one_line(runs, refused, words, key):
    name, *options = words
    assert key in refused(name, runs["smoe"], *options)


def test_models_that_cannot_be_compared_are_refused(runs, tmp_path):
    smoe, mumoe, dense = (checkpoint(runs[kind], 6) for kind in RUNS)
    # One whose token ids mean different things.
    other = tmp_path / "checkpoints" / smoe.name
    shutil.copytree(smoe, other)
    state = json.loads((other / "state.json").read_text()) | {"tokenizer_fingerprint": "0" * 64}
    (other / "state.json").write_text(json.dumps(state))
    reseal(other)
    for first, second, part in (
        (smoe, mumoe, rf"compare: {mumoe}: is a different model.*feed_forward\."),
        (dense, dense, "model.feed_forward.kind: dense"),
        (smoe, other, f"the checkpoint of --with {other} with 000000000000"),
    ):
        with pytest.raises(ConfigError, match=part):
            compare(first, second)


@pytest.mark.slow
def test_an_attack_is_the_same_by_any_number_of_processes_and_the_command(workers, runs, tmp_path):
    attack, file = WordSwap(0.3, 1), tmp_path / "found.json"
    one, table = workers(1).run(evaluated, runs["dense"], attack=attack)[0]
    words = ["--attack", "word-swap", "--rate", "0.3", "--seed", "1", "--json", str(file)]
    assert polyad(["evaluate", str(runs["dense"]), *words]) == 0
    again = json.loads(file.read_text())
    two = workers(2).run(evaluation, runs["dense"], attack=attack)
    assert one["loss"] == again["loss"]
    assert two[0]["loss"] == two[1]["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert one["attack"] == two[0]["attack"] == again["attack"]
    assert one["attack"]["replaced"] / one["words"] == pytest.approx(0.3, abs=0.1)
    other = workers(1).run(evaluation, runs["dense"], attack=WordSwap(0.3, 2))[0]
    assert other["loss"] != one["loss"]
    assert f"{one['attack']['replaced']:,}" in table
