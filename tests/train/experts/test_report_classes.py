"""The report of a fine-tuned run, against plain loops over its rows without padding."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import entropy
from sklearn.metrics import confusion_matrix, mutual_info_score, precision_recall_fscore_support
from torch.nn.functional import cross_entropy

from launch.cli import run as polyad
from model.smoe.selection import Selected
from parallel.checkpoint.checkpoint import Checkpoint, best_checkpoint, find_checkpoint
from parallel.weights import load_model
from tests.helpers import sequences as made
from tests.helpers.pages import Page
from tests.helpers.runs import evaluation, records, run
from train.config.run import load_config
from train.errors import ConfigError
from train.exchange.convert import convert
from train.exchange.split import Splitting
from train.experts.probing import Decision, RoutedLayer
from train.experts.report.by_class import ExpertsByClass, mutual_information
from train.experts.report.command import report
from train.experts.report.sequence_pass import read_sequences
from train.tasks.sequences import SequenceTask

pytestmark = pytest.mark.distributed

KINDS = {
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16},
    "emoe": {"kind": "emoe", "num_experts": 8, "top_k": 2, "blocks": [1]},
    "mumoe": {"kind": "mumoe", "num_experts": [4, 2], "rank": 4},
    "dense": {"kind": "dense"},
}
NAMES = {"good": "good", "bad": "<i>bad</i>", "odd": 'odd"&'}
EVIL = "</pre><script>alert(1)</script> it was awful"
COLUMNS = {"text": "text", "label": "label"}


def table(count, seed):
    rows = [row | {"label": NAMES[row["label"]]} for row in made.rows(count, seed)]
    return [*rows, {"text": EVIL, "label": NAMES["bad"]}]


@pytest.fixture(scope="module")
def train(workers, tmp_path_factory):
    """Trains a small model on tables, and gives the run's folder."""

    def trained(name, train_rows, held_out, steps=4, data=None, processes=1, **changes):
        root = tmp_path_factory.mktemp(name)
        made.byte_tokenizer(root)
        made.write(root / "table" / "train.csv", train_rows)
        made.write(root / "table" / "dev.csv", held_out)
        tree = {
            "seed": 3,
            "run": {"folder": str(root / "run")},
            "model": {
                "kind": "gpt2", "num_layers": 2, "hidden_size": 16, "num_heads": 2,
                "sequence_length": 96, "head": {"kind": "classification"},
                "feed_forward": KINDS.get(name, KINDS["smoe"]),
            },
            "data": {
                "kind": "sequences", "path": str(root / "table"),
                "tokenizer": str(root / "tokenizer.json"), **(data or {}),
            },
            "train": {
                "steps": steps, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32",
            },
            "optimizer": {"learning_rate": 0.02},
            "evaluation": {"every": 2},
            "log": {"trackers": []},
            **changes,
        }  # fmt: skip
        (root / "config.yaml").write_text(yaml.safe_dump(tree))
        workers(processes).run(run, root / "config.yaml")
        return root / "run"

    return trained


@pytest.fixture(scope="module")
def runs(train):
    found = {}

    def make(kind):
        if kind not in found:
            found[kind] = train(kind, table(60, 0), table(20, 1))
        return found[kind]

    return make


def one_by_one(folder, texts, *, second=None):
    """Logits of each row, and by layer what every token of it gave to each expert: one row at a
    time, without padding, with hooks on the modules that decide."""
    model, config = load_model(find_checkpoint(folder)), load_config(folder / "config.yaml")
    task = SequenceTask.open(config.for_task())
    given = {}

    def hook(name):
        def keep(module, arguments, output):
            if isinstance(output, Selected):
                experts = arguments[0].shape[-1]
                rows = [
                    [float(e in ids) for e in range(experts)]
                    for ids in output.expert_ids_NK.tolist()
                ]
            else:
                rows = torch.cat(output.coefficients, -1).tolist()
            given[name] = rows

        return keep

    for number, block in enumerate(model.blocks):
        part = block.feed_forward
        decides = part.router.selection if hasattr(part, "router") else getattr(part, "gate", None)
        if decides is not None:
            decides.register_forward_hook(hook(f"blocks.{number}.feed_forward"))
    logits, tokens = [], []
    for row, text in enumerate(texts):
        ids = task.data.tokenizer.encode(text)
        if second is not None:
            end = [task.data.tokenizer.end_of_text_id]
            ids = [*ids, *end, *task.data.tokenizer.encode(second[row])]
        with torch.no_grad():
            logits.append(model(torch.tensor([ids])).logits[0])
        assert all(len(rows) == len(ids) for rows in given.values())
        tokens.append(dict(given))
    return torch.stack(logits), tokens


