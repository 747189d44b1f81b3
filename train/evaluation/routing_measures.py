"""What `polyad evaluate --specialization` says of any router: entropies, and information on labels.

Of images and sequences labels are their classes, of text classes of tokens; images with attributes
have none, and of them only the entropies are known.

Shapes: B samples of a batch, R rows of it, N tokens, T tokens of a window.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyad.data.evaluation import evaluation_batches
from polyad.data.sequences.samples import SequenceBatch
from polyad.parallel import comm
from polyad.train.console import Progress
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.experts.report.sequence_pass import groups_of
from polyad.train.experts.routing_measures import RoutingMeasures, TokenLabels
from polyad.train.tasks.cross_entropy import cross_entropy
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import OneDevice
from polyad.train.tasks.text import TextTask


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
    measures = RoutingMeasures(layers, len(group_A), device)
    measures.by_class(groups, group_A)
    measures.by_output(batch_size * choices)
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
    measures = RoutingMeasures(layers, len(probe), world.device)
    labels = TokenLabels(tokenizer, stream, len(probe), probe.about()["sequence_length"])
    measures.by_token(labels.sorted_by)
    measures.by_output(batch_size)
    report = _progress(len(probe), "windows", world)
    done, tokens = world.data_parallel_rank, torch.zeros(1, dtype=torch.float64)
    with deciding(model, layers) as decisions:
        for ids_BT, counted_BT in probe.batches(batch_size, world):
            size = len(ids_BT)
            number_B = torch.arange(size) + done * size
            number_B = number_B.clamp_max(len(probe) - 1)  # what only fills up does not count
            model(ids_BT)
            measures.add_text(decisions, *labels(ids_BT.cpu(), counted_BT.cpu(), number_B))
            tokens += counted_BT.sum().cpu()
            done += world.data_parallel_size
            report(min(1.0, done * size / len(probe)))
    return measures, int(comm.sum_over_samples(tokens.to(world.device), world))


def _progress(total: int, unit: str, world: comm.World) -> Any:
    return Progress("measure routing", total, unit) if world.is_main else lambda share: None
