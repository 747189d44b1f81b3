"""The experts of every token as a Parquet table: a row for each token, layer and chosen expert.

    Form          the columns of a trace, and its rows for a layer
    trace_file    a file that grows by row groups, so that few rows are in memory
    whole_output  a file or folder of parts that gets its name once it is complete

Columns of integers have -1 for missing values, since pandas would turn nulls into floats.

Shapes: N tokens, K experts written per token (all levels side by side), S experts of a layer (all
levels side by side).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyad.data.files import temporary_folder, whole_file, writing
from polyad.model.output import entropy
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.information import not_finite
from polyad.train.experts.probing import Decision, RoutedLayer

FORMAT = "polyad trace 1"
"""`format` in a file's metadata."""
METADATA = b"polyad"
"""The key of a file's metadata, whose value is JSON."""
SUFFIX = ".parquet"
GROUP = 2**18
"""Number of rows written together; a row group has at most twice as many."""
TOP = 4
"""Number of experts written per token and level, if tokens weight all experts."""
EXTRA = ("score", "entropy", "norm", "loss")
"""Optional columns."""


class Column(NamedTuple):
    """A column of a trace."""

    type: str
    """Arrow's name of the type; `names`: strings with few distinct values."""
    about: str


COLUMNS: Mapping[str, Column] = {
    "window": Column("int32", "number of the window in the split, from 0"),
    "image": Column("int32", "number of the image in the split, from 0"),
    "file": Column("names", "name of the image in what was prepared"),
    "position": Column(
        "int32",
        "place of the token in what the model reads at once, from 0; of images the patch, row "
        "by row (of a Mixer's token mixing the channel), -1: the whole image",
    ),
    "document": Column(
        "int32",
        "number of the document, or of the labelled row, in the split, from 0; -1: the end of text "
        "that is read before the first one",
    ),
    "choice": Column("int32", "number of the choice in the labelled row, from 0"),
    "offset": Column("int32", "place of the token in its document, from 0; -1: as there"),
    "token_id": Column("int32", "id of the token that is read"),
    "layer": Column("int16", "number of the block; -1: the layer is in none"),
    "module": Column("names", "name of the layer's module, as in names of parameters"),
    "level": Column("int16", "level of the layer's hierarchy, from 0"),
    "slot": Column("int16", "which of the token's experts, of its level, from 0: the best first"),
    "expert": Column("int32", "number of the expert, in its level, from 0"),
    "weight": Column(
        "float32", "weight of the expert's output, before a capacity drops any; a share as it is"
    ),
    "score": Column("float32", "what top-K saw of the expert, without its bias; a share once more"),
    "entropy": Column(
        "float32", "of the token's scores over all experts of the level, summing to 1, in nats"
    ),
    "norm": Column("float32", "L2 norm of the expert's own output, before its weight"),
    "loss": Column(
        "float32", "of the token that is predicted at this position, in nats; null: none is"
    ),
}
"""All columns, in their order."""


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """The experts of every token in one layer; all tensors are on the CPU."""

    layer: RoutedLayer
    experts: Tensor
    """[N, K] int64. The experts that the router selected, the highest score first; for a muMoE
    those with the largest coefficients, equally many per level, numbered over all levels side by
    side."""
    weights: Tensor
    """[N, K] fp32. The weight of the expert's output; for a muMoE its coefficient."""
    scores: Tensor
    """[N, S] fp32. The scores of all experts before top-K, after a graph if there is one; rows sum
    to 1 unless they are sigmoids. For a muMoE the coefficients; each level sums to 1."""


def experts_of(layer: RoutedLayer, decision: Decision, top: int) -> LayerExperts:
    """Returns the experts of the tokens of a layer.

    Args:
        layer: the layer.
        decision: its decision in a forward pass.
        top: number of experts per level, if tokens weight every expert.
    """
    scores_NS = torch.cat(decision.levels, dim=-1).float().cpu()
    if decision.selected is not None:
        experts_NK = decision.selected.expert_ids_NK.cpu()
        weights_NK = decision.selected.weights_NK.float().cpu()
        return LayerExperts(layer=layer, experts=experts_NK, weights=weights_NK, scores=scores_NS)
    chosen, first = [], 0
    for level_NE in torch.split(scores_NS, list(layer.levels), dim=-1):
        chosen.append(level_NE.topk(min(top, level_NE.shape[-1]), dim=-1).indices + first)
        first += level_NE.shape[-1]
    experts_NK = torch.cat(chosen, dim=-1)
    weights_NK = scores_NS.gather(1, experts_NK)
    return LayerExperts(layer=layer, experts=experts_NK, weights=weights_NK, scores=scores_NS)