def counted(tokens, layer, classes, num_classes):
    """Experts x classes, by a loop over rows and tokens."""
    counts = np.zeros((len(tokens[0][layer][0]), num_classes))
    for rows, label in zip(tokens, classes, strict=True):
        for token in rows[layer]:
            counts[:, label] += token
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_a_loop_over_rows(runs, workers, tmp_path, kind):
    folder, rows = runs(kind), table(20, 1)
    result = report(folder, output=tmp_path / "page.html", top=5)
    found = result["classes"]
    names = sorted(NAMES.values())
    labels = [names.index(row["label"]) for row in rows]
    logits, tokens = one_by_one(folder, [row["text"] for row in rows])
    predicted = logits.argmax(-1).tolist()
    matrix = confusion_matrix(labels, predicted, labels=range(3))
    assert found["confusion_matrix"] == matrix.tolist()
    expected = precision_recall_fscore_support(labels, predicted, labels=range(3), zero_division=0)
    assert list(found["per_class"]) == names
    for scores, *theirs in zip(found["per_class"].values(), *expected, strict=True):
        ours = [scores[key] or 0.0 for key in ("precision", "recall", "f1", "sequences")]
        assert ours == pytest.approx(theirs)
    frequent = {(c["true"], c["predicted"]): c["samples"] for c in found["confusions"]}
    assert frequent == {
        (names[t], names[p]): matrix[t, p]
        for t in range(3)
        for p in range(3)
        if t != p and matrix[t, p]
    }
    losses = cross_entropy(logits, torch.tensor(labels), reduction="none")
    shown = found["largest_losses"]
    assert [each["loss"] for each in shown] == pytest.approx(losses.topk(5).values.tolist())
    for each in shown:
        row = each["number"]
        assert each["texts"] == [rows[row]["text"]]
        assert (each["true"], each["predicted"]) == (rows[row]["label"], names[predicted[row]])
        probabilities = logits[row].softmax(-1)
        assert each["probability"] == pytest.approx(probabilities.max().item(), abs=1e-5)
        of_true = probabilities[labels[row]].item()
        assert each["probability_of_true"] == pytest.approx(of_true, abs=1e-5)
    assert list(found["experts"]) == list(tokens[0])
    for layer, levels in found["experts"].items():
        counts = counted(tokens, layer, labels, 3)
        ours = np.concatenate([level["counts"] for level in levels])
        np.testing.assert_allclose(ours, counts, rtol=1e-4, atol=1e-4)
        if kind != "mumoe":
            length = sum(len(row["text"].encode()) for row in rows)
            assert ours.sum() == 2 * length  # top-2, and padding is no token
        for level in levels:
            table_SY = np.array(level["counts"])
            parts = (table_SY.sum(1), table_SY.sum(0), table_SY.flatten())
            of_experts, of_classes, of_both = (entropy(part, base=2) for part in parts)
            bits = of_experts + of_classes - of_both
            assert level["information_bits"] == pytest.approx(bits, abs=1e-9)
            if kind != "mumoe":  # scikit-learn rounds what is no whole number
                nats = mutual_info_score(None, None, contingency=table_SY)
                assert level["information_bits"] == pytest.approx(nats / np.log(2), abs=1e-9)
    scored = workers(1).run(evaluation, folder)[0]
    assert found["loss"] == pytest.approx(scored["loss"])
    assert found["accuracy"] == pytest.approx(scored["accuracy"])
    assert found["per_class"] == scored["per_class"]


