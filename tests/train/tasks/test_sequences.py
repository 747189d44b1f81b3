"""Labelled sequences as a task: it trains, is scored, ends early, and refuses what does not fit."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

from polyad.data.sequences.config import Schema
from polyad.data.sequences.tables import read_tables
from polyad.data.text.prepare import prepare
from polyad.parallel.checkpoint.load import Checkpoint, best_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers import sequences as made
from tests.helpers.everyday import everyday
from tests.helpers.runs import (
    evaluation,
    records,
    run,
    run_and_listen,
    weights_of,
)

pytestmark = pytest.mark.distributed

SPARSE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16}
TREE = {
    "seed": 3,
    "model": {
        "kind": "gpt2", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 64,
        "feed_forward": SPARSE, "head": {"kind": "classification"},
    },
    "train": {"steps": 12, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "loss": {"load_balance": 0.01},
    "checkpoint": {"every": 6},
    "evaluation": {"every": 6},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("sequences")
    made.byte_tokenizer(root)
    return made.folder_of(root / "table").parent


@pytest.fixture
def config(tmp_path, data):
    path = tmp_path / "sequences.yaml"
    path.write_text(yaml.safe_dump(TREE | {
        "run": {"folder": str(tmp_path / "run")},
        "data": {
            "kind": "sequences", "path": str(data / "table"), "group_by_length": 4,
            "tokenizer": str(data / "tokenizer.json"), "metrics": ["accuracy", "macro_f1"],
        },
    }))  # fmt: skip
    return path


def test_it_trains_resumes_bitwise_and_is_scored(workers, config, tmp_path):
    one = workers(1)
    assert one.run(run, config) == [12]
    half = f"run.folder={tmp_path / 'half'}"
    assert one.run(run, config, half, "train.steps=6") == [6]
    assert one.run(run, config, half) == [12]
    whole, pieces = (
        weights_of(tmp_path / name / "checkpoints" / "step-00000012") for name in ("run", "half")
    )
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)
    log = records(tmp_path / "run")
    assert log[-1]["sequences"] == 96
    told = {"validation_score", "validation_accuracy", "validation_macro_f1", "validation_loss"}
    assert told <= log[-1].keys()
    assert all("tokens" not in key for key in log[-1])
    result = one.run(evaluation, tmp_path / "run", overrides=("evaluation.batch_size=5",))[0]
    expected = scored_by_hand(tmp_path / "run")
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-6), name
    assert result["sequences_scored"] == 21
    assert sum(each["sequences"] for each in result["per_class"].values()) == 21
    right = sum(each["recall"] * each["sequences"] for each in result["per_class"].values())
    assert right / 21 == pytest.approx(result["accuracy"])
    dealt_out = workers(2).run(evaluation, tmp_path / "run")
    for each in dealt_out:
        assert each["per_class"] == result["per_class"]
        assert each["loss"] == pytest.approx(result["loss"])
    fixed = one.run(evaluation, tmp_path / "run", overrides=("data.padding=max_length",))[0]
    assert fixed["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert fixed["per_class"] == result["per_class"]


def scored_by_hand(run_folder):
    """A plain loop over the rows, one at a time and without padding."""
    checkpoint = Checkpoint(run_folder / "checkpoints" / "step-00000012")
    names = json.loads((checkpoint.folder / "classes.json").read_text())
    assert names == sorted(made.WORDS)
    parsed = load_config(run_folder / "config.yaml")
    task = SequenceTask.open_held_out(parsed.for_task(), checkpoint)
    model, logits, labels = load_model(checkpoint.folder), [], []
    for row in made.rows(21, 1):
        with torch.no_grad():
            logits.append(model(torch.tensor([task.data.tokenizer.encode(row["text"])])).logits[0])
        labels.append(names.index(row["label"]))
    found = torch.stack(logits).argmax(-1)
    accuracy, f1 = accuracy_score(labels, found), f1_score(labels, found, average="macro")
    return {
        "accuracy": accuracy,
        "macro_f1": f1,
        "score": (accuracy + f1) / 2,
        "loss": float(cross_entropy(torch.stack(logits), torch.tensor(labels))),
    }


SGD = "optimizer={kind: sgd, learning_rate: 0.1}"


def compared(tmp_path, one, other, *, steps=12):
    logs = [records(tmp_path / name) for name in (one, other)]
    keys = [key for key in logs[0][0] if key in ("loss", "grad_norm") or key.startswith("routing/")]
    for ours, theirs in zip(*logs, strict=True):
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=1e-6), (key, ours["step"])
    weights = [weights_of(tmp_path / n / "checkpoints" / f"step-{steps:08d}") for n in (one, other)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert logs[0][-1]["validation_score"] == logs[1][-1]["validation_score"]


LAYOUTS = {
    "data": (),
    "tensor": ("parallel.tensor_parallel_size=2",),
    "sequence": ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
    "expert": ("parallel.expert_parallel_size=2",),
    "zero 3": ("parallel.zero_stage=3", "model.feed_forward={kind: dense}"),
    "attention": (
        "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true",
        "model.feed_forward.graph=attention",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_one_process(workers, config, tmp_path, name):
    """Loss, gradient norm, every routing statistic, weights and scores; 21 rows are validated."""
    model = [each for each in LAYOUTS[name] if each.startswith("model.")]
    keys = ("train.micro_batch_size=2", "train.steps=4", "checkpoint.every=0", SGD)
    workers(1).run(run, config, f"run.folder={tmp_path / 'one'}", *keys, *model)
    workers(2).run(run, config, f"run.folder={tmp_path / 'two'}", *keys, *LAYOUTS[name])
    compared(tmp_path, "one", "two", steps=4)


def test_padding_to_the_longest_is_padding_to_the_limit(workers, config, tmp_path):
    for padding in ("longest", "max_length"):
        keys = (f"run.folder={tmp_path / padding}", f"data.padding={padding}", SGD)
        workers(1).run(run, config, *keys, "train.steps=4")
    compared(tmp_path, "longest", "max_length", steps=4)


@everyday("asynchronous", ["false", "true"], keep=["false"])
def test_a_run_ends_early_and_its_best_checkpoint_stays(workers, config, tmp_path, asynchronous):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    keys = (
        "train.steps=20", "checkpoint.every=1", "evaluation.every=1", "evaluation.patience=3",
        "checkpoint.keep_best=true", "checkpoint.keep_last=1", "optimizer.learning_rate=1e-12",
        f"checkpoint.asynchronous={asynchronous}",
    )  # fmt: skip
    _, said = listened(workers, config, *keys)
    log = records(tmp_path / "run")
    assert [each["step"] for each in log] == [1, 2, 3, 4]
    assert "early stopping after step 4: 3 validations in a row were not better" in said
    folder = tmp_path / "run" / "checkpoints"
    assert best_checkpoint(tmp_path / "run").name == "step-00000001"
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-00000001", "step-00000004"]
    state = Checkpoint(best_checkpoint(tmp_path / "run")).state
    assert (state.best_score, state.best_step) == (log[0]["validation_score"], 1)
    # The same command finds nothing to do; with more patience the run goes on.
    steps, said = listened(workers, config, *keys)
    assert steps == 4
    assert "nothing left to do: early stopping after step 4" in said
    more = [key.replace("patience=3", "patience=4") for key in keys]
    assert workers(1).run(run, config, *more) == [5]
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-00000001", "step-00000005"]
    # Scores of other samples are not compared with those before, and patience begins anew.
    steps, said = listened(workers, config, *more, "evaluation.max_windows=1")
    assert steps == 9 + 1
    assert best_checkpoint(tmp_path / "run").name == "step-00000006"


def test_a_best_checkpoint_that_is_asked_for_later_is_the_best_from_there_on(
    workers, config, tmp_path
):
    keys = ("evaluation.every=1", "optimizer.learning_rate=1e-12", "checkpoint.keep_last=1")
    workers(1).run(run, config, *keys, "train.steps=2")
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
    workers(1).run(run, config, *keys, "train.steps=4", "checkpoint.keep_best=true")
    assert best_checkpoint(tmp_path / "run").name == "step-00000003"


def listened(workers, config, *keys):
    """The steps done, and what was printed."""
    return workers(1).run(run_and_listen, config, *keys)[0]


@pytest.mark.slow
def test_it_begins_from_a_language_model_with_a_new_head(workers, config, tmp_path, trained):
    """The weights are the language model's, the head starts from the seed; the tokenizer is its."""
    dense = trained("dense")
    theirs = load_config(dense / "config.yaml").model.model_dump(mode="json")
    model = json.dumps(theirs | {"head": {"kind": "classification"}})
    keys = (
        f"model={model}", f"checkpoint.init_from={dense}", "data.tokenizer=null", "train.steps=1",
        "optimizer={kind: sgd, learning_rate: 0.0001}", "checkpoint.every=0",
    )  # fmt: skip
    _, said = listened(workers, config, *keys)
    assert "; initialized from the seed: head.*" in said
    ours = weights_of(tmp_path / "run" / "checkpoints" / "step-00000001")
    start = weights_of(dense / "checkpoints" / "step-00000006")
    assert ours.keys() - start.keys() == {"head.weight"}
    assert ours["head.weight"].shape == (3, 32)
    assert 0.01 < ours["head.weight"].std() < 0.03
    for name, value in start.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=2e-3, msg=name)
    kept = tmp_path / "run" / "checkpoints" / "step-00000001" / "tokenizer.json"
    assert (
        kept.read_bytes()
        == (dense / "checkpoints" / "step-00000006" / "tokenizer.json").read_bytes()
    )
    # A second run with the same classes begins with the head as well, another one does not.
    again = (*keys, f"run.folder={tmp_path / 'again'}", f"checkpoint.init_from={tmp_path / 'run'}")
    assert "initialized from the seed" not in listened(workers, config, *again)[1]
    more = made.write(tmp_path / "two.csv", made.rows(8, 0, ("good", "bad")))
    other = (*again, f"data.path={more}", f"run.folder={tmp_path / 'other'}")
    assert "; initialized from the seed: head.*" in listened(workers, config, *other)[1]


