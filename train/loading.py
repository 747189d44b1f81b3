"""A trained model in Python: `polyad.load(path)`.

Shapes: T tokens of a text, S experts of a layer (of all its levels, side by side), K of them that a
token is shown with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.text.manifest import SplitName
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.decoder import DecoderSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.finding import best_checkpoint, newest_of, read_newest
from polyad.parallel.weights import Choice, Weights, open_weights
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import evaluate_opened
from polyad.train.evaluation.generate import Sampling, continue_text
from polyad.train.evaluation.predict import Prediction, Predictor
from polyad.train.experts.interventions import Intervention, parse_intervention
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.experts.trace import TEXT_EXTRA, TOP, Form, text_columns
from polyad.train.experts.trace import LayerExperts as LayerExperts
from polyad.train.experts.trace import experts_of as experts_of_layer
from polyad.train.explore.view import TextView, view_text
from polyad.train.reading import Evaluated, open_data_for
from polyad.train.results import aligned, json_value
from polyad.train.streaming import whole_model
from polyad.train.tasks.language import language_model
from polyad.train.tasks.vocabulary import need_tokenizer


def load(
    path: str | Path,
    *,
    weights: Choice = "trained",
    best: bool = False,
    precision: Precision = "fp32",
    device: torch.device | str | None = None,
    tokenizer: str | None = None,
    base: str | Path | None = None,
) -> "Run":
    """Loads a trained model, with its tokenizer if it reads text.

    Args:
        path: a run, whose newest checkpoint is taken; a checkpoint; a folder of another library's
            model (a decoder, BERT, ViT, CLIP, timm's Mixer); or one of safetensors under our names.
        weights: of a checkpoint: the `trained` ones, or `ema`, their moving average.
        best: take a run's best checkpoint in place of its newest.
        precision: of the parameters, `fp32` or `bf16`.
        device: None: the first GPU, or the CPU where there is none.
        tokenizer: a tokenizer.json, a SentencePiece .model or its folder; None: the one beside the
            weights.
        base: of a checkpoint of adapters: its base, if it has moved.

    Returns:
        The model on one device, in evaluation mode. No process group is needed.

    Raises:
        ValueError: one line says what is wrong.
    """
    if precision not in DTYPES:
        raise ConfigError(f"precision: {precision!r} is not allowed: {', '.join(DTYPES)}")
    has_gpu = torch.cuda.is_available()
    place = torch.device(device or ("cuda" if has_gpu else "cpu"))
    if place.type == "cuda" and not has_gpu:
        raise ConfigError(f"device: {device} is not allowed: no GPU is found; allowed: cpu")

    def read(chosen: Path) -> Run:
        opened = open_weights(chosen, weights, None if base is None else Path(base))
        model = whole_model(opened, place, precision, "what is asked of it runs all blocks")
        return Run(opened, model, weights_choice=weights, precision=precision, tokenizer=tokenizer)

    choose = best_checkpoint if best else newest_of
    return read_newest(Path(path).expanduser(), read, choose)


class Run:
    """A trained model in memory; `load` makes it.

    What is done with it is done with `model`, so that a change to its parameters, or a hook, shows.

    Attributes:
        path: the folder of the weights: a checkpoint, or what was loaded.
        model: in evaluation mode, on one device; its `forward` returns a `ModelOutput`.
    """

    def __init__(
        self,
        weights: Weights,
        model: nn.Module,
        *,
        weights_choice: Choice,
        precision: Precision,
        tokenizer: str | None,
    ) -> None:
        self.path = weights.folder
        self.model = model
        self._weights, self._choice, self._precision = weights, weights_choice, precision
        self._tokenizer, self._config = tokenizer, weights.model_config()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            ConfigError: the model does not read text, or has no tokenizer beside it.
        """
        if not isinstance(self._config, DecoderSettings | BertConfig):
            raise self._not_of_text("has no tokenizer")
        return need_tokenizer(self._weights, self._tokenizer)

    def experts(self, text: str, *, top: int = TOP) -> "TextExperts":
        """Reads a text and returns the experts of every token.

        A BERT reads the text between [CLS] and [SEP], a decoder after the token that begins a
        document, if its tokenizer has one.

        Args:
            text: at most as many tokens as the model reads at once.
            top: of a muMoE, which gives a share to every expert: how many a token is shown with, of
                each level.

        Returns:
            Tokens, and of each layer with experts `experts` [T, K], `weights` [T, K] and `scores`
            [T, S]; `rows()` for a table of pandas, `table()` for one with the columns of
            `polyad experts trace`, and `print` for people.

        Raises:
            ConfigError: the model reads no text or has no experts, or the text is empty or too
                long.
        """
        ids = self._read_ids(text, top)
        tokens = [self.tokenizer.text_within(one) or self.tokenizer.decode([one]) for one in ids]
        return experts_of(self.model, ids, tokens, top)

    def show(
        self,
        text: str,
        *,
        interventions: Sequence[str | Intervention] = (),
        top: int = TOP,
        means: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> TextView:
        """Reads a text and shows experts, losses and next tokens, as `polyad explore` does.

        Args:
            text: at most as many tokens as the model reads at once.
            interventions: changes of experts, as `--intervene` takes them:
                `layer=1,expert=3,how=prune`. All act at once.
            top: as for `experts`.
            means: for `how=mean`: gives the mean outputs [S, D] of the experts of each layer.

        Returns:
            What a notebook shows as a table; `plain` and `changed` have losses and experts without
            and with the interventions, `next_tokens` the most probable next tokens, and `rows()` is
            for `pandas.DataFrame`.

        Raises:
            ConfigError: the model does not predict text or has no experts, the text is empty or too
                long, or an intervention is not possible.
        """
        self.check_shown()
        asked = [
            parse_intervention(each) if isinstance(each, str) else each for each in interventions
        ]
        ids = self._read_ids(text, top)
        name, model = str(self.path), self.model
        return view_text(
            *(model, self.tokenizer, name, ids), interventions=asked, top=top, means=means
        )

    def check_shown(self) -> None:
        """Checks that `show` is possible with some text.

        Raises:
            ConfigError: the model does not predict text, or has no experts or no tokenizer.
        """
        language_model(self._weights)
        self._check_experts()
        _ = self.tokenizer

    def _check_experts(self) -> None:
        if not self._config.has_experts():
            raise ConfigError(f"{self.path}: the model is dense: it has no experts")

    def _read_ids(self, text: str, top: int) -> list[int]:
        """The tokens of a text whose experts are asked for; see `experts`."""
        config = self._config
        if not isinstance(config, DecoderSettings | BertConfig):
            raise self._not_of_text("`polyad report` shows the experts of images")
        self._check_experts()
        if top < 1:
            raise ConfigError(f"top: {top} is not allowed: 1 or more")
        ids = [*self.tokenizer.before, *self.tokenizer.encode(text)]
        if isinstance(config, BertConfig):
            vocabulary = self.tokenizer.vocabulary()
            ids = [vocabulary["[CLS]"], *ids, vocabulary["[SEP]"]]
        if not 0 < len(ids) <= config.sequence_length:
            raise ConfigError(
                f"text: {len(ids):,} tokens are not allowed; the model reads 1 to "
                f"{config.sequence_length:,} tokens at a time"
            )
        return ids

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Continues a text; needs a language model.

        Args:
            prompt: an empty one begins a document.
            max_tokens: the most that are generated; an end of text ends earlier.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: choose among so many of the likeliest tokens; None: among all.
            top_p: choose among the fewest tokens that have this probability together.
            seed: of the choice; the same one gives the same text.

        Returns:
            The text after the prompt.

        Raises:
            ConfigError: the model does not predict text, or an argument is out of its range.
        """
        language_model(self._weights)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return continue_text(
            self.model,
            self.tokenizer,
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            name=str(self.path),
        ).text

    def predict(self, inputs: Sequence[str | Path | tuple[str, str]]) -> Sequence[Prediction]:
        """Labels inputs; needs a classifier, or a model that was trained on numbers.

        Args:
            inputs: texts, or pairs of texts for a model that was trained on pairs; of a model of
                images files or folders.

        Returns:
            Of each input, in their order, its `label` and the `probabilities` of all classes, or
            its `value`.

        Raises:
            ValueError: one line says what does not fit the model.
        """
        predictor = self.predictor()
        if predictor.reads_images:
            return predictor.images([str(each) for each in inputs]).predictions
        pairs = [(each, None) if isinstance(each, str | Path) else each for each in inputs]
        seconds = [second for _, second in pairs if second is not None]
        return predictor.texts([str(first) for first, _ in pairs], seconds).predictions

    def predictor(self) -> Predictor:
        """Gives what `polyad predict` labels texts and images with."""
        return Predictor(self._weights, self.model, lambda: self.tokenizer)

    def evaluate(
        self,
        data: str | Path | None = None,
        split: SplitName = "validation",
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Scores the model on held-out data, as `polyad evaluate` does.

        Args:
            data: prepared data; None: that of the run. A folder of weights has none.
            split: `validation`, `test` or `train`.
            batch_size: samples in a forward pass; None: as the run's configuration says.

        Returns:
            What `polyad evaluate --json` writes: of text `loss` (nats a token), `perplexity` and
            counts; of images `accuracy`.

        Raises:
            ValueError: one line says what is wrong.
        """
        opened = self.open_data(data, batch_size)
        with comm.left_again():
            found: dict[str, Any] = json_value(evaluate_opened(opened, split, model=self.model))
            return found

    def open_data(self, data: str | Path | None, batch_size: int | None = None) -> Evaluated:
        """Opens held-out data that fits the model; see `evaluate`."""
        overrides = [f"train.precision={self._precision}"]
        if batch_size is not None:
            overrides.append(f"evaluation.batch_size={batch_size}")
        place = None if data is None else str(Path(data).expanduser())
        return open_data_for(self._weights, place, tuple(overrides), self._choice)

    def __repr__(self) -> str:
        """Names the folder, the model and its parameters."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"polyad.Run({str(self.path)!r}: {self._config.kind}, {count:,} parameters)"

    def _not_of_text(self, rest: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: model.kind: {self._config.kind}: the model reads no text: {rest}"
        )


class ExpertRow(NamedTuple):
    """One expert of one token in one layer."""

    position: int
    """The place of the token in the text, from 0."""
    token: str
    layer: str
    """The name of the layer's module."""
    expert: str
    """Its number, or LEVEL.NUMBER where there are several levels."""
    weight: float
    """The weight of the expert's output: see `LayerExperts.weights`."""
    score: float
    """What the choice was made by: see `LayerExperts.scores`."""


@dataclass(frozen=True, kw_only=True)
class TextExperts:
    """The experts of every token of a text."""

    tokens: list[str]
    """The text of each token."""
    token_ids: Tensor
    """[T] int64."""
    layers: dict[str, LayerExperts]
    """The layers with experts, by the name of their module, in the order of the model."""

    def rows(self) -> list[ExpertRow]:
        """Lists every expert of every token, as `pandas.DataFrame` takes it.

        A layer is the name of its module, and an expert LEVEL.NUMBER where there are levels: in
        `table` these are `module`, `level` and `expert`.
        """
        return [
            ExpertRow(
                position=position,
                token=token,
                layer=name,
                expert=each.layer.expert_name(expert),
                weight=float(each.weights[position, k]),
                score=float(each.scores[position, expert]),
            )
            for name, each in self.layers.items()
            for position, token in enumerate(self.tokens)
            for k, expert in enumerate(each.experts[position].tolist())
        ]

    def table(self) -> Any:
        """Lists the same with the columns of `polyad experts trace`, and their meaning.

        Returns:
            A `pyarrow.Table`, with `score` and `entropy`: `to_pandas()`, or
            `pyarrow.parquet.write_table(table, FILE)`. The text is document 0, read as window 0.
        """
        import pyarrow as pa

        place_T = torch.arange(len(self.tokens))
        tokens = text_columns(0, place_T, place_T, self.token_ids)
        form = Form([each.layer for each in self.layers.values()], list(tokens), TEXT_EXTRA)
        batches = [form.rows(each, tokens, place_T) for each in self.layers.values()]
        return pa.Table.from_batches(batches, form.schema({})).unify_dictionaries()

    def __str__(self) -> str:
        """A table for people: a line for each token, a column for each layer."""
        columns = [["", *(repr(token)[1:-1] for token in self.tokens)]]
        for each in self.layers.values():
            cells = [
                ", ".join(
                    f"{each.layer.expert_name(expert)} {weight:.2f}"
                    for expert, weight in zip(experts, weights, strict=True)
                )
                for experts, weights in zip(
                    each.experts.tolist(), each.weights.tolist(), strict=True
                )
            ]
            columns.append([each.layer.title, *cells])
        return "\n".join(aligned(zip(*columns, strict=True), "<"))


def experts_of(
    model: nn.Module, token_ids: Sequence[int], tokens: Sequence[str], top: int
) -> TextExperts:
    """Reads a text and keeps what the routers decide.

    Args:
        model: a decoder or BERT in evaluation mode, whole on one device.
        token_ids: of the text, at most as many as the model reads.
        tokens: the text of each.
        top: experts of a token that are shown of each level of a muMoE.
    """
    layers = [layer for layer in routed_layers(model) if layer.in_block]
    input_ids_1T = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with deciding(model, layers) as decisions, torch.inference_mode():
        model(input_ids_1T)
    return TextExperts(
        tokens=list(tokens),
        token_ids=input_ids_1T[0].cpu(),
        layers={
            layer.name: experts_of_layer(layer, decisions[layer.name], top) for layer in layers
        },
    )
