"""Block-by-block knockout of experts in a decoder that is larger than memory.

The text passes through all blocks once, and the inputs of the blocks of interest are kept. Then
windows without an expert start at its block and pass through the later ones, as many together as
fit into memory: each group reads those blocks once more.

Shapes: B windows of a batch, R pairs of a window and a set of experts, T tokens of a window, D
width, E sets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polyad.parallel.host_memory import free_memory
from polyad.parallel.streamed import Streamed, parts_of
from polyad.train.console import Progress
from polyad.train.experts.knockout import KnockOut
from polyad.train.experts.probing import deciding
from polyad.train.experts.token_classes import ClassColumns
from polyad.train.streaming import run_blocks
from polyad.train.tasks.samples import Passages, TextSamples, losses

SHARE = 0.25
"""Share of the free memory for windows without an expert."""


@dataclass
class _Entered:
    """Input of a block of interest for one batch, and which tokens use which sets of experts."""

    x_BTD: Tensor
    has_BTE: Tensor


@dataclass
class _Lacking:
    """Windows without experts, on their way through the blocks."""

    taker: KnockOut
    batch: int
    row_R: Tensor
    window_R: Tensor
    own_RT: Tensor
    x_RTD: Tensor


class StreamedKnockOut:
    """Removes experts from a model block by block.

    Args:
        model: the model, not in memory.
        takers: accumulators of the results, for layers in different blocks.
        text: the text to read.
        columns: classify its tokens.
        batch_size: windows per forward pass.
    """

    def __init__(
        self,
        model: Streamed,
        takers: Sequence[KnockOut],
        text: TextSamples,
        columns: ClassColumns,
        batch_size: int,
    ) -> None:
        self._model, self._columns = model, columns
        self._takers = {taker.layer.block: taker for taker in takers}
        read = text.batches(batch_size, 0, 1, torch.device("cpu"))
        self._passages: list[Passages] = [batch for _, batch in read]
        self._entered: dict[int, list[_Entered]] = {block: [] for block in self._takers}
        self._loss_BP: list[Tensor] = []

    @torch.inference_mode()
    def read(self, label: str) -> None:
        """Reads everything.

        Args:
            label: label on the console.
        """
        blocks = len(self._model.blocks)
        self._read_whole(blocks)
        groups = list(self._groups())
        parts, done = sum(blocks - min(group) + 1 for group in groups), 0
        progress = Progress(label, parts, "blocks")
        for group in groups:
            lacking: list[_Lacking] = []
            for block in range(min(group), blocks):
                with self._model.part(*parts_of(self._model)[1 + block]):
                    for each in lacking:
                        each.x_RTD = self._through(block, each.x_RTD)
                    if block in group:
                        lacking += self._begun(block)
                done += 1
                progress(done / parts)
            with self._model.part(*parts_of(self._model)[-1]):
                for each in lacking:
                    self._add(each)
            done += 1
            progress(done / parts)

    def _read_whole(self, blocks: int) -> None:
        """Reads the text with the unchanged model, and keeps what is needed."""
        ids = [passages.ids_BT.int() for passages in self._passages]
        report = Progress("read experts", blocks, "blocks")
        with (
            run_blocks(self._model, ids, blocks, watch=self._watch, report=report) as outputs,
            self._model.part(*parts_of(self._model)[-1]),
        ):
            for passages, x_BTD in zip(self._passages, outputs, strict=True):
                here = self._here(passages)
                loss_BP = losses(self._model, x_BTD.to(self._model.device), here)
                self._loss_BP.append(loss_BP.cpu())
                for taker in self._takers.values():
                    taker.add_whole(here, self._columns(here), loss_BP)

    @contextmanager
    def _watch(self, block: int) -> Iterator[Callable[[int], None]]:
        """Keeps a block's inputs, and which tokens use which experts."""
        if block not in self._takers:
            yield lambda number: None
            return
        taker, got = self._takers[block], list[Tensor]()
        hook = self._model.blocks[block].register_forward_pre_hook(
            lambda module, arguments: got.append(arguments[0])
        )
        try:
            with deciding(self._model, [taker.layer]) as decisions:

                def keep(number: int) -> None:
                    x_BTD = got.pop()
                    has_BTE = taker.uses(decisions[taker.layer.name], len(x_BTD))
                    self._entered[block].append(_Entered(x_BTD.cpu(), has_BTE.cpu()))

                yield keep
        finally:
            hook.remove()

    def _groups(self) -> Iterator[list[int]]:
        """Yields groups of blocks whose windows are in memory together."""
        room, group, taken = SHARE * free_memory(), list[int](), 0
        for block, taker in sorted(self._takers.items()):
            size = sum(
                int(taker.changed(each.has_BTE).sum()) * each.x_BTD[0].nbytes
                for each in self._entered[block]
            )
            if group and taken + size > room:
                yield group
                group, taken = [], 0
            group.append(block)
            taken += size
        if group:
            yield group

    def _begun(self, block: int) -> Iterator[_Lacking]:
        """Yields the block's outputs for windows without experts of its layer."""
        for number, entered in enumerate(self._entered[block]):
            x_BTD = entered.x_BTD.to(self._model.device)
            has_BTE, taker = entered.has_BTE.to(self._model.device), self._takers[block]
            for row_R, window_R in taker.pairs(has_BTE):
                with taker.without(row_R):
                    x_RTD = self._through(block, x_BTD[window_R])
                own_RT = has_BTE[window_R, :, row_R]
                yield _Lacking(taker, number, row_R, window_R, own_RT, x_RTD)

    def _through(self, block: int, x_RTD: Tensor) -> Tensor:
        x_RTD = x_RTD.to(self._model.device)
        positions_T = torch.arange(x_RTD.shape[1], device=self._model.device)
        x_RTD, _ = self._model.blocks[block](x_RTD, self._model.given(positions_T, x_RTD.dtype))
        return x_RTD.cpu()

    def _add(self, lacking: _Lacking) -> None:
        some = self._here(self._passages[lacking.batch]).rows(lacking.window_R)
        changed_RP = losses(self._model, lacking.x_RTD.to(self._model.device), some).double()
        loss_RP = self._loss_BP[lacking.batch].to(changed_RP)[lacking.window_R]
        lacking.taker.add_changed(
            lacking.row_R, some, self._columns(some), changed_RP - loss_RP, lacking.own_RT
        )

    def _here(self, passages: Passages) -> Passages:
        others = (each.to(self._model.device) for each in passages[1:])
        return Passages(passages.number_B, *others)