@pytest.fixture(scope="module")
def other_tables(tmp_path_factory):
    """Pairs, numbers and choices, each to be told from the words."""
    root = tmp_path_factory.mktemp("others")
    words = [word for each in made.WORDS.values() for word in each.split()]
    rng = np.random.default_rng(0)
    pairs, numbers, choices = [], [], []
    for n in range(48):
        one, other = rng.choice(words, 2, replace=False)
        second = one if n % 2 else other
        pairs.append({"s1": one, "s2": second, "label": "same" if n % 2 else "other"})
        numbers.append({"s1": one, "s2": "x" * int(rng.integers(1, 9)), "label": len(one) / 2})
        right = int(rng.integers(2))
        ends = [one, other] if right == 0 else [other, one]
        choices.append({"s1": one, "c0": ends[0], "c1": ends[1], "label": right})
    for name, table in (("pairs", pairs), ("numbers", numbers), ("choices", choices)):
        made.write(root / name / "train.csv", table[:32])
        made.write(root / name / "dev.csv", table[32:])
    return root


OTHERS = {
    "pairs": ("data.columns={text: s1, pair: s2}", "data.metrics=[accuracy, f1, matthews]"),
    "numbers": ("data.columns={text: s1, pair: s2}", "data.task=regression", "data.metrics=null"),
    "choices": (
        "data.columns={text: s1, choices: [c0, c1]}", "data.task=multiple_choice",
        "data.metrics=[accuracy]",
    ),
}  # fmt: skip


