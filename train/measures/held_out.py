"""Held-out data read by a model, as tables: `polyad.load(path).read(...)`.

Every table is a `pandas.DataFrame`, with the columns of `polyad experts trace`: a token is named by
`window` and `position`, an expert by `module` and `expert` (and by `level`, in a hierarchy).

Shapes: N rows of a table, n of them in a batch, B windows of a batch, T tokens of a window, P
predicted tokens, S experts of a layer (all levels side by side), F hidden units of an expert, D
width.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action, intervening
from polyad.train.experts.moments import ExpertMoments
from polyad.train.experts.probing import RoutedLayer, routed_head, routed_layers
from polyad.train.experts.token_classes import labellings
from polyad.train.experts.trace import EXTRA, TOP, Form
from polyad.train.measures.trace import OF_TOKENS, Trace
from polyad.train.reading import Evaluated, Reading, read
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import Passages, TextSamples, losses, samples_of, through


class HeldOut:
    """Samples of held-out data, spread evenly over a split; each table reads them once.

    Args:
        opened: weights and data.
        model: the weights' model, in evaluation mode, whole on this process.
        split: name of the split.
        tokens: approximate number of tokens or images to read.
    """

    def __init__(self, opened: Evaluated, model: nn.Module, split: str, tokens: int) -> None:
        opened.task.check_split(split)
        self._opened, self._model = opened, model
        self._samples = samples_of(opened.task, split, tokens)
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        self._layers = {each.name: each for each in layers}

    @torch.inference_mode()
    def trace(self, *extra: str, top: int = TOP) -> Any:
        """Returns the experts of every token: a row for each token, layer and expert.

        Args:
            extra: further columns: `score`, `entropy`, `norm`, `loss`.
            top: number of experts per token and level, if tokens weight every expert.
        """
        import pyarrow as pa

        for name in extra:
            if name not in EXTRA:
                raise ConfigError(f"trace: {name!r} is not allowed; allowed: {', '.join(EXTRA)}")
        of_tokens = OF_TOKENS[type(self._samples)]
        if "loss" in extra:
            self._text("trace: loss")
            of_tokens += ("loss",)
        layers, batches = list(self._layers.values()), list[Any]()
        form = Form(layers, of_tokens, extra)
        trace = Trace(self._samples, self._model, form, top, batches.append)
        for reading in self._read(layers):
            trace.add(reading)
        return pa.Table.from_batches(batches, form.schema({})).unify_dictionaries().to_pandas()

    def statistics(self) -> Any:
        """Returns statistics of every expert, which are said to predict how much it matters.

        Those of `polyad experts atlas` (`frequency`, `mean_weight`, `mean_norm`, `sum_norm`,
        `reap`, `mone`), and `probability`: the mean over all tokens of the expert's score.
        """
        import pandas as pd

        layers = list(self._layers.values())
        moments = ExpertMoments(layers)
        for reading in self._read(layers):
            moments.add(reading.decisions)
        tables = []
        for name, each in moments.result().items():
            layer = self._layers[name]
            level, expert = zip(*map(layer.place, range(layer.num_experts)), strict=True)
            columns = {key: value_S.numpy() for key, value_S in each.statistics().items()}
            tables.append(
                pd.DataFrame({"module": name, "level": level, "expert": expert} | columns)
            )
        return pd.concat(tables, ignore_index=True)

    @torch.inference_mode()
    def losses(self) -> Any:
        """Returns the loss of every predicted token, in nats, at the position that predicts it.

        Raises:
            ConfigError: the model does not predict text from left to right.
        """
        import pandas as pd

        text, tables = self._text("losses"), []
        for reading in self._read([]):
            passages, scored_BP = reading.batch, reading.batch.scored_BP
            window_B, _, _ = text.places(passages)
            columns_BP = {
                "window": window_B.unsqueeze(1).expand_as(scored_BP),
                "position": passages.places_BP,
                "token_id": passages.ids_BT,
                "predicted_id": passages.target_BP,
                "loss": losses(self._model, reading.output, passages).double(),
            }
            columns = {name: each[scored_BP].cpu().numpy() for name, each in columns_BP.items()}
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def classes(self) -> Any:
        """Returns the classes of the token read at each position: by its characters, by its
        position in the window, and by its frequency in the split, in eighths.

        Raises:
            ConfigError: the model does not predict text from left to right.
        """
        import pandas as pd

        table, text = self.losses(), self._text("classes")
        ids_N1 = torch.from_numpy(table["token_id"].to_numpy().copy()).unsqueeze(1)
        for each in labellings(text.tokenizer, text.stream, text.length):
            if each.name == "position":
                class_N = each.of(torch.zeros(1, text.length))[0].numpy()[table["position"]]
            else:
                class_N = each.of(ids_N1)[:, 0].numpy()
            name = "place" if each.name == "position" else each.name
            table[name] = pd.Categorical.from_codes(class_N, each.classes)
        return table.drop(columns="loss")

    @torch.inference_mode()
    def without(
        self, rows: Any, *, how: Literal["contribution", "route-around"] = "contribution"
    ) -> npt.NDArray[np.float64]:
        """Returns for each row of a trace the token's loss without this expert at this token alone.

        Args:
            rows: rows of `trace` in which a token is predicted.
            how: as in `--intervene`.

        Returns:
            [N], in nats.

        Raises:
            ConfigError: the model does not predict text from left to right.
        """
        loss_N, model = np.zeros(len(rows)), self._model
        layers = [self._layers[name] for name in rows["module"].unique()]
        blocks = [layer.block for layer in layers]
        for part, entering in self._again(rows, blocks):
            for layer in layers:
                x_BTD, of_layer = entering[layer.block], part.of(layer)
                with intervening(model, layer, Action(how=how)) as intervene:
                    for some in of_layer.in_parts(len(x_BTD)):
                        chosen_rS = nn.functional.one_hot(some.column_n, layer.num_experts).bool()
                        at_rT = nn.functional.one_hot(some.position_n, x_BTD.shape[1]).bool()
                        intervene(chosen_rS, at_rT)
                        y_rTD = through(model, x_BTD[some.window_n], layer.block)
                        loss_rP = losses(model, y_rTD, part.passages.rows(some.window_n))
                        own_r1 = loss_rP.double().gather(1, some.position_n.unsqueeze(1))
                        loss_N[some.row_n.cpu().numpy()] = own_r1[:, 0].cpu().numpy()
        return loss_N

    @torch.inference_mode()
    def hidden(self, rows: Any) -> npt.NDArray[np.float32]:
        """Returns for each row of a trace the hidden units of its expert, after the activation.

        Args:
            rows: rows of `trace`, of layers that select whole experts.

        Returns:
            [N, F].

        Raises:
            ConfigError: a layer has no units that belong to one expert alone.
        """
        found: list[tuple[Tensor, Tensor]] = []
        entered: dict[str, Tensor] = {}
        layers = [self._layers[name] for name in rows["module"].unique()]
        handles = []
        for layer in layers:
            module = self._model.get_submodule(layer.name)
            if not isinstance(module, SelectingMoE):
                raise ConfigError(
                    f"hidden: {layer.title} is not allowed: its experts have no units of their own"
                )
            keep = _Entering(entered, layer.name)
            handles.append(module.dispatcher.register_forward_hook(keep))
        try:
            for part, _ in self._again(rows, ()):
                for layer in layers:
                    experts: Any = self._model.get_submodule(layer.name).experts
                    x_BTD = entered[layer.name].view(*part.passages.ids_BT.shape, -1)
                    of_layer = part.of(layer)
                    for expert in sorted(set(of_layer.column_n.tolist())):
                        some = of_layer.where(of_layer.column_n == expert)
                        x_nD = x_BTD[some.window_n, some.position_n]
                        found.append((some.row_n, experts.inner(x_nD, expert).float()))
        finally:
            for handle in handles:
                handle.remove()
        row_N, hidden_NF = (torch.cat(each).cpu() for each in zip(*found, strict=True))
        return hidden_NF[row_N.argsort()].numpy()

    def _again(
        self, rows: Any, blocks: Sequence[int]
    ) -> Iterator[tuple["_Rows", Mapping[int, Tensor]]]:
        """Reads the windows of some rows once more.

        Yields:
            The rows of each batch, and the inputs of blocks.
        """
        windows = sorted(rows["window"].unique().tolist())
        text, model = self._text("rows of tokens").some(windows), self._model
        device = next(model.parameters()).device
        window_N = np.searchsorted(windows, rows["window"])
        for number_B, passages in text.batches(self._opened.batch_size, 0, 1, device):
            row_n = np.flatnonzero(np.isin(window_N, number_B.numpy()))
            some, row_of = rows.iloc[row_n], {n: row for row, n in enumerate(number_B.tolist())}
            level = some["level"] if "level" in some else np.zeros(len(some), dtype=np.int64)
            column_n = [
                sum(self._layers[name].levels[: int(at)]) + int(expert)
                for name, at, expert in zip(some["module"], level, some["expert"], strict=True)
            ]
            window_n = [row_of[number] for number in window_N[row_n].tolist()]
            position_n = some["position"].to_numpy()
            numbers = (row_n, window_n, position_n, column_n)
            tensors = (torch.tensor(np.array(each), device=device).long() for each in numbers)
            entering = dict.fromkeys(blocks, torch.empty(0))
            text.forward(model, passages, entering)
            yield _Rows(some["module"].to_numpy(), passages, *tensors), entering

    def _read(self, layers: Sequence[RoutedLayer]) -> Iterator[Reading]:
        return read(self._model, layers, self._samples, batch_size=self._opened.batch_size)

    def _text(self, name: str) -> TextSamples:
        self._opened.need(name, LanguageModelling)
        assert isinstance(self._samples, TextSamples)
        return self._samples


class _Rows(NamedTuple):
    """The rows of a trace that are in a batch."""

    module_n: npt.NDArray[Any]
    passages: Passages
    row_n: Tensor
    """Their numbers in the table."""
    window_n: Tensor
    """Their windows' rows in the batch."""
    position_n: Tensor
    column_n: Tensor
    """The experts, counted over all levels."""

    def where(self, chosen_n: Tensor) -> "_Rows":
        """Returns the rows that are chosen."""
        others = (each[chosen_n] for each in self[2:])
        return _Rows(self.module_n[chosen_n.cpu().numpy()], self.passages, *others)

    def of(self, layer: RoutedLayer) -> "_Rows":
        """Returns the rows of a layer."""
        chosen_n = torch.from_numpy(self.module_n == layer.name)
        return self.where(chosen_n.to(self.row_n.device))

    def in_parts(self, size: int) -> "Iterator[_Rows]":
        """Parts of at most `size` rows."""
        number_n = torch.arange(len(self.row_n), device=self.row_n.device)
        for first in range(0, len(number_n), size):
            yield self.where((number_n >= first) & (number_n < first + size))


class _Entering:
    """Keeps the tokens that enter a layer's experts."""

    def __init__(self, entered: dict[str, Tensor], name: str) -> None:
        self._entered, self._name = entered, name

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._entered[self._name] = arguments[0]
