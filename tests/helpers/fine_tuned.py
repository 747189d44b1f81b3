"""Small fine-tuned runs, and their models' outputs for one row at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyad.model.smoe.router import Selected
from polyad.parallel.checkpoint.load import find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.tasks.sequences import SequenceTask
from tests.helpers import sequences as made

Rows = list[dict[str, Any]]
Given = dict[str, list[list[float]]]
"""By layer, what each token gives to each expert."""

KINDS: dict[str, dict[str, Any]] = {
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 16},
    "emoe": {"kind": "emoe", "num_experts": 8, "top_k": 2, "blocks": [1]},
    "mumoe": {"kind": "mumoe", "num_experts": [4, 2], "rank": 4},
    "dense": {"kind": "dense"},
}
NAMES = {"good": "good", "bad": "<i>bad</i>", "odd": 'odd"&'}
EVIL = "</pre><script>alert(1)</script> it was awful"


def table(count: int, seed: int) -> Rows:
    """Rows of three classes, and one that looks like markup."""
    rows = [row | {"label": NAMES[row["label"]]} for row in made.rows(count, seed)]
    return [*rows, {"text": EVIL, "label": NAMES["bad"]}]


def one_by_one(
    folder: Path, texts: Sequence[str], *, second: Sequence[str] | None = None
) -> tuple[torch.Tensor, list[Given]]:
    """Logits of each row, and by layer what every token of it gave to each expert: one row at a
    time, without padding, with hooks on the modules that decide."""
    model, config = load_model(find_checkpoint(folder)), load_config(folder / "config.yaml")
    task = SequenceTask.open(config.for_task())
    given: Given = {}

    def hook(name: str) -> Any:
        def keep(module: Any, arguments: Any, output: Any) -> None:
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
    logits: list[torch.Tensor] = []
    tokens: list[Given] = []
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


def counted(
    tokens: Sequence[Given], layer: str, classes: Sequence[int], num_classes: int
) -> np.ndarray[Any, Any]:
    """Experts x classes, by a loop over rows and tokens."""
    counts = np.zeros((len(tokens[0][layer][0]), num_classes))
    for rows, label in zip(tokens, classes, strict=True):
        for token in rows[layer]:
            counts[:, label] += token
    return counts


def others() -> dict[str, Rows]:
    """Pairs, numbers and choices."""
    words = [word for each in made.WORDS.values() for word in each.split()]
    rng = np.random.default_rng(0)
    pairs: Rows = []
    numbers: Rows = []
    choices: Rows = []
    for n in range(32):
        one, other = rng.choice(words, 2, replace=False)
        pairs.append({"s1": one, "s2": one if n % 2 else other, "label": "ab"[n % 2]})
        numbers.append({"s1": one, "s2": "x" * int(rng.integers(1, 9)), "label": n / 4})
        right = int(rng.integers(2))
        ends = [one, other] if right == 0 else [other, one]
        choices.append({"s1": one, "c0": ends[0], "c1": ends[1], "label": right})
    return {"pairs": pairs, "numbers": numbers, "choices": choices}


SETTINGS: dict[str, dict[str, Any]] = {
    "pairs": {"columns": {"text": "s1", "pair": "s2"}},
    "numbers": {"columns": {"text": "s1", "pair": "s2"}, "task": "regression"},
    "choices": {"columns": {"text": "s1", "choices": ["c0", "c1"]}, "task": "multiple_choice"},
}