@everyday("name", OTHERS, keep=["choices"])
def test_pairs_numbers_and_choices_train_and_are_scored(
    workers, config, tmp_path, other_tables, name
):
    keys = (f"data.path={other_tables / name}", "train.steps=20", "checkpoint.every=0")
    workers(1).run(run, config, *OTHERS[name], *keys)
    log = records(tmp_path / "run")
    assert np.mean([each["loss"] for each in log[-5:]]) < np.mean([e["loss"] for e in log[:5]])
    result = workers(1).run(evaluation, tmp_path / "run")[0]
    outputs = load_config(tmp_path / "run" / "config.yaml").model.head.num_classes
    if name == "numbers":
        assert outputs == 1
        assert -1 <= result["pearson"] <= 1
        assert result["score"] == pytest.approx((result["pearson"] + result["spearman"]) / 2)
    elif name == "choices":
        assert outputs == 1
        assert result["accuracy"] * 16 == pytest.approx(round(result["accuracy"] * 16))
        assert result["loss"] < 1.5
    else:
        assert outputs == 2
        assert {"accuracy", "f1", "matthews"} <= result.keys()
    assert result["sequences_scored"] == 16


def test_a_head_of_numbers_is_not_taken_for_one_of_choices(workers, config, tmp_path, other_tables):
    """Both have one output, and no names of classes."""
    still = ("train.steps=1", "checkpoint.every=0", "optimizer.learning_rate=1e-12")
    numbers = (*OTHERS["numbers"], f"data.path={other_tables / 'numbers'}", *still)
    workers(1).run(run, config, *numbers)
    start = (*still, f"checkpoint.init_from={tmp_path / 'run'}")
    choices = (*OTHERS["choices"], f"data.path={other_tables / 'choices'}", *start)
    _, said = listened(workers, config, *choices, f"run.folder={tmp_path / 'choices'}")
    assert "; initialized from the seed: head.*" in said
    again = (*numbers, *start, f"run.folder={tmp_path / 'again'}")
    assert "initialized from the seed" not in listened(workers, config, *again)[1]