def norms(decision: Decision, experts: LayerExperts, row_M: Tensor) -> Tensor:
    """Returns the L2 norms of the experts' outputs [N, K], on the CPU.

    Args:
        decision: the decision of a forward pass.
        experts: the experts of its N tokens.
        row_M: the tokens to use, on the CPU; the norms of others are 0.
    """
    norm_NK = torch.zeros_like(experts.weights)
    experts_MK, first = experts.experts[row_M], 0
    for level, size in enumerate(experts.layer.levels):
        for expert in range(size):
            at_M, slot_M = (experts_MK == first + expert).nonzero(as_tuple=True)
            if len(at_M):
                rows = row_M[at_M]
                y_MD = decision.output(level, expert, rows.to(decision.levels[0].device))
                norm_NK[rows, slot_M] = y_MD.float().norm(dim=-1).cpu()
        first += size
    return norm_NK


@dataclass(frozen=True)
class Form:
    """The columns of a trace.

    Args:
        layers: the layers to write.
        of_tokens: names of the columns of a token that all layers share.
        extra: columns from `EXTRA`; `loss` belongs to the token.
    """

    layers: Sequence[RoutedLayer]
    of_tokens: Sequence[str]
    extra: Sequence[str] = ()

    @property
    def columns(self) -> list[str]:
        """Their names, in order."""
        names = {*self.of_tokens, "layer", "module", "slot", "expert", "weight", *self.extra}
        if any(len(layer.levels) > 1 for layer in self.layers):
            names.add("level")
        return [name for name in COLUMNS if name in names]

    def schema(self, about: Mapping[str, Any]) -> Any:
        """Returns the schema of a file (`pyarrow.Schema`).

        Args:
            about: metadata beside layers and columns; JSON values.
        """
        import pyarrow as pa

        metadata = {
            "format": FORMAT,
            **about,
            "layers": {
                layer.name: {"layer": _block(layer), "experts": list(layer.levels)}
                for layer in self.layers
            },
            "columns": {name: COLUMNS[name].about for name in self.columns},
        }
        types = {"names": pa.dictionary(pa.int32(), pa.string())}
        fields = [
            pa.field(name, types.get(COLUMNS[name].type) or COLUMNS[name].type, name == "loss")
            for name in self.columns
        ]
        return pa.schema(fields, {METADATA: json.dumps(metadata).encode()})

    def rows(
        self,
        experts: LayerExperts,
        tokens: Mapping[str, Tensor | Sequence[str]],
        row_M: Tensor,
        norm_NK: Tensor | None = None,
    ) -> Any:
        """Returns the rows of a layer (`pyarrow.RecordBatch`), token by token.

        Args:
            experts: the experts of N tokens.
            tokens: the columns of the tokens by name, each [N], on the CPU; names are sequences of
                strings. NaN in `loss` means none.
            row_M: the tokens to write.
            norm_NK: norms of the experts' outputs.

        Raises:
            ConfigError: weights are not finite.
        """
        layer, weight_MK = experts.layer, experts.weights[row_M]
        if not weight_MK.isfinite().all():
            raise ConfigError(not_finite(layer))
        expert_MK = experts.experts[row_M]
        first_L = torch.tensor([0, *layer.levels]).cumsum(0)
        level_MK = torch.searchsorted(first_L[1:], expert_MK, right=True)
        slot_K = _counted(level_MK[0].tolist()) if len(row_M) else torch.zeros(expert_MK.shape[1])
        values: dict[str, Tensor | Sequence[str]] = {
            "layer": torch.tensor(_block(layer)).expand_as(expert_MK),
            "module": [layer.name] * len(row_M),
            "level": level_MK,
            "slot": slot_K.expand_as(expert_MK),
            "expert": expert_MK - first_L[level_MK],
            "weight": weight_MK,
        }
        scores_MS = experts.scores[row_M]
        if "score" in self.extra:
            values["score"] = scores_MS.gather(1, expert_MK)
        if "entropy" in self.extra:
            # Scores by sigmoids do not sum to 1, and those of pruned experts are -inf.
            levels = torch.split(scores_MS.clamp_min(0), list(layer.levels), dim=-1)
            each = [entropy(p / p.sum(-1, keepdim=True).clamp_min(1e-30)) for p in levels]
            values["entropy"] = torch.stack(each, -1).gather(1, level_MK)
        if norm_NK is not None:
            values["norm"] = norm_NK[row_M]
        for name, of_token in tokens.items():
            if isinstance(of_token, Tensor):
                values[name] = of_token[row_M].unsqueeze(-1).expand_as(expert_MK)
            else:
                values[name] = [of_token[row] for row in row_M.tolist()]
        return self._batch(values, expert_MK.shape)

    def _batch(self, values: Mapping[str, Tensor | Sequence[str]], shape: Sequence[int]) -> Any:
        import pyarrow as pa

        schema, arrays = self.schema({}), []
        for name in self.columns:
            value, kind = values[name], schema.field(name).type
            if isinstance(value, Tensor):
                flat = value.reshape(-1).numpy().astype(COLUMNS[name].type)
                arrays.append(pa.array(flat, kind, from_pandas=name == "loss"))
                continue
            # A file's name may be bytes that are not UTF-8.
            names = [each.encode(errors="backslashreplace").decode() for each in value]
            codes = np.repeat(np.arange(shape[0]), shape[1])
            arrays.append(pa.array(names, pa.string()).dictionary_encode().take(codes))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _block(layer: RoutedLayer) -> int:
    return layer.block if layer.in_block else -1


