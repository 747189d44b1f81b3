"""Polyad in Python: `polyad.train(config)`, `polyad.load(path)`, and what a run can be asked.

Shapes: T tokens of a text, S experts of a layer (all levels side by side), K experts shown per
token.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints, overload

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from polyad.data.files import temporary_folder
from polyad.data.text.manifest import SplitName
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.config import dump_yaml
from polyad.model.decoder import DecoderSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import best_checkpoint, newest_of, read_newest
from polyad.parallel.foreign import TheirWeights, on_disk
from polyad.parallel.weights import Choice, Weights, load_model, open_weights
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.config.run import find_config, load_config
from polyad.train.errors import ConfigError
from polyad.train.evaluation.evaluate import evaluate
from polyad.train.evaluation.generate import Sampling, TextStream, check_text, generate_ids
from polyad.train.evaluation.predict import Prediction, Predictor
from polyad.train.exchange.convert import Format, convert
from polyad.train.experts.interventions import Intervention, intervened, parse_intervention
from polyad.train.experts.trace import TOP, read_experts, trace_columns, trace_rows
from polyad.train.experts.trace import LayerExperts as LayerExperts
from polyad.train.experts.view import TextView, label, view_text
from polyad.train.measures.held_out import HeldOut
from polyad.train.measures.measure import examine
from polyad.train.measures.registry import MEASURES
from polyad.train.reading import EvaluationContext, open_data_for
from polyad.train.results import Tables, aligned, json_value
from polyad.train.results import progress as progress_shown
from polyad.train.streaming import whole_model
from polyad.train.tasks.language import language_model
from polyad.train.tasks.vocabulary import SpecialTokens, ids_of_text, need_tokenizer

Result = TypeVar("Result")
Texts: TypeAlias = list[str] | tuple[str, ...]


def load(
    path: str | Path | nn.Module,
    *,
    weights: Choice = "trained",
    best: bool = False,
    precision: Precision = "fp32",
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    base: str | Path | None = None,
    progress: bool = True,
    **from_pretrained: Any,
) -> "Run":
    """Loads a trained model, with its tokenizer if it reads text.

    Args:
        path: a run, whose newest checkpoint is taken; a checkpoint; a folder of another library's
            model: a decoder, BERT, ViT, CLIP, or any mixture that transformers opens; its name on
            the hub, such as allenai/OLMoE-1B-7B-0924; one of safetensors under our names; or a
            mixture in memory, an object of transformers.
        weights: which weights of a checkpoint: `trained`, or `ema`, their moving average.
        best: take a run's best checkpoint in place of its newest.
        precision: of the parameters, `fp32` or `bf16`.
        device: None: the first GPU, or the CPU if there is none.
        tokenizer: a tokenizer.json, a SentencePiece .model or its folder, of a model in memory an
            object of transformers; None: the one beside the weights.
        base: base model of a checkpoint with adapters, if it has moved.
        progress: whether long work shows its progress.
        from_pretrained: arguments with which transformers loads a mixture, such as `device_map` or
            `quantization_config`.

    Returns:
        The model on one device, in evaluation mode. No process group is needed.

    Raises:
        ValueError: one line says what is wrong.
    """
    if precision not in DTYPES:
        raise ConfigError(f"precision: {precision!r} is not allowed: {', '.join(DTYPES)}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(path, nn.Module):
        theirs = TheirWeights.of_model(path, tokenizer)
        return Run(theirs, load_model(theirs, place, precision), weights, precision, None, progress)
    folder = on_disk(Path(path).expanduser())

    def read(chosen: Path) -> Run:
        if from_pretrained:
            opened: Weights = TheirWeights(chosen, from_pretrained)
            model = load_model(opened, place, precision)
        else:
            opened = open_weights(chosen, weights, None if base is None else Path(base))
            model = whole_model(opened, place, precision, "what is asked of it runs all blocks")
        return Run(opened, model, weights, precision, tokenizer, progress)

    return read_newest(folder, read, best_checkpoint if best else newest_of)


def train(config: str | Path | Mapping[str, Any], **keys: Any) -> "Run":
    """Trains a model in this process, from its newest checkpoint if it has one, as `polyad train`.

    Args:
        config: a configuration: a file, the name of a shipped one, or its content; or the folder of
            a run, which continues.
        keys: values of other keys, with two underscores for a dot: `train__steps=20`.

    Returns:
        The run.

    Raises:
        ValueError: one line says what is wrong.
    """
    from polyad.train.train import main

    overrides = [
        f"{key.replace('__', '.')}={json.dumps(value, default=str)}" for key, value in keys.items()
    ]
    with ExitStack() as stack:
        if isinstance(config, Mapping):
            file = stack.enter_context(temporary_folder("polyad-train-")) / "config.yaml"
            file.write_text(dump_yaml(dict(config)), "utf-8")
            config = file
        file = find_config(Path(config).expanduser())
        # The process stays in its group of one: DeepSpeed keeps groups for ever.
        main(file, overrides)
        return load(load_config(file, overrides).run.folder)


def _by_name(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method of a run: errors name arguments in place of options, and progress may be silent."""

    @functools.wraps(method)
    def run(self: "Run", *arguments: Any, **named: Any) -> Result:
        with progress_shown(shown=self._progress):
            try:
                return method(self, *arguments, **named)
            except ValueError as error:
                text = re.sub(r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), str(error))
                if text == str(error):
                    raise
                raise type(error)(text) from None

    return run


