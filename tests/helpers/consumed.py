"""Runs that record on which samples their steps are actually trained."""

import hashlib
import json
from pathlib import Path
from unittest import mock

import torch

from polyad.parallel import comm
from polyad.train.tasks import language
from polyad.train.train import main


def digest(row_T: torch.Tensor) -> str:
    """Returns a digest of a sample's token ids."""
    return hashlib.sha256(row_T.numpy().tobytes()).hexdigest()[:16]


def run_and_note(config: Path, notes: Path, *overrides: str) -> int:
    """Runs `polyad train`; each data-parallel rank writes digests of its micro-batches, in
    order."""
    losses = language.text_losses
    taken: list[list[str]] = []

    def noting(model, batch, *others):
        tokens_BT1 = torch.cat([batch.input_ids_BT[:, :1], batch.target_ids_BT], 1)
        taken.append([digest(row) for row in tokens_BT1])
        return losses(model, batch, *others)

    with mock.patch.object(language, "text_losses", noting):
        steps = main(config, overrides).step
    notes.mkdir(exist_ok=True)
    (notes / f"{comm.rank():03d}").write_text(json.dumps(taken))
    return steps


def global_batches(notes: Path, global_batch_size: int) -> list[list[str]]:
    """The samples of each step: micro-batch j of a step is that of rank j % D."""
    ranks = [json.loads(path.read_text()) for path in sorted(notes.iterdir())]
    flat = [sample for turn in zip(*ranks, strict=True) for micro in turn for sample in micro]
    return [flat[i : i + global_batch_size] for i in range(0, len(flat), global_batch_size)]