def _counted(level_K: Sequence[int]) -> Tensor:
    """Number of earlier entries of the same level, for each."""
    return torch.tensor([level_K[:k].count(level) for k, level in enumerate(level_K)])


@contextmanager
def trace_file(path: Path, schema: Any) -> Iterator[Callable[[Any], None]]:
    """A context for a file that is written sequentially, by row groups.

    Args:
        path: the file, replaced if it exists.
        schema: schema of the columns.

    Yields:
        A function that adds rows from `Form.rows`.

    Raises:
        DataError: it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    waiting: list[Any] = []

    def write() -> None:
        parts = [part.replace_schema_metadata(schema.metadata) for part in waiting]
        table = pa.Table.from_batches(parts, schema).unify_dictionaries()
        with writing(path):
            file.write_table(table, row_group_size=2 * GROUP)
        waiting.clear()

    def add(rows: Any) -> None:
        waiting.append(rows)
        if sum(map(len, waiting)) >= GROUP:
            write()

    with writing(path):
        file = pq.ParquetWriter(path, schema, compression="zstd")
    try:
        yield add
        if waiting:
            write()
    finally:
        with writing(path):
            file.close()


def check_output(option: str, path: Path, processes: int = 1) -> None:
    """Checks that a trace can be written, before any work is done.

    Args:
        option: the option that names it.
        path: a file that ends in .parquet, or a folder with a part for each process.
        processes: number of processes that write.

    Raises:
        ConfigError: it cannot.
    """
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option}: {path}: already exists; name a new file or folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: {path}: there is no folder {path.parent}")
    if processes > 1 and path.suffix == SUFFIX:
        raise ConfigError(
            f"{option}: {path}: {processes} processes write one part each: name a folder (a name "
            f"that does not end in {SUFFIX})"
        )


@contextmanager
def whole_output(path: Path, rank: int = 0, ranks: int = 1) -> Iterator[Path]:
    """A context for output that gets its final name at the end, or is removed on failure.

    Args:
        path: see `check_output`.
        rank: this process's number.
        ranks: number of processes that write.

    Yields:
        The file for this process to write.

    Raises:
        DataError: it cannot be written.
    """
    if path.suffix == SUFFIX:
        with whole_file(path) as partial:
            yield partial
            _need_absent(path)
        return
    names = [f"part-{number:05d}{SUFFIX}" for number in range(ranks)]
    with ExitStack() as stack:
        folder = None
        if rank == 0:
            with writing(path):
                place = temporary_folder(f".{path.name}.", path.parent, ".partial")
                folder = stack.enter_context(place)
        if ranks > 1:
            folder = comm.from_main(folder)
        assert folder is not None
        yield folder / names[rank]
        if ranks > 1:
            comm.barrier()
        if rank == 0:
            with writing(path):
                for name in names:
                    (folder / name).stat()  # a host without the folder wrote elsewhere
                _need_absent(path)
                folder.rename(path)
        if ranks > 1:
            comm.barrier()


def _need_absent(path: Path) -> None:
    if path.exists():
        with writing(path):
            raise FileExistsError(0, "it is there by now", str(path))
