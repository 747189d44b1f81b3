"""Routes of inference servers as traces, and traces that are read without their model.

vLLM and SGLang return, as `routed_experts`, the experts of every token in every layer. A trace has
no scores and no outputs of experts, so only what can be counted is measured.

Shapes: B windows, T tokens of the longest, N = B T, L layers, K experts of a token.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyad.data.files import whole_file
from polyad.data.json_reader import parse_json
from polyad.data.text.dataset import TokenStream
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.model.smoe.router import Selected, spread
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import Decision, RoutedLayer
from polyad.train.experts.trace import COLUMNS, FORMAT, METADATA, trace_schema
from polyad.train.measures.specialization import Specialization
from polyad.train.reading import ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.samples import Passages, TextSamples

TOKENS_FILE = ".tokens.npy"
"""What replaces `.npy` in the name of the file with the token ids of routes."""
PLACE = ["window", "position"]
AT_ONCE = 64
"""Windows that are counted at a time."""


class Text(NamedTuple):
    """The routes of one text."""

    ids_T: Any
    """Token ids; one more than routes if the last was generated and not read."""
    experts_TLK: Any
    """Experts of every token in every layer."""


def read_routes(file: Path) -> list[Text]:
    """Reads routes.

    Args:
        file: JSON with `token_ids` [T] and `routed_experts` [T, L, K], a list of such objects, or
            one a line in a file that ends in .jsonl; or a `.npy` of [T, L, K] beside a
            `.tokens.npy` of [T].

    Raises:
        ConfigError: it is not such a file, or the texts differ in L or K.
    """
    try:
        if file.suffix == ".npy":
            texts = [Text(np.load(file.with_suffix(TOKENS_FILE)), np.load(file))]
        else:
            content = file.read_text("utf-8")
            lines = content.splitlines() if file.suffix == ".jsonl" else [content]
            trees = [
                parse_json(line, str(file), error=ConfigError) for line in lines if line.strip()
            ]
            rows = trees[0] if len(trees) == 1 and isinstance(trees[0], list) else trees
            texts = [Text(np.array(r["token_ids"]), np.array(r["routed_experts"])) for r in rows]
        if not texts:
            raise ValueError("there is no text")
        for ids_T, experts_TLK in texts:
            tokens, read = len(ids_T), len(experts_TLK)
            shape = texts[0].experts_TLK.shape[1:]
            numbers = {each.dtype.kind for each in (ids_T, experts_TLK)} <= {"i", "u"}
            if not numbers or experts_TLK.shape[1:] != shape or len(shape) != 2:
                raise ValueError("needs whole numbers [tokens, layers, experts of a token]")
            if read not in (tokens, tokens - 1) or min(ids_T.min(), experts_TLK.min()) < 0:
                raise ValueError(f"{tokens} token_ids and routes of {read} tokens, from 0")
    except OSError as error:
        raise ConfigError(f"--routes: {error.filename or file}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"--routes: {file}: are no routes: {error}") from None
    return [Text(ids_T[: len(experts_TLK)], experts_TLK) for ids_T, experts_TLK in texts]


def trace_of_routes(file: Path, output: Path, tokenizer: str | None) -> Tables:
    """Writes routes as a trace, without weights and scores.

    Args:
        file: see `read_routes`; each text is a window, and a document.
        output: the Parquet file to write.
        tokenizer: the tokenizer of the ids, which is recorded; None: it is named later.

    Raises:
        ConfigError: they are no routes.
    """
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    texts, frames = read_routes(file), []
    _, count, used = texts[0].experts_TLK.shape
    experts = 1 + max(int(each.experts_TLK.max()) for each in texts)
    layers = [RoutedLayer(name=f"blocks.{n}.feed_forward", levels=(experts,)) for n in range(count)]
    for number, (ids_T, experts_TLK) in enumerate(texts):
        place_T = np.arange(len(ids_T))
        of_token = {"position": place_T, "offset": place_T, "token_id": ids_T}
        for block, layer in enumerate(layers):
            rows = {name: each.repeat(used) for name, each in of_token.items()}
            rows |= {"slot": np.tile(np.arange(used), len(ids_T))}
            rows |= {"expert": experts_TLK[:, block].reshape(-1)}
            about = {"window": number, "document": number, "layer": block, "module": layer.name}
            frames.append(pd.DataFrame(rows).assign(**about))
    columns = [name for name in COLUMNS if name in frames[0]]
    about = {"routes": str(file), "tokenizer": tokenizer}
    frame = pd.concat(frames, ignore_index=True)[columns]
    frame = frame.astype({name: COLUMNS[name] for name in columns})
    with whole_file(output) as partial:
        table = pa.Table.from_pandas(frame, trace_schema(layers, columns, about), False)
        parquet.write_table(table, partial, compression="zstd")
    facts = {
        "output": str(output),
        "rows": len(frame),
        "tokens_traced": sum(len(each.ids_T) for each in texts),
        "layers": count,
        "experts": f"{experts}, by the highest number",
        "columns": columns,
    }
    return Tables(facts=facts)


class TracedText(TextSamples):
    """The tokens of a trace of sparse experts, as samples of text; a window counts as a document.

    Args:
        path: the Parquet file.
        tokenizer: the tokenizer of its ids; None: the one that it names.

    Raises:
        ConfigError: it is no such trace, or names no tokenizer.
    """

    def __init__(self, path: Path, tokenizer: str | None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            table = parquet.read_table(path)
            self.about = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if self.about.get("format") != FORMAT or "token_id" not in table.column_names:
            raise ConfigError(f"{path}: is no trace of text, as `polyad experts trace` writes it")
        named = tokenizer or self.about.get("tokenizer") or self.about.get("data")
        if named is None:
            raise ConfigError(f"{path}: names no tokenizer; name it with --tokenizer")
        self._frame, self._tokenizer = table.to_pandas().sort_values([*PLACE, "slot"]), named
        self.layers = [
            RoutedLayer(name=name, levels=tuple(each["experts"]))
            for name, each in self.about["layers"].items()
        ]
        if "level" in self._frame or self.about.get("shares"):
            raise ConfigError(f"{path}: its tokens weight all experts, of which it has the highest")
        of_layer = self._frame[self._frame["module"] == self.layers[0].name]
        tokens = of_layer[of_layer["slot"] == 0]
        ids = [each.to_numpy(np.int64) for _, each in tokens.groupby("window")["token_id"]]
        self.rows, self.length = len(ids), max(map(len, ids))
        self.amount, self.predicts_both_ways = len(tokens), False
        self.stream = TokenStream.of(path, ids, self.tokenizer.vocab_size)
        self.real_BT = torch.zeros(self.rows, self.length, dtype=torch.bool)
        self.ids_BT = torch.zeros(self.rows, self.length, dtype=torch.int64)
        for row, each in enumerate(ids):
            self.real_BT[row, : len(each)], self.ids_BT[row, : len(each)] = True, torch.tensor(each)
        self.place_BT = self.real_BT.flatten().cumsum(0).view_as(self.ids_BT) - 1

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the ids."""
        return load_tokenizer(self._tokenizer)

    def classes(self) -> None:
        """Text has no classes."""

    def counted_BT(self, batch: Passages) -> Tensor:
        """Which tokens count: those of the trace."""
        return batch.scored_BP

    def position_BT(self, batch: Passages) -> Tensor:
        """The place of each token in the trace; -1: it does not count."""
        return self.place_BT[batch.number_B].where(batch.scored_BP, -1)

    def read(self, layers: Sequence[RoutedLayer]) -> Iterator[ForwardPass]:
        """Yields the decisions of some layers, as `Subject.read` does those of a model."""
        weighted = "weight" in self._frame
        routes: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            rows = self._frame[self._frame["module"] == layer.name]
            expert_NK = torch.tensor(rows["expert"].to_numpy(np.int64)).view(self.amount, -1)
            weight_NK = torch.ones(expert_NK.shape)
            if weighted:
                weight_NK = torch.tensor(rows["weight"].to_numpy()).view_as(weight_NK)
            routes[layer.name] = expert_NK, weight_NK
        for number_B in torch.split(torch.arange(self.rows), AT_ONCE):
            real_BT, place_N = (
                self.real_BT[number_B],
                self.place_BT[number_B].clamp_min(0).flatten(),
            )
            ids_BT = self.ids_BT[number_B]
            batch = Passages(number_B, ids_BT, ids_BT, ids_BT, real_BT)
            decisions = {}
            for layer in layers:
                expert_NK, weight_NK = (each[place_N] for each in routes[layer.name])
                selected = Selected.of(weight_NK, expert_NK, layer.num_experts)
                scores_NE = spread(selected, layer.num_experts)
                decisions[layer.name] = Decision(levels=[scores_NE], selected=selected)
            row_N = torch.arange(len(number_B)).unsqueeze(1).where(real_BT, -1).flatten()
            yield ForwardPass(
                number_R=number_B,
                batch=batch,
                output=None,
                of_all_tokens=decisions,
                entering={},
                row_N=row_N,
            )

    def subject(self, layers: Sequence[RoutedLayer]) -> Subject:
        """What is read, without a model."""
        return Subject(nn.Module(), layers, self, AT_ONCE)


def specialization_of_trace(path: Path, tokenizer: str | None = None) -> Tables:
    """Measures what can be counted of how experts divide the work; see `Specialization`.

    Args:
        path: the trace.
        tokenizer: as for `TracedText`.
    """
    samples = TracedText(path, tokenizer)
    measure = Specialization(counts_only=True)
    measure.begin(samples.subject(samples.layers))
    for reading in samples.read(samples.layers):
        measure.add(reading)
    return measure.result()