@pytest.mark.parametrize("limit", ["data.max_length=24", "model.sequence_length=24"])
def test_sequences_that_are_too_long_are_cut_off_counted_and_said(workers, config, tmp_path, limit):
    keys = ("train.steps=1", limit, "checkpoint.every=0")
    _, said = listened(workers, config, *keys)
    longer = sum(len(row["text"].encode()) > 24 for row in made.rows(60, 0))
    assert longer > 5
    assert f"train: {longer} of 60 sequences are longer than 24 tokens and are truncated" in said
    result = workers(1).run(evaluation, tmp_path / "run", split="test")[0]
    assert result["cut_off"] == sum(len(row["text"].encode()) > 24 for row in made.rows(17, 2))


SMALL = {
    "model": {
        "kind": "gpt2", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 64,
        "feed_forward": SPARSE | {"expert_hidden_size": 64}, "head": {"kind": "classification"},
    },
    "train": {"steps": 150, "global_batch_size": 32, "micro_batch_size": 32},
    "optimizer": {"learning_rate": 0.003},
    "schedule": {"kind": "constant"},
    "loss": {"load_balance": 0.01},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "least"), [("sst2", 250, 0.6), ("banking77", 400, 0.1)])
def test_real_data_is_learned_by_the_command_line(shared, tmp_path, name, steps, least):
    """SST-2 has two classes of equal size, Banking77 77: a guess is right in 0.50 and 0.013."""
    source = tmp_path / "table"
    if name == "sst2":
        for ours, theirs in (("train", "train"), ("dev", "dev"), ("test", "test")):
            lines = (shared / "sst2" / f"stsa.binary.{theirs}").read_text(encoding="utf-8")
            table = [line.split(" ", 1) for line in lines.splitlines()]
            made.write(source / f"{ours}.csv", [{"text": t, "label": y} for y, t in table])
        columns = None
    else:
        source = shared / "banking77"
        columns = {"label": "category"}
    texts = tmp_path / "texts.jsonl"
    table = read_tables(str(source), Schema())[0]["train"].column("text")
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in table))
    prepare(str(texts), "train:1000", tmp_path / "tokens")
    section = {
        "kind": "sequences", "path": str(source), "tokenizer": str(tmp_path / "tokens"),
        "held_out": 0.1, "columns": columns,
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    tree = SMALL | {"run": {"folder": str(tmp_path / "run")}, "data": section}
    config.write_text(yaml.safe_dump(tree))

    def polyad(*arguments):
        command = [sys.executable, "-m", "polyad.launch", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    polyad("train", config, f"train.steps={steps}", "checkpoint.keep_best=true")
    best = ("evaluate", tmp_path / "run", "--best", "--json", "-")
    result = json.loads(polyad(*best, "--split", "test"))
    assert result["accuracy"] > least
    assert result["sequences_scored"] == {"sst2": 1821, "banking77": 3080}[name]
    assert len(result["per_class"]) == {"sst2": 2, "banking77": 77}[name]
