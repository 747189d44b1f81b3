"""Small data, a configuration and a finished run of every task."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyad.data.text.tokenizers.files import VOCABULARY_FILE
from tests.helpers import images, sequences
from tests.helpers.bert import SPECIAL, prepare_pieces
from tests.helpers.runs import run, write_config

CUES = [word for words in sequences.WORDS.values() for word in words.split()]
SPARSE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
VIT = SIZES | {"kind": "vit", "image_size": 8, "patch_size": 4}
CLASSES = {"kind": "classification"}
NETWORK = {"convolutions": [4], "batch_norm": [0], "hidden_sizes": [24, 16]}
MODELS: dict[str, dict[str, Any]] = {
    "images": VIT | {"feed_forward": SPARSE | {"placement": [1]}},
    "networks": {"kind": "mixture", "image_size": 8, "num_experts": 3, "gate": "attentive",
                 "expert": NETWORK, "gate_network": NETWORK},
    "attributes": VIT | {
        "num_layers": 1, "head": {"kind": "mumoe", "num_experts": [4], "rank": 4}},
    "sequences": SIZES | {
        "kind": "gpt2", "sequence_length": 64, "feed_forward": SPARSE, "head": CLASSES},
    "pairs": SIZES | {
        "kind": "bert", "sequence_length": 16, "num_segments": 3, "head": CLASSES,
        "feed_forward": SPARSE | {"graph": "similarity"}},
    "masked text": SIZES | {"kind": "bert", "sequence_length": 32},
}  # fmt: skip


@pytest.fixture(scope="session")
def task_data(tmp_path_factory, texts) -> Path:
    """A folder with data for every task."""
    root = tmp_path_factory.mktemp("tasks")
    sizes = {domain: 9 + 2 * number for number, domain in enumerate(images.DOMAINS)}
    images.domain_tree(
        root / "domains", {name: dict.fromkeys(images.CLASSES, n) for name, n in sizes.items()}
    )
    images.class_folders(root / "classes", 20)
    images.celeba(root / "celeba", 150)
    sequences.byte_tokenizer(root)
    for seed, (name, count) in enumerate((("train", 60), ("dev", 21), ("test", 17))):
        drawn = random.Random(seed).choices(("books", "films", "games"), k=count)
        pairs = zip(sequences.rows(count, seed), drawn, strict=True)
        sequences.write(root / "table" / f"{name}.csv", [row | {"from": d} for row, d in pairs])
    vocabulary = [*SPECIAL, *sequences.FILLING, *CUES]
    padding = [f"[unused{number}]" for number in range(61 - len(vocabulary))]
    (root / "words").mkdir()
    (root / "words" / VOCABULARY_FILE).write_text("\n".join([*vocabulary, *padding]) + "\n")
    draw, rows = np.random.default_rng(0), []
    for number in range(48):
        one, other = draw.choice(CUES, 2, replace=False)
        second = [one if number % 2 else other, *draw.choice(sequences.FILLING, number % 4)]
        rows.append({"s1": one, "s2": " ".join(second), "label": ("other", "same")[number % 2]})
    sequences.write(root / "pairs" / "train.csv", rows[:32])
    sequences.write(root / "pairs" / "dev.csv", rows[32:])
    prepare_pieces(texts, root / "pieces")
    return root


@pytest.fixture(scope="session")
def task_config(task_data) -> Callable[..., Path]:
    """Writes the configuration of a task, by name, into a folder; keywords are as those of
    `write_config`."""
    augmentation = {"mixup": 0.2, "cutmix": 0.5, "crop_scale": [0.5, 1.0]}
    data: dict[str, dict[str, Any]] = {
        "images": {
            "kind": "images", "path": f"{task_data}/domains", "normalization": "half",
            "domains": True, "leave_out": ["grey"], "held_out": 0.2, "evaluation_resize": 1.0,
            "augmentation": augmentation,
        },
        "networks": {"kind": "images", "path": f"{task_data}/classes", "held_out": 0.3},
        "attributes": {
            "kind": "attributes", "path": f"{task_data}/celeba", "normalization": "half",
            "label_smoothing": 0.1,
            "augmentation": {"mixup": 0.2, "crop_scale": None, "flip": False},
        },
        "sequences": {
            "kind": "sequences", "path": f"{task_data}/table", "group_by_length": 4,
            "tokenizer": f"{task_data}/tokenizer.json", "metrics": ["accuracy", "macro_f1"],
            "columns": {"domain": "from"},
        },
        "pairs": {
            "kind": "sequences", "path": f"{task_data}/pairs", "tokenizer": f"{task_data}/words",
            "columns": {"text": "s1", "pair": "s2"},
        },
        "masked text": {"kind": "masked_text", "path": f"{task_data}/pieces"},
    }  # fmt: skip

    def write(folder: Path, name: str, **changes: Any) -> Path:
        keys = {
            "model": dict(MODELS[name]), "train__steps": 12, "checkpoint__every": 6,
            "evaluation": {"every": 6}, "log__trackers": [],
        } | {f"data__{key}": value for key, value in data[name].items()}  # fmt: skip
        return write_config(folder / "config.yaml", task_data, **keys | changes)

    return write


@pytest.fixture(scope="session")
def task_run(workers, task_config, tmp_path_factory) -> Callable[[str], Path]:
    """Gives the folder of a finished run of 12 steps by one process, by name of the task.

    For reading alone: other tests get the same one.
    """

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        assert workers(1).run(run, task_config(folder, name)) == [12]
        return folder / "run"

    return make
