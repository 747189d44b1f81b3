"""The loss of text without experts of some layers, also of a decoder that is larger than memory.

Such a decoder is read block by block. The text passes through all blocks once, and the inputs of
the blocks of interest are kept. Then all windows without an expert of one block start there and
pass through the later ones, which are read once more for each block of interest.

Shapes: B windows of a batch, R pairs of a window and a set of experts, T tokens of a window, D
width, E sets.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyad.parallel import comm
from polyad.parallel.weights import Streamed, parts_of
from polyad.train.experts.actions import CONTRIBUTION, Action
from polyad.train.experts.knockout import KnockOut, harmed
from polyad.train.experts.probing import deciding
from polyad.train.experts.token_classes import ClassColumns
from polyad.train.reading import Subject, summing
from polyad.train.results import Progress, Tables
from polyad.train.streaming import activations_of, on_device, run_block, run_blocks
from polyad.train.tasks.samples import TextSamples, losses

LABEL = "leave out experts"
TITLES = {
    "experts": "change in loss without each expert, in nats per token, over all tokens and over "
    "its own; * excludes 0",
    "harmed": "token classes whose loss rises beyond noise without the expert",
}
"""Lines above tables of a text."""


@torch.inference_mode()
def knock_out(
    subject: Subject,
    sets: Sequence[Sequence[Sequence[int]]],
    actions: Sequence[Action] = (),
    world: comm.World | None = None,
) -> list[KnockOut]:
    """Measures the loss without experts of some layers; all processes call this.

    Args:
        subject: text that a GPT-2 or a BERT reads, and the layers, in different blocks.
        sets: for each layer the sets of experts to treat together, mostly of one.
        actions: what to do to the experts of each layer; empty: remove them.
        world: the processes that share the text; None: this one reads all.
    """
    model, layers, text, batch_size = subject
    assert isinstance(text, TextSamples)
    columns = ClassColumns(text)
    actions = actions or [CONTRIBUTION] * len(layers)
    without = {
        layer.block: KnockOut(
            *(model, layer, of_layer, columns.classes), windows=text.rows, action=action
        )
        for layer, of_layer, action in zip(layers, sets, actions, strict=True)
    }
    if isinstance(model, Streamed):
        _block_by_block(model, without, text, columns, batch_size)
    else:
        for forward_pass in subject.read(world, label=LABEL, blocks=[*without]):
            passages, label_JBP = forward_pass.batch, columns(forward_pass.batch)
            loss_BP = losses(model, forward_pass.output, passages)
            for block, each in without.items():
                decision = forward_pass.of_all_tokens[each.layer.name]
                each.add(forward_pass.entering[block], passages, label_JBP, loss_BP, decision)
    return [each.result(summing(world)) for each in without.values()]


def knockout_tables(layers: Sequence[KnockOut], text: TextSamples) -> Tables:
    """The same as tables.

    Args:
        layers: the result of `knock_out`.
        text: what was read.
    """
    import pandas as pd

    tables = [each.tables() for each in layers]
    frames = {
        name: pd.concat([each[name] for each in tables], ignore_index=True) for name in tables[0]
    }
    frames["harmed"] = harmed(frames["classes"])
    every = frames["classes"].iloc[0]  # all tokens
    facts = {
        "windows_read": text.rows,
        "sequence_length": text.length,
        "tokens_scored": int(every["tokens"]),
        "loss": float(every["loss"]),
        "tokens_recomputed": sum(each.windows_again for each in layers) * text.length,
    }
    return Tables(facts=facts, frames=frames, titles=TITLES)


def _block_by_block(
    model: Streamed,
    without: Mapping[int, KnockOut],
    text: TextSamples,
    columns: ClassColumns,
    batch_size: int,
) -> None:
    # Of each batch, by block: inputs [B, T, D], and which tokens use which sets [B, T, E].
    batches = [batch for _, batch in text.batches(batch_size, 0, 1, torch.device("cpu"))]
    blocks, end = len(model.blocks), parts_of(model)[-1]
    entering: dict[int, list[Tensor]] = {block: [] for block in without}
    uses: dict[int, list[Tensor]] = {block: [] for block in without}
    layers, loss_of = [each.layer for each in without.values()], list[Tensor]()
    with activations_of(model, [batch.ids_BT.int() for batch in batches]) as activations:
        if 0 in without:
            entering[0] = [x_BTD.clone() for x_BTD in activations]
        with deciding(model, layers) as decisions:
            report = Progress("read experts", blocks, "blocks")
            for block, number in run_blocks(model, activations, report=report):
                if block in without:
                    decision = decisions.pop(without[block].layer.name)
                    has_BTE = without[block].uses(decision, len(activations[number]))
                    uses[block].append(has_BTE.cpu())
                if block + 1 in without:
                    entering[block + 1].append(activations[number].clone())
        with model.part(*end):
            for batch, x_BTD in zip(batches, activations, strict=True):
                passages = on_device(batch, model.device)
                loss_of.append(losses(model, x_BTD.to(model.device), passages))
                for each in without.values():
                    each.sums.add_whole(columns(passages), passages.number_B, loss_of[-1])
    total, done = sum(blocks - block + 1 for block in without), itertools.count(1)
    report = Progress(LABEL, total, "blocks")
    for block, each in without.items():
        pairs: list[tuple[int, Tensor, Tensor]] = []  # batch, sets and windows of each output
        outputs: list[Tensor] = []
        for part in range(block, blocks):
            with model.part(*parts_of(model)[1 + part]):
                for number, x_RTD in enumerate(outputs):
                    outputs[number] = run_block(model, part, x_RTD).cpu()
                for number, has_BTE in enumerate(uses[block] if part == block else ()):
                    x_BTD = entering[block][number].to(model.device)
                    for row_R, window_R in each.pairs(has_BTE.to(model.device)):
                        with each.without(row_R):
                            outputs.append(run_block(model, block, x_BTD[window_R]).cpu())
                        pairs.append((number, row_R, window_R))
            report(next(done) / total)
        with model.part(*end):
            for (number, row_R, window_R), x_RTD in zip(pairs, outputs, strict=True):
                passages = on_device(batches[number], model.device).rows(window_R)
                loss_RP = losses(model, x_RTD.to(model.device), passages).double()
                change_RP = loss_RP - loss_of[number].to(loss_RP)[window_R]
                own_RT = uses[block][number].to(model.device)[window_R, :, row_R]
                own_RP = own_RT.gather(1, passages.places_BP)
                each.sums.add(columns(passages), passages.number_B, row_R, change_RP, own_RP)
        report(next(done) / total)
