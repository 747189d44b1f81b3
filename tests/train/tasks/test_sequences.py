"""Labelled sequences as a task: it trains, is scored, ends early, and refuses what does not fit."""

import csv
import json

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

from polyad.data.sequences.config import Schema
from polyad.data.sequences.tables import read_tables
from polyad.data.text.prepare import prepare
from polyad.parallel.checkpoint.load import Checkpoint, best_checkpoint, find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers import sequences as made
from tests.helpers.everyday import everyday
from tests.helpers.fine_tuned import SETTINGS, others
from tests.helpers.runs import (
    evaluated,
    evaluation,
    newest,
    records,
    run,
    run_and_listen,
    weights_of,
    write_config,
)
from tests.helpers.started import polyad
from tests.train.tasks.conftest import SPARSE

pytestmark = pytest.mark.distributed

STILL = "optimizer.learning_rate=1e-12"


@pytest.fixture
def config(tmp_path, task_config):
    return task_config(tmp_path, "sequences")


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_scores_of_all_and_of_each_domain_are_those_by_hand(workers, task_run, task_data, padding):
    folder = task_run("sequences")
    for split, name in (("test", "test"), ("validation", "dev")):
        options = {"split": split, "overrides": ("evaluation.batch_size=5",)}
        options["overrides"] += (f"data.padding={padding}",)
        ((result, text),) = workers(1).run(evaluated, folder, **options)
        with (task_data / "table" / f"{name}.csv").open(newline="") as file:
            expected = scored_by_hand(folder, list(csv.DictReader(file)))
        assert result["per_domain"].keys() == expected.keys() - {"all"}
        for domain, scores in expected.items():
            ours = result if domain == "all" else result["per_domain"][domain]
            assert {key: ours[key] for key in scores} == pytest.approx(scores, abs=1e-6), domain
        right = sum(each["recall"] * each["sequences"] for each in result["per_class"].values())
        assert right / result["sequences_scored"] == pytest.approx(result["accuracy"])
    last = records(folder)[-1]
    for domain in ("books", "games"):
        ours = last[f"validation_accuracy/{domain}"]
        assert ours == result["per_domain"][domain]["accuracy"]
    assert "  games" in text


def scored_by_hand(folder, rows):
    """The scores of each domain, and of all, by a plain loop over rows, without padding."""
    checkpoint = find_checkpoint(folder)
    names = json.loads((checkpoint / "classes.json").read_text())
    assert names == sorted(made.WORDS)
    task = SequenceTask.open(load_config(folder / "config.yaml").for_task())
    model, groups = load_model(checkpoint), {}
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([task.data.tokenizer.encode(row["text"])])).logits[0]
        for domain in ("all", row["from"]):
            groups.setdefault(domain, []).append((logits, names.index(row["label"])))
    scores = {}
    for domain, pairs in groups.items():
        logits, labels = torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
        found = logits.argmax(-1)
        accuracy = accuracy_score(labels, found)
        f1 = f1_score(labels, found, average="macro", zero_division=0)
        scores[domain] = {
            "sequences" if domain != "all" else "sequences_scored": len(pairs),
            "accuracy": accuracy, "macro_f1": f1, "score": (accuracy + f1) / 2,
            "loss": float(cross_entropy(logits, labels)),
        }  # fmt: skip
    return scores