class Run:
    """A trained model in memory; `load` makes it.

    All methods use `model`, so changes to its parameters and hooks take effect.

    Attributes:
        path: the folder of the weights, such as a checkpoint.
        model: in evaluation mode, on one device; its `forward` returns a `ModelOutput`.
    """

    def __init__(
        self,
        weights: Weights,
        model: nn.Module,
        choice: Choice,
        precision: Precision,
        tokenizer: str | None,
        progress: bool,
    ) -> None:
        self.path = weights.folder
        self.model = model
        self._weights, self._choice, self._precision = weights, choice, precision
        self._progress = progress
        self._tokenizer, self._config = tokenizer, weights.model_config()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model does not read text, or has no tokenizer beside it.
        """
        if not isinstance(self._config, DecoderSettings | BertConfig):
            raise ConfigError(f"{self.path}: model.kind: {self._config.kind}: reads no text")
        return need_tokenizer(self._weights, self._tokenizer)

    @overload
    def experts(self, text: str, **options: Any) -> "TextExperts": ...
    @overload
    def experts(self, text: Texts, **options: Any) -> list["TextExperts"]: ...
    @_by_name
    def experts(
        self,
        text: str | Sequence[str],
        *,
        top: int = TOP,
        special_tokens: SpecialTokens = "text",
    ) -> Any:
        """Reads a text and returns the experts of every token.

        A BERT reads the text between [CLS] and [SEP], a decoder after the beginning-of-document
        token, if its tokenizer has one.

        Args:
            text: at most as many tokens as the model reads at once; a list of texts is read one by
                one, and its results are a list.
            top: for a muMoE, which weights every expert: how many experts to show per token and
                level.
            special_tokens: whether special tokens that are written in the text, such as
                <|im_start|>, are read as their characters (`text`) or as tokens (`parse`).

        Returns:
            Tokens, and for each layer with experts `experts` [T, K], `weights` [T, K] and `scores`
            [T, S]; `table()` for the columns of `polyad experts trace`, and `print` for display.

        Raises:
            ConfigError: the model does not read text or has no experts, or the text is empty or too
                long.
        """
        coder = self.tokenizer

        def read(document: str) -> TextExperts:
            ids = self._read_ids(document, special_tokens)
            tokens = [coder.text_within(one) or coder.decode([one]) for one in ids]
            layers, _ = read_experts(self.model, ids, top)
            return TextExperts(tokens=tokens, token_ids=torch.tensor(ids), layers=Layers(layers))

        return _of_each(text, read)

    @overload
    def show(self, text: str, **options: Any) -> TextView: ...
    @overload
    def show(self, text: Texts, **options: Any) -> list[TextView]: ...
    @_by_name
    def show(
        self,
        text: str | Sequence[str],
        *,
        interventions: Sequence[str | Intervention] = (),
        top: int = TOP,
        special_tokens: SpecialTokens = "text",
        means: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> Any:
        """Reads a text and shows experts, losses and next tokens.

        Args:
            text: as for `experts`.
            interventions: changes to experts as in `--intervene`: `layer=1,expert=3,how=prune`. All
                apply at once.
            top: as for `experts`.
            special_tokens: as for `experts`.
            means: for `how=mean`: returns the mean outputs [S, D] of each layer's experts.

        Returns:
            An object that notebooks show as a table; `plain` and `changed` have losses and experts
            without and with the interventions, `next_tokens` the most probable next tokens.

        Raises:
            ConfigError: the model does not predict text or has no experts, the text is empty or too
                long, or an intervention is not possible.
        """
        language_model(self._weights)
        return _of_each(
            text,
            lambda one: view_text(
                self.model,
                self.tokenizer,
                str(self.path),
                self._read_ids(one, special_tokens),
                interventions=_parsed(interventions),
                top=top,
                means=means,
            ),
        )

    def _read_ids(self, text: Any, special_tokens: SpecialTokens) -> list[int]:
        """The token ids of a text for `experts`."""
        check_text(text, "text")
        config, coder = self._config, self.tokenizer
        assert isinstance(config, DecoderSettings | BertConfig)
        if not config.has_experts():
            raise ConfigError(f"{self.path}: the model is dense: it has no experts")
        ids = ids_of_text(coder, text, special_tokens)
        if isinstance(config, BertConfig):
            vocabulary = coder.vocabulary()
            ids = [vocabulary["[CLS]"], *ids, vocabulary["[SEP]"]]
        if not 0 < len(ids) <= config.sequence_length:
            raise ConfigError(
                f"text: {len(ids):,} tokens are not allowed; the model reads 1 to "
                f"{config.sequence_length:,} tokens at a time"
            )
        return ids

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Texts, **options: Any) -> list[str]: ...
    @_by_name
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        max_tokens: int = 100,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        special_tokens: SpecialTokens = "text",
    ) -> Any:
        """Continues a text; needs a language model.

        Args:
            prompt: the text to continue; empty starts a document. A list of texts gives a list.
            max_tokens: maximum number of tokens to generate; an end-of-text token stops earlier.
            max_new_tokens: the same, by the name that transformers gives it.
            temperature: divides the logits; 0 takes the most probable token.
            top_k: sample from this many most probable tokens; None: from all.
            top_p: sample from the smallest set of tokens with this total probability.
            seed: seed of the sampling; equal seeds give equal texts.
            special_tokens: as for `experts`.

        Returns:
            The text after the prompt.

        Raises:
            ConfigError: the model does not predict text, or an argument is out of its range.
        """
        options: dict[str, Any] = {
            "max_tokens": max_tokens if max_new_tokens is None else max_new_tokens,
            "sampling": Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            "special_tokens": special_tokens,
        }
        return _of_each(prompt, lambda one: continuation_of(self, one, **options)["text"])

    @_by_name
    def predict(self, inputs: Sequence[str | Path | tuple[str, str]]) -> Sequence[Prediction]:
        """Labels inputs; needs a classifier or a regression model.

        Args:
            inputs: texts, or pairs of texts for a model that was trained on pairs; image files or
                folders for an image model.

        Returns:
            For each input, in order, its `label` and the `probabilities` of all classes, or its
            `value`.

        Raises:
            ValueError: one line says what does not fit the model.
        """
        predictor = predictor_of(self)
        if isinstance(inputs, str | Path):
            raise ConfigError(f"inputs: {str(inputs)!r} is not allowed: a list of inputs")
        if predictor.reads_images:
            return predictor.images([str(each) for each in inputs]).predictions
        for each in inputs:
            if not all(isinstance(text, str) for text in (each if type(each) is tuple else [each])):
                raise ConfigError(f"inputs: {each!r} is not allowed: a text, or a pair of texts")
        firsts = [each[0] if isinstance(each, tuple) else str(each) for each in inputs]
        seconds = [each[1] for each in inputs if isinstance(each, tuple)]
        return predictor.texts(firsts, seconds).predictions

    @_by_name
    def evaluate(
        self,
        data: str | Path | None = None,
        split: SplitName = "validation",
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Scores the model on held-out data, as `polyad evaluate` does.

        Args:
            data: prepared data; None: the run's (a folder of weights has none).
            split: `validation`, `test` or `train`.
            batch_size: samples per forward pass; None: as in the run's configuration.

        Returns:
            The output of `polyad evaluate --json`: for text `loss` (nats per token), `perplexity`
            and counts; for images `accuracy`.

        Raises:
            ValueError: one line says what is wrong.
        """
        opened = self._open_data(data, batch_size)
        with comm.left_again():
            values, _ = evaluate(opened, split, model=self.model)
        scores: dict[str, Any] = json_value(values)
        return scores

    @_by_name
    def measure(
        self,
        name: str,
        data: str | Path | None = None,
        split: SplitName = "validation",
        *,
        batch_size: int | None = None,
        interventions: Sequence[str | Intervention] = (),
        **options: Any,
    ) -> Tables:
        """Measures experts on held-out data, as the command `polyad experts NAME` does.

        Args:
            name: of the measure, also of one that a plugin has registered.
            data: prepared data; None: the run's (a folder of weights has none).
            split: `validation`, `test` or `train`.
            batch_size: samples per forward pass; None: as in the run's configuration.
            interventions: changes to experts whenever the model reads, as for `show`.
            options: those of the command, with underscores; numbers of layers and experts are a
                list.

        Returns:
            The result: `result["experts"]` is a `pandas.DataFrame` or a fact, `print` and notebooks
            show all.

        Raises:
            ValueError: one line says what is wrong.
        """
        if name not in MEASURES:
            raise ConfigError(f"name: {name!r} is no measure; there are {', '.join(MEASURES)}")
        kind = MEASURES[name]
        own = {each.name: each for each in fields(kind)}
        for key, value in options.items():
            if key not in own:
                raise ConfigError(f"{key}: is no option of {name}; there are {', '.join(own)}")
            if key in ("layers", "experts"):
                several = value if isinstance(value, list | tuple | range) else [value]
                value = tuple(map(str, several))
            try:
                options[key] = TypeAdapter(get_type_hints(kind)[key]).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ConfigError(f"{key}: {value!r} is not allowed: {reason}") from None
        needed = [key for key, f in own.items() if f.default is f.default_factory is MISSING]
        if missing := [key for key in needed if key not in options]:
            raise ConfigError(f"{missing[0]}: is missing; `polyad help experts {name}` explains it")
        opened = self._open_data(data, batch_size)._replace(interventions=_parsed(interventions))
        with comm.left_again():
            return examine(opened, kind(**options), split, model=self.model)

    def specialize(self, data: str | Path | None = None, **options: Any) -> Tables:
        """Shows how experts divide the work; see `measure`."""
        return self.measure("specialize", data, **options)

    def atlas(self, data: str | Path | None = None, **options: Any) -> Tables:
        """Shows what each expert is for, by removing it; see `measure`."""
        return self.measure("atlas", data, **options)

    def knockout(
        self, layers: Any, experts: Any, data: str | Path | None = None, **options: Any
    ) -> Tables:
        """Removes some experts of some layers, one at a time; see `measure`."""
        return self.measure("atlas", data, layers=layers, experts=experts, **options)

    def trace(self, output: str | Path, data: str | Path | None = None, **options: Any) -> Tables:
        """Writes the experts of every token to Parquet; see `measure`."""
        return self.measure("trace", data, output=output, **options)

    def prune(self, output: str | Path, data: str | Path | None = None, **options: Any) -> Tables:
        """Writes a mixture with fewer experts, and shows what that costs; see `measure`."""
        return self.measure("prune", data, output=output, **options)

    @_by_name
    def report(self, output: str | Path | None = None, **options: Any) -> dict[str, Any]:
        """Writes an HTML page about experts, as `polyad report` does.

        Args:
            output: the file; None: `report.html` in the folder of the run, or of the weights.
            options: those of the command, with underscores.

        Returns:
            The values of `--json`.
        """
        from polyad.train.report.command import report

        place = None if output is None else Path(output).expanduser()
        return report(self.path, output=place, **options)

    @_by_name
    def convert(self, destination: str | Path, to: Format, **options: Any) -> dict[str, Any]:
        """Writes the weights in another format, as `polyad convert` does.

        Args:
            destination: the folder to create.
            to: `huggingface`, `safetensors`, `polyad` or `peft`.
            options: `change`, `merge` and `base` of `polyad.train.exchange.convert.convert`.

        Returns:
            A description of what was written.
        """
        return convert(
            self.path, Path(destination).expanduser(), to, choice=self._choice, **options
        )

    @_by_name
    def read(
        self,
        data: str | Path | None = None,
        split: SplitName = "validation",
        *,
        tokens: int = 65_536,
        batch_size: int | None = None,
    ) -> HeldOut:
        """Reads held-out data for tables of experts, losses and hidden units.

        Args:
            data: prepared data; None: the run's.
            split: `validation`, `test` or `train`.
            tokens: approximate number of tokens or images to read, spread evenly over the split.
            batch_size: samples per forward pass; None: as in the run's configuration.

        Returns:
            The samples: `trace()`, `statistics()`, `losses()`, `classes()`, `without(rows)` and
            `hidden(rows)` read them. The recipes in docs/recipes use each.

        Raises:
            ValueError: one line says what is wrong.
        """
        opened = self._open_data(data, batch_size)._replace(split=split)
        return HeldOut(opened, self.model, tokens)

    def intervened(self, *interventions: str | Intervention) -> AbstractContextManager[None]:
        """A context in which experts are changed at every token, for all that the run does in it.

        Args:
            interventions: as in `--intervene`: `layer=1,expert=3,how=prune`. All apply at once.

        Raises:
            ConfigError: an intervention is not possible.
        """
        return intervened(self.model, _parsed(interventions))

    def _open_data(
        self, data: str | Path | None, batch_size: int | None = None
    ) -> EvaluationContext:
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


