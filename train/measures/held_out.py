"""Held-out data read by a model, as tables: `polyad.load(path).read(...)`.

Every table is a `pandas.DataFrame`, with the columns of `polyad experts trace`: a token is named by
`window` and `position`, an expert by `module` and `expert` (and by `level`, in a hierarchy).

Shapes: N rows of a table, n of them in a batch, B windows of a batch, T tokens of a window, P
predicted tokens, S experts of a layer (all levels side by side), F hidden units of an expert, D
width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from polyad.model.smoe.layer import SelectingMoE
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import intervening
from polyad.train.experts.probing import RoutedLayer, every_layer
from polyad.train.experts.token_classes import labellings
from polyad.train.experts.trace import TOP
from polyad.train.measures.trace import TraceRows, check_extra
from polyad.train.reading import EvaluationContext, Subject
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import Passages, TextSamples, losses, samples_of, through


class HeldOut:
    """Samples of held-out data, spread evenly over a split; each table reads them once.

    Args:
        opened: weights and data.
        model: the weights' model, in evaluation mode, whole on this process.
        tokens: approximate number of tokens or images to read.
    """

    def __init__(self, opened: EvaluationContext, model: nn.Module, tokens: int) -> None:
        opened.task.check_split(opened.split)
        self._opened, self._model = opened, model
        self._samples = samples_of(opened.task, opened.split, tokens)
        self._layers = {each.name: each for each in every_layer(model)}

    @torch.inference_mode()
    def trace(self, *extra: str, top: int = TOP) -> Any:
        """Returns the experts of every token: a row for each token, layer and expert.

        Args:
            extra: further columns: `score`, `entropy`, `norm`, `loss`.
            top: number of experts per token and level, if tokens weight every expert.
        """
        import pandas as pd

        check_extra("trace", extra, self._opened)
        subject = self._subject(list(self._layers.values()))
        rows = TraceRows(subject, extra, top)
        frames = [frame for forward_pass in subject.read() for frame in rows.of(forward_pass)]
        table = pd.concat(frames, ignore_index=True)
        return table.astype({name: "category" for name in ("file", "module") if name in table})

    def statistics(self) -> Any:
        """Returns statistics of every expert, which are said to predict how much it matters.

        Those of `polyad experts atlas` (`frequency`, `mean_weight`, `mean_norm`, `sum_norm`,
        `reap`, `mone`), and `probability`: the mean over all tokens of the expert's score.
        """
        import pandas as pd

        layers = list(self._layers.values())
        tables = []
        for name, each in self._subject(layers).moments().items():
            layer = self._layers[name]
            columns = {key: value_S.numpy() for key, value_S in each.statistics().items()}
            places = map(layer.named, range(layer.num_experts))
            tables.append(pd.DataFrame(places).assign(**columns))
        return pd.concat(tables, ignore_index=True)

    @torch.inference_mode()
    def losses(self) -> Any:
        """Returns the loss of every predicted token, in nats, at the position that predicts it.

        Raises:
            ConfigError: the model does not predict text from left to right.
        """
        import pandas as pd

        text, tables = self._text("losses"), []
        for forward_pass in self._subject([]).read():
            passages, scored_BP = forward_pass.batch, forward_pass.batch.scored_BP
            window_B, _, _ = text.places(passages)
            columns_BP = {
                "window": window_B.unsqueeze(1).expand_as(scored_BP),
                "position": passages.places_BP,
                "token_id": passages.ids_BT,
                "predicted_id": passages.target_BP,
                "loss": losses(self._model, forward_pass.output, passages).double(),
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
        for name, each in labellings(text.tokenizer, text.stream, text.length).items():
            if name == "position":
                class_N = each.of(torch.zeros(1, text.length))[0].numpy()[table["position"]]
            else:
                class_N = each.of(ids_N1)[:, 0].numpy()
            column = "place" if name == "position" else name
            table[column] = pd.Categorical.from_codes(class_N, each.classes)
        return table.drop(columns="loss")

    @torch.inference_mode()
    def without(self, rows: Any) -> npt.NDArray[np.float64]:
        """Returns for each row of a trace the token's loss without this expert at this token alone.

        Args:
            rows: rows of `trace` in which a token is predicted.

        Returns:
            [N], in nats.

        Raises:
            ConfigError: the model does not predict text from left to right.
        """
        loss_N, model = np.zeros(len(rows)), self._model
        layers = [self._layers[name] for name in rows["module"].unique()]
        for passages, part, entering in self._again(rows, [layer.block for layer in layers]):
            for layer in layers:
                x_BTD, own = entering[layer.block], part[part["module"] == layer.name]
                with intervening(model, layer) as intervene:
                    for first in range(0, len(own), len(x_BTD)):
                        some = own.iloc[first : first + len(x_BTD)]
                        window_n, position_n, column_n = _tensors(some, x_BTD.device)
                        chosen_nS = nn.functional.one_hot(column_n, layer.num_experts).bool()
                        at_nT = nn.functional.one_hot(position_n, x_BTD.shape[1]).bool()
                        intervene(chosen_nS, at_nT)
                        y_nTD = through(model, x_BTD[window_n], layer.block)
                        loss_nP = losses(model, y_nTD, passages.rows(window_n)).double()
                        own_n1 = loss_nP.gather(1, position_n.unsqueeze(1))
                        loss_N[some.index] = own_n1[:, 0].cpu().numpy()
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
        units: list[tuple[Any, Tensor]] = []
        entered: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, arguments, output: entered.update({name: arguments[0]})

        with ExitStack() as hooks:
            for layer in (self._layers[name] for name in rows["module"].unique()):
                module = self._model.get_submodule(layer.name)
                if not isinstance(module, SelectingMoE):
                    raise ConfigError(
                        f"hidden: {layer.title} is not allowed: its experts have no units of their "
                        "own"
                    )
                hooks.enter_context(module.dispatcher.register_forward_hook(keep(layer.name)))
            for passages, part, _ in self._again(rows, ()):
                for (name, expert), some in part.groupby(["module", "column"], observed=True):
                    experts: Any = self._model.get_submodule(name).experts
                    x_BTD = entered[name].view(*passages.ids_BT.shape, -1)
                    window_n, position_n, _ = _tensors(some, x_BTD.device)
                    hidden_nF = experts.inner(x_BTD[window_n, position_n], expert).float()
                    units.append((some.index, hidden_nF.cpu()))
        numbers, hidden = zip(*units, strict=True)
        return torch.cat(hidden).numpy()[np.concatenate(numbers).argsort()]

    def _again(
        self, rows: Any, blocks: Sequence[int]
    ) -> Iterator[tuple[Passages, Any, Mapping[int, Tensor]]]:
        """Reads the windows of some rows once more.

        Yields:
            A batch; a table of its rows by their number, with the row of their `window` in the
            batch and the `column` of their expert; and the inputs of blocks.
        """
        table = rows.reset_index(drop=True)
        level = table["level"] if "level" in table else np.zeros(len(table), dtype=np.int64)
        table["column"] = table["expert"] + [
            self._layers[name].columns[at].start
            for name, at in zip(table["module"], level, strict=True)
        ]
        windows = sorted(table["window"].unique().tolist())
        table["window"] = np.searchsorted(windows, table["window"])
        text, model = self._text("rows of tokens").some(windows), self._model
        device = next(model.parameters()).device
        for number_B, passages in text.batches(self._opened.batch_size, 0, 1, device):
            row_of = {number: row for row, number in enumerate(number_B.tolist())}
            part = table[table["window"].isin(row_of)]
            entering = dict.fromkeys(blocks, torch.empty(0))
            text.forward(model, passages, entering)
            yield passages, part.assign(window=part["window"].map(row_of)), entering

    def _subject(self, layers: Sequence[RoutedLayer]) -> Subject:
        return Subject(self._model, layers, self._samples, self._opened.batch_size)

    def _text(self, name: str) -> TextSamples:
        self._opened.need(name, LanguageModelling)
        assert isinstance(self._samples, TextSamples)
        return self._samples


def _tensors(rows: Any, device: torch.device) -> list[Tensor]:
    """The window's row in the batch, the position and the expert's column of each row."""
    names = ("window", "position", "column")
    return [torch.tensor(rows[name].to_numpy(np.int64), device=device) for name in names]