@everyday("asynchronous", ["false", "true"], keep=["false"])
def test_a_run_ends_early_and_its_best_checkpoint_stays(workers, config, tmp_path, asynchronous):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    keys = (
        "train.steps=20", "checkpoint.every=1", "evaluation.every=1", "checkpoint.keep_best=true",
        "checkpoint.keep_last=1", f"checkpoint.asynchronous={asynchronous}", STILL,
    )  # fmt: skip

    def left():
        """The best checkpoint, and all."""
        folders = (tmp_path / "run" / "checkpoints").glob("step-*")
        best = Checkpoint(best_checkpoint(tmp_path / "run")).state
        return best.step, sorted(int(path.name[5:]) for path in folders)

    three = (*keys, "evaluation.patience=3")
    assert "early stopping after step 4: 3 validations" in listened(workers, config, *three)[1]
    log = records(tmp_path / "run")
    assert [each["step"] for each in log] == [1, 2, 3, 4]
    assert left() == (1, [1, 4])
    state = Checkpoint(best_checkpoint(tmp_path / "run")).state
    assert (state.best_score, state.best_step) == (log[0]["validation_score"], 1)
    # The same command finds nothing to do; with more patience the run goes on.
    steps, said = listened(workers, config, *three)
    assert steps == 4
    assert "nothing left to do: early stopping after step 4" in said
    four = (*keys, "evaluation.patience=4")
    assert workers(1).run(run, config, *four) == [5]
    assert left() == (1, [1, 5])
    # Scores of other samples are not compared with those before, and patience begins anew.
    assert workers(1).run(run, config, *four, "evaluation.max_windows=1") == [9 + 1]
    assert left()[0] == 6


def test_a_best_checkpoint_that_is_asked_for_later_is_the_best_from_there_on(
    workers, config, tmp_path
):
    keys = ("evaluation.every=1", STILL, "checkpoint.keep_last=1")
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
    dense = newest(trained("dense"))
    theirs = load_config(dense / "config.yaml").model.model_dump(mode="json")
    model = json.dumps(theirs | {"head": {"kind": "classification"}})
    keys = (f"model={model}", f"checkpoint.init_from={dense}", "data.tokenizer=null",
            "train.steps=1", "checkpoint.every=0", STILL)  # fmt: skip
    _, said = listened(workers, config, *keys)
    assert "; initialized from the seed: head.*" in said
    begun = tmp_path / "run" / "checkpoints" / "step-00000001"
    ours, start = weights_of(begun), weights_of(dense)
    head = ours.pop("head.weight")
    assert head.shape == (3, 32)
    assert 0.01 < head.std() < 0.03
    assert ours.keys() == start.keys()
    for name, value in start.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=name)
    assert (begun / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    # A second run with the same classes begins with the head as well, another one does not.
    again = (*keys, f"run.folder={tmp_path / 'again'}", f"checkpoint.init_from={tmp_path / 'run'}")
    assert "initialized from the seed" not in listened(workers, config, *again)[1]
    two = [row | {"from": "x"} for row in made.rows(8, 0, ("good", "bad"))]
    other = f"data.path={made.write(tmp_path / 'two.csv', two)}"
    words = (*again, other, f"run.folder={tmp_path / 'other'}")
    assert "; initialized from the seed: head.*" in listened(workers, config, *words)[1]


METRICS = {"pairs": ["accuracy", "f1", "matthews"], "numbers": None, "choices": ["accuracy"]}


def of_others(task_config, folder, name, **changes):
    """A configuration with a table of pairs, numbers or choices."""
    rows = others()[name]
    made.write(folder / name / "train.csv", rows[:24])
    made.write(folder / name / "dev.csv", rows[24:])
    keys = SETTINGS[name] | {"metrics": METRICS[name], "path": str(folder / name)}
    given = {f"data__{key}": value for key, value in keys.items()}
    return task_config(folder, "sequences", **given | changes)


@everyday("name", METRICS, keep=["choices"])
def test_pairs_numbers_and_choices_train_and_are_scored(workers, task_config, tmp_path, name):
    workers(1).run(run, of_others(task_config, tmp_path, name, train__steps=20))
    losses = [each["loss"] for each in records(tmp_path / "run")]
    assert sum(losses[-5:]) < sum(losses[:5])
    result = workers(1).run(evaluation, tmp_path / "run")[0]
    outputs = load_config(tmp_path / "run" / "config.yaml").model.head.num_classes
    assert outputs == (2 if name == "pairs" else 1)
    if name == "numbers":
        assert -1 <= result["pearson"] <= 1
        assert result["score"] == pytest.approx((result["pearson"] + result["spearman"]) / 2)
    else:
        assert set(METRICS[name]) <= result.keys()
        assert result["accuracy"] * 8 == pytest.approx(round(result["accuracy"] * 8))
    assert result["sequences_scored"] == 8


def test_a_head_of_numbers_is_not_taken_for_one_of_choices(workers, task_config, tmp_path):
    """Both have one output, and no names of classes."""
    still = ("train.steps=1", STILL)
    numbers = of_others(task_config, tmp_path, "numbers")
    workers(1).run(run, numbers, *still)
    still += (f"checkpoint.init_from={tmp_path / 'run'}",)
    again = (*still, f"run.folder={tmp_path / 'again'}")
    assert "initialized from the seed" not in listened(workers, numbers, *again)[1]
    choices = of_others(task_config, tmp_path, "choices", run__folder=str(tmp_path / "choices-run"))
    assert "; initialized from the seed: head.*" in listened(workers, choices, *still)[1]


@pytest.mark.parametrize("limit", ["data.max_length=24", "model.sequence_length=24"])
def test_sequences_that_are_too_long_are_cut_off_counted_and_said(workers, config, tmp_path, limit):
    _, said = listened(workers, config, "train.steps=1", limit)
    longer, of_test = (
        sum(len(row["text"].encode()) > 24 for row in made.rows(count, seed))
        for count, seed in ((60, 0), (17, 2))
    )
    assert longer > 5
    assert f"train: {longer} of 60 sequences are longer than 24 tokens and are truncated" in said
    result = workers(1).run(evaluation, tmp_path / "run", split="test")[0]
    assert result["cut_off"] == of_test


SMALL = {
    "model": {
        "kind": "gpt2", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 64,
        "feed_forward": SPARSE | {"expert_hidden_size": 64}, "head": {"kind": "classification"},
    },
    "train__global_batch_size": 32, "train__micro_batch_size": 32, "loss__load_balance": 0.01,
    "optimizer__learning_rate": 0.003, "log__trackers": [], "evaluation": {}, "checkpoint": {},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "least"), [("sst2", 250, 0.6), ("banking77", 400, 0.1)])