def predictor_of(run: Run) -> Predictor:
    """Returns what labels inputs by the model of a run."""
    return Predictor(run._weights, run.model, lambda: run.tokenizer)


def continuation_of(
    run: Run,
    prompt: str,
    *,
    sampling: Sampling,
    max_tokens: int,
    special_tokens: SpecialTokens = "text",
    interventions: Sequence[Intervention] = (),
    write: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Continues a text by the model of a run.

    Args:
        run: the run.
        prompt: the text; empty starts a document.
        sampling: how tokens are sampled.
        max_tokens: maximum number of tokens to generate.
        special_tokens: how special tokens in the prompt are read.
        interventions: changes to experts.
        write: called with the prompt, and with every piece of text as it is generated.

    Returns:
        The values of `polyad generate --json`: among them the `text` without the prompt,
        `prompt_ids`, and `token_ids` without the one that ends the text.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    check_text(prompt)
    language_model(run._weights)
    tokenizer = run.tokenizer
    name = "; --intervene ".join((str(run.path), *map(str, interventions)))
    prompt_ids = ids_of_text(tokenizer, prompt, special_tokens) or [tokenizer.end_of_text_id]
    stream, ids, pieces = TextStream(tokenizer, prompt_ids), list[int](), list[str]()
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "name": name}
    with intervened(run.model, interventions):
        write(prompt)
        started = time.monotonic()
        for token in generate_ids(run.model, tokenizer, prompt_ids, **options):
            ids.append(token)
            pieces.append(stream.push(token))
            write(pieces[-1])
        pieces.append(stream.end())
        write(pieces[-1])
    seconds, count = time.monotonic() - started, len(ids)
    return {
        "checkpoint": str(run.path),
        "prompt": prompt,
        "text": "".join(pieces),
        "prompt_ids": prompt_ids,
        "token_ids": ids,
        "ended_by": "max_tokens" if count == max_tokens else "end_of_text",
        **vars(sampling),
        "precision": run._precision,
        "interventions": list(interventions),
        "seconds": seconds,
        "tokens_per_second": count / max(seconds, 1e-9),
    }


