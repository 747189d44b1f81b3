"""`polyad experts trace`: writes the experts of every token to Parquet.

Shapes: B windows, R rows of a batch, T tokens of a row, N tokens that a layer gets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyad.data.files import whole_file, writing
from polyad.parallel import comm
from polyad.train.config.environment import folder_digest
from polyad.train.errors import ConfigError
from polyad.train.experts.information import not_finite
from polyad.train.experts.probing import EVERY, RoutedLayer, choose_layers
from polyad.train.experts.trace import (
    EXTRA,
    TOP,
    experts_of,
    norms,
    trace_columns,
    trace_rows,
    trace_schema,
)
from polyad.train.measures.measure import Analysis, layers_of
from polyad.train.reading import TOKENS, EvaluationContext, ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import (
    ImageSamples,
    Samples,
    SequenceSamples,
    TextSamples,
    losses,
    samples_of,
)

OF_TOKENS: Mapping[type[Samples], tuple[str, ...]] = {
    TextSamples: ("window", "position", "document", "offset", "token_id"),
    ImageSamples: ("image", "file", "position"),
    SequenceSamples: ("document", "choice", "position", "token_id"),
}
"""The columns of a token, by kind of data."""
Columns = Mapping[str, Tensor | Sequence[str]]


@dataclass(kw_only=True)
class Trace(Analysis):
    """Writes the experts of every token."""

    name = "trace"
    doing = "tracing experts"

    output: Path
    """A Parquet file; of several processes a folder with a file of each."""
    extra: Sequence[str] = ()
    """Further columns, from `EXTRA`."""
    layers: Sequence[str] = ()
    """Block numbers; empty: all layers with experts."""
    top: int | None = None
    """Number of experts to write per token and level, if tokens weight every expert."""
    tokens: int = TOKENS
    """Approximate number of tokens or images to read, in whole windows, spread over the split."""

    @property
    def needs_whole(self) -> str | None:
        """Losses need all blocks at once."""
        if "loss" in self.extra:
            return "--with loss: a loss is known after the last block alone"
        return None

    def check(self, opened: EvaluationContext) -> None:
        """Refuses what exists already, and columns that the data does not have."""
        if self.output.exists() or not self.output.parent.is_dir():
            wrong = "already exists" if self.output.exists() else "its folder does not exist"
            raise ConfigError(f"--output: {self.output}: {wrong}")
        check_extra("--with", self.extra, opened)

    @torch.inference_mode()
    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads the samples once; each process writes what it reads."""
        import pandas as pd
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        layers = choose_layers(layers_of(opened, model), self.layers or (EVERY,))
        samples = samples_of(opened.task, opened.split, self.tokens)
        subject = Subject(model, layers, samples, opened.batch_size)
        rows, path = TraceRows(subject, self.extra, self.top or TOP), self.output
        about = {**_about(opened, samples), "part": world.rank, "parts": world.size}
        schema = trace_schema(layers, rows.columns, about)
        if world.size > 1:
            path = self.output / f"part-{world.rank:05d}.parquet"
            path.parent.mkdir(exist_ok=True)
        with whole_file(path) as partial:
            with ParquetWriter(partial, schema, compression="zstd") as file:
                for forward_pass in subject.read(world, label="trace"):
                    if frames := [*rows.of(forward_pass)]:
                        table = pa.Table.from_pandas(pd.concat(frames), schema, False)
                        with writing(path):
                            file.write_table(table)
            size = partial.stat().st_size
        counts = torch.tensor([rows.rows, rows.tokens, size], device=world.device)
        written, tokens, size = comm.sum_over_ranks(counts).tolist()
        facts = {
            "output": str(self.output),
            "files": world.size,
            "bytes": size,
            "rows": written,
            "tokens_traced": tokens,
            "layers": [layer.name for layer in layers],
            "columns": rows.columns,
        }
        return Tables(facts=facts)


def check_extra(option: str, extra: Sequence[str], opened: EvaluationContext) -> None:
    """Checks the names of further columns.

    Args:
        option: what names them, for errors.
        extra: their names.
        opened: the weights and data.

    Raises:
        ConfigError: there is no such column, or the data has no losses of tokens.
    """
    for name in extra:
        if name not in EXTRA:
            raise ConfigError(f"{option}: {name} is not allowed; allowed: {', '.join(EXTRA)}")
    if "loss" in extra:
        opened.need(f"{option} loss", LanguageModelling)


