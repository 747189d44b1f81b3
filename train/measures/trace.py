"""`polyad experts trace`: writes the experts of every token to Parquet.

Shapes: B windows, R rows of a batch, T tokens of a row, N tokens that a layer gets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyad.parallel import comm
from polyad.train.config.environment import folder_digest
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import (
    EVERY,
    RoutedLayer,
    choose_layers,
    routed_head,
    routed_layers,
)
from polyad.train.experts.trace import (
    EXTRA,
    TOP,
    Form,
    check_output,
    experts_of,
    norms,
    trace_file,
    whole_output,
)
from polyad.train.measures.measure import Examination
from polyad.train.reading import Evaluated, Reading, read
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

TOKENS = 65_536
"""Default for the approximate number of tokens or images to read."""
OF_TOKENS: Mapping[type[Samples], tuple[str, ...]] = {
    TextSamples: ("window", "position", "document", "offset", "token_id"),
    ImageSamples: ("image", "file", "position"),
    SequenceSamples: ("document", "choice", "position", "token_id"),
}
"""The columns of a token, by kind of data."""
Columns = Mapping[str, Tensor | Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to write, and where."""

    output: Path
    """A file that ends in .parquet, or a folder with a part for each process."""
    extra: Sequence[str] = ()
    """Further columns, from `EXTRA`."""
    layers: Sequence[str] = ()
    """Block numbers; empty: all layers with experts."""
    top: int | None = None
    """Number of experts to write per token and level, if tokens weight every expert."""
    tokens: int = TOKENS
    """Approximate number of tokens or images to read, in whole windows, spread over the split."""


class Trace(Examination):
    """Writes the experts of every token.

    Args:
        samples: the samples to read.
        model: the model that reads them.
        form: form of the rows.
        top: see `Options`.
        write: receives this process's rows, as `Form.rows` returns them.
    """

    name = "trace"
    doing = "tracing experts"
    needs_whole: ClassVar[str | None] = None

    def __init__(
        self,
        samples: Samples,
        model: nn.Module,
        form: Form,
        top: int,
        write: Callable[[Any], None],
    ) -> None:
        self._samples, self._model, self._form = samples, model, form
        self._top, self._write = top, write
        self.tokens = self.rows = 0
        if isinstance(samples, ImageSamples):
            self._split = samples.task.data.split(samples.split)

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Options:
        """Checks the fields of `Options`."""
        settings = Options(**options)
        check_output("--output", settings.output, comm.environment_world_size())
        for name in settings.extra:
            if name not in EXTRA:
                raise ConfigError(f"--with: {name} is not allowed; allowed: {', '.join(EXTRA)}")
        if "loss" in settings.extra:
            opened.need("--with loss", LanguageModelling)
        return settings

    @classmethod
    @torch.inference_mode()
    def take(
        cls, opened: Evaluated, split: str, settings: Options, model: nn.Module, world: comm.World
    ) -> Tables:
        """Reads the samples once; each process writes what it reads."""
        layers = _chosen(model, str(opened.weights.folder), settings)
        samples = samples_of(opened.task, split, settings.tokens)
        of_tokens = OF_TOKENS[type(samples)] + (("loss",) if "loss" in settings.extra else ())
        form = Form(layers, of_tokens, settings.extra)
        rank, ranks = world.rank, world.size
        about = {**_about(opened, split, samples), "part": rank, "parts": ranks}
        with whole_output(settings.output, rank, ranks) as path:
            with trace_file(path, form.schema(about)) as write:
                trace = cls(samples, model, form, settings.top or TOP, write)
                size = opened.batch_size
                for reading in read(
                    model, layers, samples, batch_size=size, world=world, label="trace"
                ):
                    trace.add(reading)
            counts = torch.tensor([trace.rows, trace.tokens, path.stat().st_size])
            rows, tokens, size = comm.sum_over_ranks(counts.to(world.device)).tolist()
        facts = {
            "output": str(settings.output),
            "files": ranks,
            "bytes": size,
            "rows": rows,
            "tokens_traced": tokens,
            "layers": [layer.name for layer in layers],
            "columns": list(form.columns),
        }
        return Tables(facts=facts)

    def add(self, reading: Reading) -> None:
        """Writes a batch."""
        of_batch, most = self._of_batch(reading), 0
        for layer in self._form.layers:
            if (decision := reading.of_all_tokens.get(layer.name)) is None:  # in another block
                continue
            found = experts_of(layer, decision, self._top)
            tokens, row_M = of_batch or self._of_images(reading, layer, len(found.experts))
            norm_NK = norms(decision, found, row_M) if "norm" in self._form.extra else None
            rows = self._form.rows(found, tokens, row_M, norm_NK)
            self._write(rows)
            self.rows += len(rows)
            most = max(most, len(row_M))
        if reading.is_first:
            self.tokens += most

    def _of_batch(self, reading: Reading) -> tuple[Columns, Tensor] | None:
        """The columns of a batch's tokens, and which are written; None: each layer has its own."""
        if isinstance(self._samples, TextSamples):
            return self._of_text(self._samples, reading)
        if isinstance(self._samples, SequenceSamples):
            return _of_sequences(self._samples, reading)
        return None

    def _of_text(self, text: TextSamples, reading: Reading) -> tuple[Columns, Tensor]:
        passages = reading.batch
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
        if "loss" in self._form.extra:
            loss_BT = losses(self._model, reading.output, passages).float()
            if not loss_BT[passages.scored_BP].isfinite().all():
                raise ConfigError("--with loss: losses are not finite: weights are too large")
            columns["loss"] = loss_BT.where(passages.scored_BP, torch.nan).flatten().cpu()
        return columns, real_BT.flatten().nonzero()[:, 0].cpu()

    def _of_images(
        self, reading: Reading, layer: RoutedLayer, count: int
    ) -> tuple[Columns, Tensor]:
        """The same for a layer that gets this many tokens of images."""
        images = self._samples
        assert isinstance(images, ImageSamples)
        numbers = [images.numbers[row] for row in reading.number_R.tolist()]
        each = count // len(numbers)
        patches = getattr(self._model.config, "num_patches", each)  # a mixture has no patches
        # The patches follow a token of the whole image, which is all that a head gets.
        first = -1 if not layer.in_block or each == patches + 1 else 0
        if layer.name.endswith("token_feed_forward"):
            first = 0
        names = [self._split.name_of(number) for number in numbers]
        columns: Columns = {
            "image": torch.tensor(numbers).repeat_interleave(each),
            "file": [name for name in names for _ in range(each)],
            "position": (torch.arange(each) + first).repeat(len(numbers)),
        }
        return columns, torch.arange(count)