def _of_each(text: Any, answer: Callable[[Any], Any]) -> Any:
    """The answer to a text, or a list of those to each text of a list."""
    return [answer(one) for one in text] if isinstance(text, list | tuple) else answer(text)


def _parsed(interventions: Sequence[str | Intervention]) -> list[Intervention]:
    """Interventions, of which some are written as for `--intervene`."""
    return [parse_intervention(each) if isinstance(each, str) else each for each in interventions]


class Layers(dict[str | int, LayerExperts]):
    """Layers by module name, or by the number of their block."""

    def __missing__(self, key: str | int) -> LayerExperts:
        """Returns the layer of a block."""
        for each in self.values():
            if each.layer.in_block and each.layer.block == key:
                return each
        raise KeyError(f"{key!r}: there are {', '.join(map(str, self))}")


@dataclass(frozen=True, kw_only=True)
class TextExperts:
    """The experts of every token of a text."""

    tokens: list[str]
    """The text of each token."""
    token_ids: Tensor
    """Token ids [T], int64."""
    layers: "Layers"
    """The layers with experts by module name, in the model's order, or by the block's number."""

    def table(self) -> Any:
        """Lists every expert of every token, with the columns of `polyad experts trace`.

        Returns:
            A `pandas.DataFrame`, with `score` and `entropy`. The text is document 0, read as
            window 0.
        """
        import pandas as pd

        place_T = torch.arange(len(self.tokens))
        none_T = torch.zeros_like(place_T)
        tokens = {
            **{"window": none_T, "position": place_T, "document": none_T, "offset": place_T},
            "token_id": self.token_ids,
        }
        layers = [each.layer for each in self.layers.values()]
        columns = trace_columns(layers, list(tokens), ("score", "entropy"))
        frames = [trace_rows(each, tokens, place_T, columns) for each in self.layers.values()]
        return pd.concat(frames, ignore_index=True)

    def __str__(self) -> str:
        """Formats a table with a line for each token and a column for each layer."""
        columns = [["", *map(label, self.tokens)]]
        for each in self.layers.values():
            name, cells = each.layer.expert_name, []
            for experts, weights in zip(each.experts.tolist(), each.weights.tolist(), strict=True):
                pairs = zip(experts, weights, strict=True)
                cells.append(", ".join(f"{name(expert)} {weight:.2f}" for expert, weight in pairs))
            columns.append([each.layer.title, *cells])
        return "\n".join(aligned(zip(*columns, strict=True), "<"))