def test_the_page_says_the_same_and_what_looks_like_markup_is_text(runs, tmp_path):
    result = report(runs("smoe"), output=tmp_path / "page.html", top=21)
    again = report(runs("smoe"), output=tmp_path / "again.html", top=21)
    text = (tmp_path / "page.html").read_text()
    assert text == (tmp_path / "again.html").read_text()
    assert result["classes"] == again["classes"]
    page = Page(text)
    assert not page.tags & {"script", "iframe", "object", "link", "img"}
    assert "<script>" not in text
    assert "<i>bad" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; it was awful" in text
    assert "&lt;i&gt;bad&lt;/i&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    for heading in ("Scores of each class", "Confusion", "Experts by class", "Validation score"):
        assert f">{heading}<" in text
    for layer in result["classes"]["experts"].values():
        assert f"<td>{layer[0]['information_bits']:.4f}</td>" in text
    for scores in result["classes"]["per_class"].values():
        assert f"<td>{scores['f1']:.3f}</td>" in text
    log = records(runs("smoe"))
    assert result["validation_score"] == log[-1]["validation_score"]


def test_one_layer_or_nothing_is_read_if_it_is_asked_for(runs, tmp_path):
    output = tmp_path / "page.html"
    found = report(runs("smoe"), output=output, layers=["1"])["classes"]
    assert list(found["experts"]) == ["blocks.1.feed_forward"]
    assert report(runs("smoe"), output=output, tokens=0)["classes"] is None
    assert 'id="classes"' not in output.read_text()
    assert report(runs("smoe"), output=output, tokens=300)["classes"]["sequences"] < 15
    (dense,) = [report(runs("dense"), output=output)]
    assert dense["classes"]["experts"] == {}
    assert "Experts by class" not in output.read_text()
    with pytest.raises(ConfigError, match=r"has no split 'test'.*--tokens 0 reads no sequences"):
        report(runs("smoe"), output=output, split="test")