def test_real_data_is_learned_by_the_command_line(shared, tmp_path, name, steps, least):
    """SST-2 has two classes of equal size, Banking77 77: a guess is right in 0.50 and 0.013."""
    source, columns = shared / "banking77", {"label": "category"}
    if name == "sst2":
        source, columns = tmp_path / "table", None
        for split in ("train", "dev", "test"):
            lines = (shared / "sst2" / f"stsa.binary.{split}").read_text(encoding="utf-8")
            table = [line.split(" ", 1) for line in lines.splitlines()]
            made.write(source / f"{split}.csv", [{"text": t, "label": y} for y, t in table])
    texts = tmp_path / "texts.jsonl"
    table = read_tables(str(source), Schema())[0]["train"].column("text")
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in table))
    prepare(str(texts), "train:1000", tmp_path / "tokens")
    config = write_config(
        tmp_path / "config.yaml", source, data__kind="sequences", data__held_out=0.1,
        data__tokenizer=str(tmp_path / "tokens"), data__columns=columns, **SMALL,
    )  # fmt: skip

    keys = (f"train.steps={steps}", "checkpoint.keep_best=true")
    trained = polyad("train", config, *keys, timeout=1800)
    assert trained.returncode == 0, trained.stderr
    best = ("evaluate", tmp_path / "run", "--best", "--json", "-")
    result = json.loads(polyad(*best, "--split", "test").stdout)
    assert result["accuracy"] > least
    assert result["sequences_scored"] == {"sst2": 1821, "banking77": 3080}[name]
    assert len(result["per_class"]) == {"sst2": 2, "banking77": 77}[name]
