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
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from polyad.data.files import parse_json, whole_file
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

    texts = read_routes(file)
    lengths = [len(each.ids_T) for each in texts]
    experts_NLK = np.concatenate([each.experts_TLK for each in texts])
    experts, (_, count, _) = 1 + int(experts_NLK.max()), experts_NLK.shape
    layers = [RoutedLayer(name=f"blocks.{n}.feed_forward", levels=(experts,)) for n in range(count)]
    of_tokens = pd.DataFrame({"window": np.repeat(np.arange(len(texts)), lengths)})
    of_tokens["document"] = of_tokens["window"]
    of_tokens["position"] = of_tokens["offset"] = np.concatenate([*map(np.arange, lengths)])
    of_tokens["token_id"] = np.concatenate([each.ids_T for each in texts])
    token_A, layer_A, slot_A = (each.ravel() for each in np.indices(experts_NLK.shape))
    frame = of_tokens.loc[token_A].assign(
        layer=layer_A,
        module=np.array([layer.name for layer in layers])[layer_A],
        slot=slot_A,
        expert=experts_NLK.ravel(),
    )
    columns = [name for name in COLUMNS if name in frame]
    about = {"routes": str(file), "tokenizer": tokenizer}
    frame = frame[columns].astype({name: COLUMNS[name] for name in columns})
    with whole_file(output) as partial:
        table = pa.Table.from_pandas(frame, trace_schema(layers, columns, about), False)
        parquet.write_table(table, partial, compression="zstd")
    facts = {
        "output": str(output),
        "rows": len(frame),
        "tokens_traced": len(of_tokens),
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
        lengths_B1 = torch.tensor([[len(each)] for each in ids])
        self.rows, self.length = len(ids), int(lengths_B1.max())
        self.amount, self.predicts_both_ways = len(tokens), False
        self.stream = TokenStream.of(path, ids, self.tokenizer.vocab_size)
        self.real_BT = torch.arange(self.length) < lengths_B1
        self.ids_BT = pad_sequence([*map(torch.tensor, ids)], batch_first=True)
        self.place_BT = self.real_BT.flatten().cumsum(0).view_as(self.ids_BT) - 1

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the ids."""
        return load_tokenizer(self._tokenizer)

    def counted_BT(self, batch: Passages) -> Tensor:
        """Which tokens count: those of the trace."""
        return batch.scored_BP

    def position_BT(self, batch: Passages) -> Tensor:
        """The place of each token in the trace; -1: it does not count."""
        return self.place_BT[batch.number_B].where(batch.scored_BP, -1)

    def routes(self, layer: RoutedLayer) -> tuple[Tensor, Tensor]:
        """The experts and weights of each token of the trace in a layer, [N, K]."""
        rows = self._frame[self._frame["module"] == layer.name]
        expert_NK = torch.tensor(rows["expert"].to_numpy(np.int64)).view(self.amount, -1)
        if "weight" not in self._frame:
            return expert_NK, torch.ones(expert_NK.shape)
        return expert_NK, torch.tensor(rows["weight"].to_numpy()).view_as(expert_NK)

    def subject(self, layers: Sequence[RoutedLayer]) -> Subject:
        """What is read, without a model."""
        return _Trace(nn.Module(), layers, self, AT_ONCE)


class _Trace(Subject):
    """What is read of a trace, as decisions of some layers of a model."""

    def read(self, *_: Any, **options: Any) -> Iterator[ForwardPass]:
        """Yields the decisions, as `Subject.read` does those of a model, whatever its options."""
        text = self.samples
        assert isinstance(text, TracedText)
        routes = {layer.name: text.routes(layer) for layer in self.layers}
        for number_B in torch.split(torch.arange(text.rows), self.batch_size):
            real_BT, ids_BT = text.real_BT[number_B], text.ids_BT[number_B]
            place_N = text.place_BT[number_B].clamp_min(0).flatten()
            decisions = {}
            for layer in self.layers:
                expert_NK, weight_NK = (each[place_N] for each in routes[layer.name])
                selected = Selected.of(weight_NK, expert_NK, layer.num_experts)
                scores_NE = spread(selected, layer.num_experts)
                decisions[layer.name] = Decision(levels=[scores_NE], selected=selected)
            row_N = torch.arange(len(number_B)).unsqueeze(1).where(real_BT, -1).flatten()
            yield ForwardPass(
                number_R=number_B,
                batch=Passages(number_B, ids_BT, ids_BT, ids_BT, real_BT),
                output=None,
                of_all_tokens=decisions,
                entering={},
                row_N=row_N,
            )


def specialization_of_trace(path: Path, tokenizer: str | None = None) -> Tables:
    """Measures what can be counted of how experts divide the work; see `Specialization`.

    Args:
        path: the trace.
        tokenizer: as for `TracedText`.
    """
    samples = TracedText(path, tokenizer)
    measure = Specialization(counts_only=True)
    measure.begin(samples.subject(samples.layers))
    measure.read()
    return measure.result()
