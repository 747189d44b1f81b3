"""Small tables of labelled sequences, and a tokenizer of bytes."""

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import models, pre_tokenizers

from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT, byte_level

WORDS = {
    "good": "fine lovely bright warm happy clever",
    "bad": "dull awful grim cold sad stupid",
    "odd": "strange curious weird uncanny bizarre queer",
}
FILLING = ("the", "a", "film", "story", "plot", "it", "was", "is", "and", "so", "very", "scene")


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json whose tokens are bytes, and the end of a text."""
    vocabulary = {token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = byte_level(models.BPE(vocabulary | {END_OF_TEXT: len(vocabulary)}, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    path = folder / "tokenizer.json"
    path.write_text(backend.to_str())
    return path


def rows(count: int, seed: int, classes: Sequence[str] = tuple(WORDS)) -> list[dict[str, Any]]:
    """Texts of different lengths, each with a word that tells its class."""
    random_ = random.Random(seed)
    made = []
    for number in range(count):
        label = classes[number % len(classes)]
        words = random_.choices(FILLING, k=random_.randint(0, 9))
        words.insert(random_.randint(0, len(words)), random_.choice(WORDS[label].split()))
        made.append({"text": " ".join(words), "label": label})
    return made


def write(path: Path, table: Sequence[dict[str, Any]]) -> Path:
    """Writes a .csv or .tsv file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(table[0])
        writer = csv.DictWriter(file, names, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(table)
    return path


def folder_of(root: Path, train: int = 60, validation: int = 21, test: int = 17) -> Path:
    """A folder with a table for each split."""
    for seed, (split, count) in enumerate((("train", train), ("dev", validation), ("test", test))):
        write(root / f"{split}.csv", rows(count, seed))
    return root
