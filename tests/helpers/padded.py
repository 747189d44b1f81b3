"""Training on sequences of unequal lengths, called in worker processes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyad.data.sequences.samples import SequenceBatch
from polyad.model.output import RoutingStats
from polyad.parallel import comm
from polyad.parallel.checkpoint.writing import save
from polyad.train.loop.device import Prefetch
from polyad.train.loop.statistics import routing_record
from polyad.train.loop.step import train_step
from polyad.train.tasks.losses import cross_entropy
from tests.helpers.training import GLOBAL_BATCH, Case, build_engine, model_yaml

LENGTHS = (16, 1, 9, 2, 3, 16, 5, 1)
"""Tokens of the sequences of every global batch."""


def padded_batch(step: int, rows: slice) -> SequenceBatch:
    """Some sequences of a step, padded to the longest of them."""
    generator = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(61, (GLOBAL_BATCH, max(LENGTHS)), generator=generator)
    labels_B = torch.randint(3, (GLOBAL_BATCH,), generator=generator)
    length_B1 = torch.tensor(LENGTHS[rows]).unsqueeze(1)
    longest = int(length_B1.max())
    mask_BT = torch.arange(longest) < length_B1
    ids_BT = ids_BT[rows, :longest].where(mask_BT, 0)
    number_B = torch.arange(GLOBAL_BATCH)[rows]
    mask_B1T = mask_BT.unsqueeze(1)
    return SequenceBatch(
        ids_BT.unsqueeze(1), mask_B1T, torch.zeros_like(mask_B1T), labels_B[rows], number_B
    )


def class_losses(model: Any, batch: SequenceBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """The loss of each sequence."""
    logits_BK, routing = model(batch.ids_BCT.flatten(0, 1), mask_BT=batch.mask_BCT.flatten(0, 1))
    return cross_entropy(logits_BK, batch.labels_B), routing


def z_losses_of_sequences(case: Case) -> list[float]:
    """The z-loss of the first layer for each sequence of the first step, without padding."""
    engine, _ = build_engine(case)
    found = []
    for row in range(GLOBAL_BATCH):
        batch = padded_batch(0, slice(row, row + 1))
        assert bool(batch.mask_BCT.all())
        _, routing = class_losses(engine, batch)
        assert routing[0].z_loss is not None
        found.append(routing[0].z_loss.item())
    return found


def train_on_padded(case: Case) -> dict[str, Any]:
    """Trains a case on them; its losses, gradient norms and records of routing."""
    engine, world = build_engine(case)
    comm.seed_random(5, 0, world)
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "routing": []}
    size = case.micro_batch
    for step in range(case.last_step):
        firsts = range(0, GLOBAL_BATCH, size)[world.data_parallel_rank :: world.data_parallel_size]
        batches = [padded_batch(step, slice(first, first + size)) for first in firsts]
        ahead = Prefetch(iter(batches), world.device)
        outcome = train_step(
            engine, class_losses, ahead, len(batches), case.learning_rate, losses=case.losses
        )
        found["losses"].append(outcome.loss)
        found["norms"].append(outcome.result.grad_norm)
        found["routing"].append(routing_record(outcome.routing))
    if case.save_to:
        save(engine, Path(case.save_to), case.last_step, state={}, config_yaml=model_yaml(case))
    return found
