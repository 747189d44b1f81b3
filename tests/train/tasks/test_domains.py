"""Training on some domains and scoring the one left out, of images and of sequences."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

from polyad.data.images.dataset import ImageData
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers import images as pictures
from tests.helpers import sequences as made
from tests.helpers.runs import evaluated, evaluation, records, refusal, run

pytestmark = pytest.mark.distributed

TRAINING = {
    "seed": 3,
    "train": {"steps": 12, "global_batch_size": 8, "micro_batch_size": 4, "precision": "fp32"},
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "checkpoint": {"every": 6},
    "evaluation": {"every": 6},
    "log": {"trackers": []},
}  # fmt: skip
VIT = {
    "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 2, "hidden_size": 16,
    "num_heads": 2, "feed_forward": {"kind": "emoe", "num_experts": 4, "top_k": 2, "blocks": [1]},
}  # fmt: skip
GPT = {
    "kind": "gpt2", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 64,
    "feed_forward": {"kind": "dense"}, "head": {"kind": "classification"},
}  # fmt: skip
SIZES = {
    domain: {label: 9 + 2 * number for label in pictures.CLASSES}
    for number, domain in enumerate(pictures.DOMAINS)
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("domains")
    pictures.domain_tree(root / "all", SIZES)
    return root


@pytest.fixture
def config(tmp_path, data):
    path = tmp_path / "images.yaml"
    path.write_text(yaml.safe_dump(TRAINING | {
        "run": {"folder": str(tmp_path / "run")},
        "model": VIT,
        "data": {
            "kind": "images", "path": str(data / "all"), "normalization": "half", "domains": True,
            "held_out": 0.2,
            "evaluation_resize": 1.0, "leave_out": ["grey"],
        },
    }))  # fmt: skip
    return path


def by_hand(run_folder, files):
    """Accuracy, loss and number of images of each domain, by a plain loop over the files."""
    model = load_model(run_folder / "checkpoints" / "step-00000012")
    found: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for file in files:
        pixels = torch.tensor(np.asarray(Image.open(file).convert("RGB")))
        x_BCHW = (pixels.permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5
        with torch.no_grad():
            logits = model(x_BCHW).logits[0]
        label = pictures.CLASSES.index(file.parent.name)
        found.setdefault(file.parent.parent.name, []).append((logits, label))
    scores = {}
    for domain, rows in found.items():
        logits = torch.stack([each for each, _ in rows])
        labels = torch.tensor([label for _, label in rows])
        scores[domain] = {
            "images": len(rows),
            "top1": float((logits.argmax(-1) == labels).float().mean()),
            "loss": float(cross_entropy(logits, labels)),
        }
    return scores


def test_images_are_scored_by_domain_and_two_processes_are_one(workers, config, data, tmp_path):
    one = workers(1)
    assert one.run(run, config) == [12]
    folder = tmp_path / "run"
    settings = load_config(config).data
    held = [
        Path(split.name_of(n))
        for split in [ImageData.open(settings).split("validation")]
        for n in range(len(split))
    ]
    whole = sorted((data / "all" / "grey").rglob("*.png"))
    for split, files in (("validation", held), ("test", whole)):
        expected = by_hand(folder, files)
        results = [
            *one.run(evaluation, folder, split=split, overrides=("evaluation.batch_size=5",)),
            *workers(2).run(evaluation, folder, split=split),
        ]
        for result in results:
            assert list(result["per_domain"]) == sorted(expected)
            assert result["left_out"] == ["grey"]
            assert result["images_scored"] == len(files)
            for domain, scores in expected.items():
                ours = result["per_domain"][domain]
                assert ours["images"] == scores["images"]
                assert ours["top1"] == pytest.approx(scores["top1"])
                assert ours["loss"] == pytest.approx(scores["loss"], abs=1e-5)
            mean = sum(d["top1"] * d["images"] for d in result["per_domain"].values()) / len(files)
            assert result["top1"] == pytest.approx(mean)
        first, *others = (result["per_domain"] for result in results)
        for other in others:
            for domain, scores in first.items():
                assert other[domain] == pytest.approx(scores, abs=1e-6)
    # What training tells of its validation is what evaluation finds; a class of errors the table.
    last, (found, text) = records(folder)[-1], one.run(evaluated, folder)[0]
    assert {key for key in last if key.startswith("validation_top1")} == {
        "validation_top1", *(f"validation_top1/{d}" for d in ("blurred", "inverted", "plain")),
    }  # fmt: skip
    for domain, scores in found["per_domain"].items():
        assert last[f"validation_loss/{domain}"] == pytest.approx(scores["loss"], abs=1e-6)
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("by domain"))
    assert lines[start].split()[2:] == ["images", "top-1", "top-5", "loss", "calibration", "error"]
    names = [line.split()[0] for line in lines[start + 1 : start + 4]]
    assert names == ["blurred", "inverted", "plain"]
    assert len({len(line) for line in lines[start : start + 4]}) == 1
    assert "grey (the test split)" in lines[start + 4]


def test_some_images_of_validation_are_scored_by_domain(workers, config, tmp_path):
    workers(1).run(run, config, "evaluation.max_windows=4", "train.steps=1")
    told = {k for k in records(tmp_path / "run")[-1] if k.startswith("validation_top1/")}
    assert 0 < len(told) <= 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('data.leave_out=["gray"]', "'gray' is not a domain of data.path"),
        ("data.leave_out=[]", "data.leave_out: "),
        ("data.leave_out=grey", "data.leave_out: "),
    ],
)
def test_bad_keys_are_one_line_and_status_2(workers, config, override, said):
    assert said in refusal(workers(1), config, override)


@pytest.fixture
def sequences(tmp_path):
    """A configuration of rows with domains."""
    made.byte_tokenizer(tmp_path)
    for seed, (name, count) in enumerate((("train", 60), ("dev", 25), ("test", 13))):
        drawn = random.Random(seed).choices(("books", "films", "games"), k=count)
        pairs = zip(made.rows(count, seed), drawn, strict=True)
        made.write(tmp_path / "table" / f"{name}.csv", [row | {"from": d} for row, d in pairs])
    path = tmp_path / "sequences.yaml"
    path.write_text(yaml.safe_dump(TRAINING | {
        "run": {"folder": str(tmp_path / "run")},
        "model": GPT,
        "data": {
            "kind": "sequences", "path": str(tmp_path / "table"), "columns": {"domain": "from"},
            "tokenizer": str(tmp_path / "tokenizer.json"), "metrics": ["accuracy", "macro_f1"],
        },
    }))  # fmt: skip
    return path


@pytest.mark.slow
def test_sequences_are_scored_by_domain_and_two_processes_are_one(workers, sequences, tmp_path):
    one = workers(1)
    assert one.run(run, sequences) == [12]
    folder = tmp_path / "run"
    for split, name in (("validation", "dev"), ("test", "test")):
        with (tmp_path / "table" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        expected = sequences_by_hand(folder, rows)
        results = [
            *one.run(evaluation, folder, split=split),
            *workers(2).run(evaluation, folder, split=split),
        ]
        for result in results:
            assert result["sequences_scored"] == len(rows)
            assert result["per_domain"].keys() == expected.keys()
            for domain, scores in expected.items():
                ours = result["per_domain"][domain]
                assert ours == pytest.approx(scores, abs=1e-5), (split, domain)
        assert results[0]["per_domain"].keys() == results[1]["per_domain"].keys()
    last, (found, text) = records(folder)[-1], one.run(evaluated, folder)[0]
    for domain in ("books", "games"):
        assert last[f"validation_accuracy/{domain}"] == found["per_domain"][domain]["accuracy"]
    assert "  games" in text


def sequences_by_hand(run_folder, rows):
    """The scores of each domain by a plain loop over rows, one at a time."""
    checkpoint = Checkpoint(run_folder / "checkpoints" / "step-00000012")
    parsed = load_config(run_folder / "config.yaml")
    task = SequenceTask.open_held_out(parsed.for_task(), checkpoint)
    model, names = load_model(checkpoint.folder), sorted(made.WORDS)
    scores = {}
    for domain in {row["from"] for row in rows}:
        mine = [row for row in rows if row["from"] == domain]
        with torch.no_grad():
            ids = [torch.tensor([task.data.tokenizer.encode(row["text"])]) for row in mine]
            logits = torch.stack([model(each).logits[0] for each in ids])
        labels = torch.tensor([names.index(row["label"]) for row in mine])
        predicted = logits.argmax(-1)
        accuracy = accuracy_score(labels, predicted)
        f1 = f1_score(labels, predicted, average="macro", zero_division=0)
        scores[domain] = {
            "sequences": len(mine),
            "accuracy": accuracy,
            "macro_f1": f1,
            "score": (accuracy + f1) / 2,
            "loss": float(cross_entropy(logits, labels)),
        }
    return scores