def test_the_best_checkpoint_is_read_and_named(train, tmp_path, capfd):
    """With a rate of next to nothing all validations are the same: the first is the best."""
    folder = train(
        "best", table(20, 0), table(8, 1), optimizer={"learning_rate": 1e-12},
        checkpoint={"every": 2, "keep_best": True},
    )  # fmt: skip
    assert best_checkpoint(folder).name == "step-00000002"
    output = tmp_path / "page.html"
    found = report(folder, output=output)
    assert (found["checkpoint_step"], found["checkpoint_is_best"]) == (2, True)
    assert "step 2 (the best validation of the run)" in output.read_text()
    found = report(folder, output=output, checkpoint=4)
    assert (found["checkpoint_step"], found["checkpoint_is_best"]) == (4, False)
    assert "the best validation" not in output.read_text()
    command = ["report", str(folder), "--output", str(output)]
    assert polyad([*command, "--best", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["checkpoint_step"] == 2
    assert polyad([*command, "--best", "--checkpoint", "4"]) == 2
    assert "--best: is not allowed with --checkpoint 4" in capfd.readouterr().err
    unmarked = tmp_path / "unmarked"
    shutil.copytree(folder, unmarked)
    (unmarked / "checkpoints" / "best").unlink()
    assert report(unmarked)["checkpoint_step"] == 4
    capfd.readouterr()
    assert polyad(["report", str(unmarked), "--best"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no checkpoint is marked as the best" in line


def test_many_classes_stand_with_the_worst_first(train, tmp_path):
    rows = [row | {"label": n % 25} for n, row in enumerate(made.rows(100, 0))]
    folder = train("many", rows[:50], rows[50:], steps=2)
    found = report(folder, output=tmp_path / "page.html")["classes"]
    assert found["confusion_matrix"] is None
    assert [c["samples"] for c in found["confusions"]] == sorted(
        (c["samples"] for c in found["confusions"]), reverse=True
    )
    text = (tmp_path / "page.html").read_text()
    Page(text)
    assert "the other 5 classes" in text
    assert "Most frequent confusions" in text
    assert "The expert that leans most to each class" in text
    for level in (levels[0] for levels in found["experts"].values()):
        counts = np.array(level["counts"])
        expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
        lift = np.where(expected >= 5, counts / expected, 0).max(0)
        ours = {each["class"]: each["lift"] for each in level["of_each_class"]}
        names = found["expert_classes"]
        assert ours == pytest.approx({n: x for n, x in zip(names, lift, strict=True) if x})
    (body,) = [part for part in text.split("<figure") if "Scores of each class" in part]
    shown = [cell.partition("<")[0] for cell in body.split('<td class="name">')[1:]]
    f1 = [found["per_class"][name]["f1"] for name in shown]
    assert len(f1) == 25
    assert f1 == sorted(f1)


@pytest.mark.parametrize("start", ["dense", pytest.param("split", marks=pytest.mark.slow)])
def test_adapters_of_a_dense_model_and_of_a_split_one(
    train, workers, trained, tmp_path_factory, tmp_path, start
):
    base = trained("dense")
    theirs = load_config(base / "config.yaml").model
    if start == "split":
        base = tmp_path_factory.mktemp("split") / "start"
        convert(trained("dense"), base, "polyad", Splitting("num_experts=8,top_k=4,blocks=[1]"))
        theirs = Checkpoint(base).model_config()
    folder = train(
        "lora", table(20, 0), table(8, 1), steps=2, data={"tokenizer": None},
        model=theirs.model_dump(mode="json") | {"head": {"kind": "classification"}},
        checkpoint={"init_from": str(base)},
        adapt={"lora": {"rank": 4, "trained": ["head.*"]}},
        optimizer={"learning_rate": 0.02, "weight_decay": 0.0},
    )  # fmt: skip
    found = report(folder, output=tmp_path / "page.html")["classes"]
    scored = workers(1).run(evaluation, folder)[0]
    assert found["loss"] == pytest.approx(scored["loss"])
    assert found["per_class"] == scored["per_class"]
    layers = {"split": ["blocks.1.feed_forward"], "dense": []}[start]
    assert list(found["experts"]) == layers


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_read_on_one(train, tmp_path):
    rows = table(20, 1)
    folder = train(
        "parallel", table(60, 0), rows, processes=2, parallel={"expert_parallel_size": 2}
    )
    found = report(folder, output=tmp_path / "page.html")["classes"]
    names = sorted(NAMES.values())
    labels = [names.index(row["label"]) for row in rows]
    logits, tokens = one_by_one(folder, [row["text"] for row in rows])
    matrix = confusion_matrix(labels, logits.argmax(-1).tolist(), labels=range(3))
    assert found["confusion_matrix"] == matrix.tolist()
    for layer, (level,) in found["experts"].items():
        np.testing.assert_array_equal(level["counts"], counted(tokens, layer, labels, 3))


def test_weights_that_are_not_finite_are_one_line(runs, tmp_path):
    folder = runs("smoe")
    config = load_config(folder / "config.yaml")
    task = SequenceTask.open(config.for_task())
    model = load_model(find_checkpoint(folder))
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    with pytest.raises(ConfigError, match="the outputs of the model are not finite"):
        read_sequences(model, [], task, "validation", limit=None, examples=1, batch_size=4)


def others():
    """Pairs, numbers and choices."""
    words = [word for each in made.WORDS.values() for word in each.split()]
    rng = np.random.default_rng(0)
    pairs, numbers, choices = [], [], []
    for n in range(32):
        one, other = rng.choice(words, 2, replace=False)
        pairs.append({"s1": one, "s2": one if n % 2 else other, "label": "ab"[n % 2]})
        numbers.append({"s1": one, "s2": "x" * int(rng.integers(1, 9)), "label": n / 4})
        right = int(rng.integers(2))
        ends = [one, other] if right == 0 else [other, one]
        choices.append({"s1": one, "c0": ends[0], "c1": ends[1], "label": right})
    return {"pairs": pairs, "numbers": numbers, "choices": choices}


SETTINGS = {
    "pairs": {"columns": {"text": "s1", "pair": "s2"}},
    "numbers": {"columns": {"text": "s1", "pair": "s2"}, "task": "regression"},
    "choices": {"columns": {"text": "s1", "choices": ["c0", "c1"]}, "task": "multiple_choice"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_pairs_numbers_and_choices(train, tmp_path, name):
    rows = others()[name]
    train_rows, held_out = rows[:16], rows[16:]
    folder = train(name, train_rows, held_out, steps=2, data=SETTINGS[name])
    found = report(folder, output=tmp_path / "page.html", top=3)["classes"]
    Page((tmp_path / "page.html").read_text())
    first = [row["s1"] for row in held_out]
    labels = [row["label"] for row in held_out]
    if name == "choices":
        seconds = [(row["c0"], row["c1"]) for row in held_out]
        logits, tokens = one_by_one(
            folder, [text for text in first for _ in range(2)],
            second=[choice for each in seconds for choice in each],
        )  # fmt: skip
        logits = logits.view(-1, 2)
        losses = cross_entropy(logits, torch.tensor(labels), reduction="none")
        groups = [int(choice == label) for label in labels for choice in range(2)]
        assert found["expert_classes"] == ["wrong choices", "right choices"]
        predicted = logits.argmax(-1).tolist()
        assert found["confusion_matrix"] == confusion_matrix(labels, predicted).tolist()
        for each in found["largest_losses"]:
            row = each["number"]
            assert each["true"] == f"{labels[row]}: {seconds[row][labels[row]]}"
            assert each["predicted"] == f"{predicted[row]}: {seconds[row][predicted[row]]}"
            assert each["texts"] == [first[row]]
    else:
        seconds = [row["s2"] for row in held_out]
        logits, tokens = one_by_one(folder, first, second=seconds)
        for each in found["largest_losses"]:
            assert each["texts"] == [first[each["number"]], seconds[each["number"]]]
    if name == "pairs":
        groups = ["ab".index(label) for label in labels]
        losses = cross_entropy(logits, torch.tensor(groups), reduction="none")
        assert found["expert_classes"] == ["a", "b"]
    elif name == "numbers":
        losses = (logits[:, 0] - torch.tensor(labels)).square()
        groups = thirds(labels)
        assert found["expert_classes"] == ["up to 5.25", "5.25 to 6.5", "above 6.5"]
        assert found["per_class"] == {}
        assert {"Pearson", "Spearman"} <= found.keys()
        assert all(each["probability"] is None for each in found["largest_losses"])
    shown = [each["loss"] for each in found["largest_losses"]]
    assert shown == pytest.approx(losses.topk(3).values.tolist(), rel=1e-4)
    for layer, (level,) in found["experts"].items():
        counts = counted(tokens, layer, groups, len(found["expert_classes"]))
        np.testing.assert_array_equal(level["counts"], counts)


def thirds(labels):
    """Of 16 different numbers in order the edges are the 6th and the 11th."""
    edges = sorted(labels)[5], sorted(labels)[10]
    return [(label > edges[0]) + (label > edges[1]) for label in labels]


def test_information_by_hand():
    # Two experts that tell two classes apart wholly: one bit; that know nothing: none.
    assert mutual_information(np.array([[8.0, 0.0], [0.0, 8.0]])) == pytest.approx(1.0)
    assert mutual_information(np.array([[3.0, 6.0], [1.0, 2.0]])) == pytest.approx(0.0, abs=1e-12)
    # p = [[1/2, 1/4], [0, 1/4]], of experts 3/4 and 1/4, of classes 1/2 and 1/2:
    # 1/2 log2(4/3) + 1/4 log2(2/3) + 1/4 log2 2.
    expected = 0.5 * np.log2(4 / 3) + 0.25 * np.log2(2 / 3) + 0.25
    assert mutual_information(np.array([[2.0, 1.0], [0.0, 1.0]])) == pytest.approx(expected)
    assert mutual_information(np.zeros((2, 3))) == 0.0


def test_chance_is_that_of_whole_sequences():
    """An expert that follows the sequence tells the class of a few sequences even by chance: as
    much as shuffled labels; one that follows the class tells more."""
    layer = RoutedLayer(name="blocks.0.feed_forward", levels=(2,))
    rows, length = 64, 10
    generator = torch.Generator().manual_seed(1)
    label_A = torch.randint(2, (rows,), generator=generator)
    row_N = torch.arange(rows).repeat_interleave(length)
    for expert_A, low, high in (
        (torch.randint(2, (rows,), generator=generator), 0.0, 0.06),
        (label_A, 0.9, 1.0),
    ):
        ids_N1 = expert_A[row_N].unsqueeze(-1)
        selected = Selected(torch.ones_like(ids_N1, dtype=torch.float32), ids_N1)
        counts = ExpertsByClass([layer], ["a", "b"], label_A)
        decision = Decision(levels=[torch.zeros(rows * length, 2)], selected=selected)
        counts.add(layer.name, decision, row_N, 0)
        (level,) = counts.result()[layer.name]
        assert level.counts_SY.sum() == rows * length
        assert low <= level.information <= high
        # Of 640 tokens that were each on its own it would be 1 / (2 ln 2 640) = 0.0011 bits.
        assert 0.003 < level.by_chance < 0.05
    (most, *_) = level.leaning(4)
    assert most.lift == pytest.approx(1 / most.share_of_all)
    assert (most.share, most.tokens) == (
        1.0,
        level.counts_SY.max(0)[level.groups.index(most.group)],
    )
