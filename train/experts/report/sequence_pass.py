"""The pass over labelled sequences: see `class_pass.py`, which says what it finds.

Shapes: B samples, C choices of a sample (1 without choices), R = B C sequences, T tokens of the
longest, A all sequences that are read, N real tokens of a batch.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from polyad.data.evaluation import evaluation_batches
from polyad.data.sequences.encoding import form_of
from polyad.data.sequences.samples import SequenceBatch
from polyad.train.experts.probing import RoutedLayer, deciding
from polyad.train.experts.report.class_pass import ClassPass, Described, Outcomes
from polyad.train.experts.routing_measures import RoutingMeasures
from polyad.train.tasks.benchmark_metrics import METRICS
from polyad.train.tasks.cross_entropy import cross_entropy
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import OneDevice

MOST_CHARACTERS = 300
"""Of a text that is shown; of a choice a quarter."""


def read_sequences(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    task: SequenceTask,
    split: str,
    *,
    limit: int | None,
    examples: int,
    batch_size: int,
    progress: Callable[[float], None] = lambda share: None,
) -> ClassPass:
    """Reads sequences, all or evenly by their length.

    Args:
        model: in evaluation mode, on one device.
        layers: those whose experts are counted.
        task: of the model.
        split: `train`, `validation` or `test`.
        limit: about how many tokens are read; None: all.
        examples: samples with the largest loss that are kept.
        batch_size: samples in a forward pass.
        progress: is told the share done after each batch.

    Raises:
        ConfigError: outputs or coefficients are not finite.
    """
    device = next(model.parameters()).device
    rows = task.data.held_out(split, samples_of(task, split, limit))
    row_of = np.array([rows.row_of(number) for number in range(len(rows))])
    labels_N = task.data.encoded(split).labels_N
    assert labels_N is not None
    groups, group_A = groups_of(task, labels_N[row_of])
    experts = RoutingMeasures(layers, len(group_A), device)
    experts.by_class(groups, torch.from_numpy(group_A))
    experts.by_output(batch_size * task.data.choices)
    outcomes, done = Outcomes(), 0
    with deciding(model, layers) as decisions, torch.inference_mode():
        for read, counts_B in evaluation_batches(rows, len(rows), batch_size):
            # Without what only fills the last batch up.
            batch = SequenceBatch(*(each[counts_B].to(device) for each in read))
            outputs_BK, losses_B = task.examined(OneDevice(model, cross_entropy), batch)
            number_B = torch.from_numpy(row_of)[batch.numbers_B.cpu()]
            if task.schema.task == "regression":
                outcomes.add_numbers(number_B, batch.labels_B, outputs_BK[:, 0], losses_B)
            else:
                outcomes.add(number_B, batch.labels_B, outputs_BK.softmax(-1), losses_B)
            mask_RT = batch.mask_BCT.flatten(0, 1)
            row_N = mask_RT.nonzero()[:, 0]
            number_R = torch.arange(len(mask_RT), device=device) + done * task.data.choices
            experts.add(decisions, row_N, number_R)
            done += len(batch.labels_B)
            progress(done / len(rows))
    found = outcomes.result(
        names=task.data.class_names or [f"choice {n}" for n in range(task.data.choices)],
        numbers=task.schema.task == "regression",
        examples=examples,
        describe=lambda row: described(task, split, row),
        measure=lambda labels, predicted: {
            name: METRICS[name](labels, predicted) for name in task.schema.metrics
        },
    )
    division = experts.result()
    return ClassPass(
        task=task.schema.task,
        data=task.name,
        split=split,
        unit=task.unit.name,
        of_samples=task.data.size(split),
        groups=groups,
        layers=division.by_label["class"],
        division=division,
        **found,
    )


def samples_of(task: SequenceTask, split: str, limit: int | None) -> int:
    """How many samples are read so that they have about as many tokens as are allowed.

    Args:
        task: of the data.
        split: of it.
        limit: tokens; None: all.
    """
    rows = task.data.encoded(split)
    if limit is None:
        return len(rows)
    mean = float(rows.pieces.lengths_R.mean()) * task.data.choices
    return min(len(rows), max(1, math.ceil(limit / mean)))


def groups_of(
    task: SequenceTask, labels_N: npt.NDArray[np.generic]
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """By what experts are counted: the class of a sequence; whether a choice is the right one; or
    in which third of all numbers its own is.

    Args:
        task: of the data.
        labels_N: of the samples that are read.

    Returns:
        Names, and the group of each sequence [A], choice by choice.
    """
    kind = task.schema.task
    if kind == "classification":
        return list(task.data.class_names), labels_N.astype(np.int64)
    if kind == "multiple_choice":
        right_NC = labels_N[:, None] == np.arange(task.data.choices)
        return ["wrong choices", "right choices"], right_NC.reshape(-1).astype(np.int64)
    low, high = np.quantile(labels_N.astype(np.float64), (1 / 3, 2 / 3))
    names = [f"up to {low:.3g}", f"{low:.3g} to {high:.3g}", f"above {high:.3g}"]
    return names, np.searchsorted((low, high), labels_N.astype(np.float64))


def described(task: SequenceTask, split: str, row: int) -> Described:
    """A row as text, from the tokens that the model reads.

    Args:
        task: of the data.
        split: of it.
        row: in the split.
    """
    pieces, choices = task.data.encoded(split).pieces, task.data.choices
    form = form_of(task.model.kind, task.data.tokenizer)
    two = task.schema.pair is not None or bool(task.schema.choices)
    firsts, seconds = [], []
    for sequence in range(row * choices, (row + 1) * choices):
        start, stop = pieces.starts_R1[sequence : sequence + 2]
        ids, begin = (
            pieces.ids_S[start : stop - len(form.after)].tolist(),
            pieces.second_R[sequence],
        )
        end_of_first = begin - len(form.between) if two else len(ids)
        firsts.append(task.data.tokenizer.decode(ids[len(form.before) : end_of_first]))
        seconds.append(task.data.tokenizer.decode(ids[begin:]) if two else "")
    if task.schema.choices:
        names = [f"{n}: {short(text, MOST_CHARACTERS // 4)}" for n, text in enumerate(seconds)]
        return Described([short(firsts[0])], names)
    texts = [firsts[0], seconds[0]] if two else firsts
    return Described([short(text) for text in texts], task.data.class_names)


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text of at most so many characters, with an ellipsis where it was longer.

    Args:
        text: any.
        most: characters.
    """
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