class TraceRows:
    """The rows of a trace, made of readings.

    Args:
        subject: what is read.
        extra: further columns, from `EXTRA`.
        top: number of experts per token and level, if tokens weight every expert.
    """

    def __init__(self, subject: Subject, extra: Sequence[str], top: int) -> None:
        self._model, self._layers, self._samples, _ = subject
        self._extra, self._top = extra, top
        self.columns = trace_columns(self._layers, OF_TOKENS[type(self._samples)], extra)
        self.tokens = self.rows = 0
        """Numbers of tokens and of rows so far."""
        if isinstance(self._samples, ImageSamples):
            self._split = self._samples.task.data.split(self._samples.split)

    def of(self, forward_pass: ForwardPass) -> Iterator[Any]:
        """Yields the rows of a batch for each layer, as `trace_rows` returns them."""
        of_batch, most = None, 0  # images have tokens of their own in each layer
        if isinstance(self._samples, TextSamples):
            of_batch = self._of_text(self._samples, forward_pass)
        elif isinstance(self._samples, SequenceSamples):
            of_batch = _of_sequences(self._samples, forward_pass)
        for layer in self._layers:
            if (decision := forward_pass.of_all_tokens.get(layer.name)) is None:  # in another block
                continue
            experts = experts_of(layer, decision, self._top)
            tokens, row_M = of_batch or self._of_images(forward_pass, layer, len(experts.experts))
            norm_NK = norms(decision, experts, row_M) if "norm" in self._extra else None
            rows = trace_rows(experts, tokens, row_M, self.columns, norm_NK)
            yield rows
            self.rows += len(rows)
            most = max(most, len(row_M))
        if forward_pass.is_first:
            self.tokens += most

    def _of_text(self, text: TextSamples, forward_pass: ForwardPass) -> tuple[Columns, Tensor]:
        """The columns of a batch's tokens, and which are written."""
        passages = forward_pass.batch
        window_B, position_BT, real_BT = text.places(passages)
        place_N = position_BT.flatten().cpu()
        inside_N = place_N.clamp(0, text.stream.num_tokens - 1)  # special tokens may lie outside
        located = (torch.from_numpy(each) for each in text.stream.locate(inside_N.numpy()))
        document_N, offset_N = (each.where(place_N >= 0, -1) for each in located)
        columns = {
            "window": window_B.cpu().repeat_interleave(text.length),
            "position": torch.arange(text.length).repeat(len(window_B)),
            "document": document_N,
            "offset": offset_N,
            "token_id": passages.ids_BT.flatten().cpu(),
        }
        if "loss" in self._extra:
            loss_BT = losses(self._model, forward_pass.output, passages).float()
            if not loss_BT[passages.scored_BP].isfinite().all():
                raise ConfigError(not_finite("--with loss: losses"))
            columns["loss"] = loss_BT.where(passages.scored_BP, torch.nan).flatten().cpu()
        return columns, real_BT.flatten().nonzero()[:, 0].cpu()

    def _of_images(
        self, forward_pass: ForwardPass, layer: RoutedLayer, count: int
    ) -> tuple[Columns, Tensor]:
        """The same for a layer that gets this many tokens of images."""
        images = self._samples
        assert isinstance(images, ImageSamples)
        numbers = [images.numbers[row] for row in forward_pass.number_R.tolist()]
        each = count // len(numbers)
        patches = getattr(self._model.config, "num_patches", each)  # a mixture has no patches
        # The patches follow a token of the whole image, which is all that a head gets.
        first = -1 if not layer.in_block or each == patches + 1 else 0
        if layer.name.endswith("token_feed_forward"):
            first = 0
        # A file's name may be bytes that are not UTF-8.
        files = [self._split.name_of(number) for number in numbers]
        names = [each.encode(errors="backslashreplace").decode() for each in files]
        columns: Columns = {
            "image": torch.tensor(numbers).repeat_interleave(each),
            "file": [name for name in names for _ in range(each)],
            "position": (torch.arange(each) + first).repeat(len(numbers)),
        }
        return columns, torch.arange(count)


def _of_sequences(sequences: SequenceSamples, forward_pass: ForwardPass) -> tuple[Columns, Tensor]:
    """Columns and tokens of sequences; layers get all tokens in a row, without padding."""
    mask_RT = forward_pass.batch.mask_BCT.flatten(0, 1).cpu()
    row_N, position_N = mask_RT.nonzero(as_tuple=True)
    number_N = forward_pass.number_R.cpu()[row_N]
    choices = sequences.rows_of_sample
    columns = {
        "document": torch.from_numpy(sequences.row_of)[number_N // choices],
        "choice": number_N % choices,
        "position": position_N,
        "token_id": forward_pass.batch.ids_BCT.flatten(0, 1).cpu()[mask_RT],
    }
    return columns, torch.arange(len(row_N))


def _about(opened: EvaluationContext, samples: Samples) -> dict[str, Any]:
    """Metadata of a file about weights and data."""
    about = {
        **opened.about(opened.split),
        "interventions": [each.to_json() for each in opened.interventions],
        "digest": folder_digest(opened.weights.folder),
        "model_kind": opened.weights.model_config().kind,
        "data_fingerprint": opened.task.fingerprint,
    }
    if isinstance(samples, TextSamples):
        about |= {"windows": samples.rows, "sequence_length": samples.length}
    return about