def _of_sequences(sequences: SequenceSamples, reading: Reading) -> tuple[Columns, Tensor]:
    """Columns and tokens of sequences; layers get all tokens in a row, without padding."""
    mask_RT = reading.batch.mask_BCT.flatten(0, 1).cpu()
    row_N, position_N = mask_RT.nonzero(as_tuple=True)
    number_N = reading.number_R.cpu()[row_N]
    choices = sequences.rows_of_sample
    columns = {
        "document": torch.from_numpy(sequences.row_of)[number_N // choices],
        "choice": number_N % choices,
        "position": position_N,
        "token_id": reading.batch.ids_BCT.flatten(0, 1).cpu()[mask_RT],
    }
    return columns, torch.arange(len(row_N))


class TraceWithLoss(Trace):
    """Writes the losses of predicted tokens, too."""

    needs_whole = "--with loss: a loss is known after the last block alone"


def _chosen(model: nn.Module, place: str, settings: Options) -> list[RoutedLayer]:
    """The layers to write."""
    head = routed_head(model)
    routed = [*routed_layers(model), *([head] if head else [])]
    if not routed:
        raise ConfigError(f"{place}: its model has no experts, in blocks or as its head")
    layers = choose_layers(routed, settings.layers or (EVERY,))
    if settings.top is not None and not any(layer.shares for layer in layers):
        raise ConfigError(
            f"--top: {settings.top} is not allowed: a router of {place} selects whole experts, and "
            "all of them are written; allowed with: a muMoE, a mixture of networks"
        )
    return layers


def _about(opened: Evaluated, split: str, samples: Samples) -> dict[str, Any]:
    """Metadata of a file about weights and data."""
    about = {
        **opened.about(),
        "interventions": [each.to_json() for each in opened.interventions],
        "digest": folder_digest(opened.weights.folder),
        "weights": opened.choice,
        "precision": opened.config.train.precision,
        "model_kind": opened.weights.model_config().kind,
        "data": opened.task.name,
        "data_kind": opened.config.data.kind,
        "data_fingerprint": opened.task.fingerprint,
        "split": split,
    }
    if isinstance(samples, TextSamples):
        about |= {"windows": samples.rows, "sequence_length": samples.length}
    return about
