"""What `polyad evaluate --specialization` says of any router: entropies, and information on labels.

Of images and sequences labels are their classes, of text classes of tokens; images with attributes
have none, and of them only the entropies are known.

Shapes: B samples of a batch, R rows of it, N tokens, T tokens of a window.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.evaluation import evaluation_batches
from data.sequences.samples import SequenceBatch
from parallel import comm
from train.console import Progress
from train.experts.gate_entropy import GateEntropies
from train.experts.probing import Decision, RoutedLayer, deciding
from train.experts.report.by_class import (
    SHUFFLES,
    ExpertCounts,
    ExpertsByClass,
    LevelByClass,
    given,
)
from train.experts.report.sequence_pass import groups_of
from train.experts.token_classes import Labelling, Shifts, labellings
from train.tasks.cross_entropy import cross_entropy
from train.tasks.images import ImageClassification
from train.tasks.sequences import SequenceTask
from train.tasks.task import OneDevice
from train.tasks.text import TextTask


class RoutingMeasures:
    """Adds up what the routers of a model decide.

    Args:
        layers: those that are looked at.
        samples: images, sequences or windows that all processes read.
        world: this process.
    """

    def __init__(self, layers: list[RoutedLayer], samples: int, world: comm.World) -> None:
        self.layers, self.samples, self._world = layers, samples, world
        self._entropies = GateEntropies(layers, samples, world.device)
        self._counts: dict[str, ExpertCounts] = {}

    def by_class(self, groups: list[str], group_A: Tensor) -> None:
        """Counts by the class of each sample, too.

        Args:
            groups: names of the classes.
            group_A: of each sample.
        """
        device = self._world.device
        self._classes = ExpertsByClass(self.layers, groups, group_A, device)
        self._counts["class"] = self._classes

    def by_token(self, sorted_by: list[Labelling]) -> None:
        """Counts by classes of tokens, too.

        Args:
            sorted_by: the ways to sort them.
        """
        for each in sorted_by:
            self._counts[each.name] = ExpertCounts(
                self.layers, each.classes, self.samples, self._world.device
            )

    def add(
        self, decisions: Mapping[str, Decision], row_N: Tensor | None, number_R: Tensor
    ) -> None:
        """Adds a batch of images or sequences.

        Args:
            decisions: of each layer, for tokens that are real.
            row_N: of each of them the row that it belongs to; None: as many of each row.
            number_R: that of each row among all samples.
        """
        for name, decision in decisions.items():
            rows_N = row_N
            if rows_N is None:
                each = len(decision.levels[0]) // len(number_R)
                rows_N = torch.arange(len(number_R), device=number_R.device).repeat_interleave(each)
            self._entropies.add(name, decision, number_R[rows_N])
            if "class" in self._counts:
                self._classes.add(name, decision, rows_N, number_R)

    def add_text(
        self, decisions: Mapping[str, Decision], labels: dict[str, Tensor], number_BT: Tensor
    ) -> None:
        """Adds a batch of text.

        Args:
            decisions: of each layer.
            labels: by the name of a labelling, right and shifted ones [P, B, T].
            number_BT: that of each token's window; -1: it does not count.
        """
        number_N = number_BT.flatten()
        for name, decision in decisions.items():
            self._entropies.add(name, decision, number_N)
            given_NS = given(decision)
            for labelling, label_PBT in labels.items():
                self._counts[labelling].count(name, given_NS, label_PBT.flatten(1), number_N)

    def result(self) -> dict[str, list[dict[str, Any]]]:
        """Of each layer its levels, as JSON values; every process calls it."""

        def summed(values: Tensor) -> Tensor:
            return comm.sum_over_samples(values, self._world)

        entropies = self._entropies.result(summed)
        labels = {name: counts.result(summed) for name, counts in self._counts.items()}
        return {
            layer.name: [
                each.to_json()
                | {
                    "labels": {
                        name: _of_labels(found[layer.name][n]) for name, found in labels.items()
                    }
                }
                for n, each in enumerate(entropies[layer.name])
            ]
            for layer in self.layers
        }


def _of_labels(level: LevelByClass) -> dict[str, Any]:
    return {
        **{name: each.to_json() for name, each in level.measures.items()},
        "information_bits_by_chance": level.by_chance,
        "experts": level.experts,
        "classes": level.groups,
        "counts": level.counts_SY.tolist(),
    }


def classes_of(task: ImageClassification | SequenceTask, split: str) -> tuple[list[str], Tensor]:
    """Names of classes, and that of each sample of a split in the order of its rows.

    Args:
        task: of one class each.
        split: `train`, `validation` or `test`.
    """
    if isinstance(task, ImageClassification):
        labels = np.asarray(task.data.split(split).labels)
        return list(task.data.manifest.class_names), torch.as_tensor(labels).long()
    rows = task.data.held_out(split, None)
    labels_N = task.data.encoded(split).labels_N
    assert labels_N is not None
    row_of = np.array([rows.row_of(number) for number in range(len(rows))])
    groups, group_A = groups_of(task, labels_N[row_of])
    return groups, torch.from_numpy(group_A)


@torch.inference_mode()
def measure_sequences(
    model: nn.Module,
    layers: list[RoutedLayer],
    task: SequenceTask,
    split: str,
    batch_size: int,
    world: comm.World,
) -> RoutingMeasures:
    """Reads all sequences of a split.

    Args:
        model: in evaluation mode, whole on each process.
        layers: that are looked at.
        task: of the data.
        split: of it.
        batch_size: samples in a forward pass.
        world: this process.
    """
    rows, choices, device = task.data.held_out(split, None), task.data.choices, world.device
    groups, group_A = classes_of(task, split)
    measures = RoutingMeasures(layers, len(group_A), world)
    measures.by_class(groups, group_A)
    report = _progress(len(rows), task.unit.short, world)
    done = 0
    with deciding(model, layers) as decisions:
        for read, counts_B in evaluation_batches(
            rows,
            len(rows),
            batch_size,
            rank=world.data_parallel_rank,
            ranks=world.data_parallel_size,
        ):
            batch = SequenceBatch(*(each[counts_B].to(device) for each in read))
            if len(batch.labels_B):
                task.examined(OneDevice(model, cross_entropy), batch)
                number_BC = batch.numbers_B.unsqueeze(1) * choices + torch.arange(
                    choices, device=device
                )
                row_N = batch.mask_BCT.flatten(0, 1).nonzero()[:, 0]
                measures.add(decisions, row_N, number_BC.flatten())
            done += len(counts_B) * world.data_parallel_size
            report(min(1.0, done / len(rows)))
    return measures


@torch.inference_mode()
def measure_text(
    model: nn.Module,
    layers: list[RoutedLayer],
    task: TextTask[Any],
    split: str,
    batch_size: int,
    world: comm.World,
) -> tuple[RoutingMeasures, int]:
    """Reads all tokens of a split, in windows without overlap.

    Args:
        model: in evaluation mode, whole on each process.
        layers: that are looked at.
        task: of the data.
        split: of it.
        batch_size: windows in a forward pass.
        world: this process.

    Returns:
        The measures, and how many tokens they are of.
    """
    probe = task.probe(task.units_of(split), split)
    stream, tokenizer = task.split(split)[0], task.data.parts[0].data.tokenizer()
    measures = RoutingMeasures(layers, len(probe), world)
    length = probe.about()["sequence_length"]
    sorted_by = labellings(tokenizer, stream, length)
    measures.by_token(sorted_by)
    shifts = Shifts(len(probe), length, SHUFFLES)
    report = _progress(len(probe), "windows", world)
    done, tokens = world.data_parallel_rank, torch.zeros(1, dtype=torch.float64)
    with deciding(model, layers) as decisions:
        for ids_BT, counted_BT in probe.batches(batch_size, world):
            size, here_BT = len(ids_BT), counted_BT.cpu()
            number_B = torch.arange(size) + done * size
            number_B = number_B.clamp_max(len(probe) - 1)  # what only fills up does not count
            model(ids_BT)
            labels = {
                each.name: shifts(each.of(ids_BT.cpu()).where(here_BT, -1), number_B)
                for each in sorted_by
            }
            number_BT = number_B.unsqueeze(1).expand(-1, ids_BT.shape[1]).where(here_BT, -1)
            measures.add_text(
                decisions,
                {name: label_PBT.to(world.device) for name, label_PBT in labels.items()},
                number_BT.to(world.device),
            )
            tokens += here_BT.sum()
            done += world.data_parallel_size
            report(min(1.0, done * size / len(probe)))
    return measures, int(comm.sum_over_samples(tokens.to(world.device), world))


def _progress(total: int, unit: str, world: comm.World) -> Any:
    return Progress("measure routing", total, unit) if world.is_main else lambda share: None
