"""`polyad predict`: predictions of a trained model for new inputs.

Shapes: N inputs, B of a batch, C choices of an input (1 without choices), K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from polyad.data.config import DataSettings
from polyad.data.errors import DataError, user_path
from polyad.data.images.augmentation import evaluation_image
from polyad.data.images.config import AttributeDataConfig, ImageDataConfig
from polyad.data.images.source import decode, is_image
from polyad.data.sampler import held_out_batches
from polyad.data.sequences.config import Schema, SequenceDataConfig
from polyad.data.sequences.samples import PaddedRows, encode_rows, form_of
from polyad.data.sequences.tables import ENDINGS, Table, read_tables
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.heads import HEAD, ClassificationHeadConfig
from polyad.model.vision import ImageSettings
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.reading import config_from_weights
from polyad.train.results import Progress, aligned
from polyad.train.tasks.pixels import normalize
from polyad.train.tasks.sequences import ScoringConfig, model_inputs
from polyad.train.tasks.vocabulary import names_of

BATCH = 32
"""Inputs per forward pass."""
SHOWN = 3
"""Maximum number of classes shown per input."""
WIDTH = 60
"""Maximum number of characters shown of an input."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A model's prediction for one input."""

    input: str
    """The text, or the image file."""
    label: str | None = None
    """The most probable class or choice; None for a number, or if several may be right."""
    value: float | None = None
    """The predicted number, for a regression model."""
    probabilities: Mapping[str, float]
    """By class or choice, the most probable first; attributes are independent."""


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions in the order of the inputs."""

    checkpoint: str
    predictions: Sequence[Prediction]
    truncated: int
    """Number of texts longer than the model reads."""

    def text(self) -> str:
        """A line for each input: the number or the most probable classes, and the input."""
        rows = []
        for each in self.predictions:
            best = [f"{name} {p:.4f}" for name, p in [*each.probabilities.items()][:SHOWN]]
            values = best if each.value is None else [f"{each.value:.4f}"]
            shown = f"{each.input[:WIDTH]}{'...' * (len(each.input) > WIDTH)}"
            rows.append([" ".join(cell.split()) for cell in (*values, shown)])
        lines = aligned(rows, "<")
        if self.truncated:
            lines.append(f"{self.truncated:,} texts are longer than the model reads: truncated")
        return "\n".join(lines)


class Predictor:
    """Predicts with a model for classification, regression or multiple choice.

    Args:
        weights: the model's weights.
        model: in evaluation mode.
        tokenizer: returns the tokenizer of a model that reads text.

    Raises:
        ConfigError: the model scores neither whole texts nor images.
    """

    def __init__(
        self, weights: Weights, model: nn.Module, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self._weights, self._model, self._tokenizer = weights, model, tokenizer
        self._settings, self._classes = weights.model_config(), names_of(weights)
        head = getattr(self._settings, "head", None)
        if not self.reads_images and not isinstance(head, ClassificationHeadConfig):
            raise ConfigError(f"{weights.folder}: the model predicts tokens, not labels")
        if isinstance(weights, FamilyWeights) and weights.is_new(f"{HEAD}weight"):
            raise ConfigError(f"{weights.folder}: has no head that predicts classes")
        self._device = next(model.parameters()).device

    @property
    def reads_images(self) -> bool:
        """Whether inputs are image files, not texts."""
        return isinstance(self._settings, ImageSettings)

    def texts(self, inputs: Sequence[str], seconds: Sequence[str] = ()) -> Predictions:
        """Predicts texts, or pairs of texts.

        Args:
            inputs: the texts, or the first of each pair.
            seconds: the second of each pair, if the model was trained on pairs.

        Raises:
            ValueError: one line says what does not fit the model.
        """
        schema = self._schema
        if schema.choices:
            raise ConfigError(
                f"{self._weights.folder}: chooses among {', '.join(schema.choices)}: give a "
                "file with these columns"
            )
        wanted = "pairs of texts" if schema.pair else "single texts"
        if len(seconds) != (len(inputs) if schema.pair else 0):
            raise ConfigError(
                f"{self._weights.folder}: was trained on {wanted}: {len(inputs)} texts and "
                f"{len(seconds)} second texts are not allowed"
            )
        from datasets import Dataset

        columns = {schema.text: inputs} | ({schema.pair: seconds} if schema.pair else {})
        return self._table(Table("the given texts", Dataset.from_dict(columns)))

    def file(self, path: str) -> Predictions:
        """Predicts the rows of a table; labels in it are ignored.

        Args:
            path: the file; its columns have the same names as those of the training data.

        Raises:
            ValueError: one line says what is wrong with it.
        """
        schema, file = self._schema, user_path(path)
        if not file.is_file():
            raise DataError(f"{path}: no such file")
        if file.suffix.lower() not in ENDINGS:
            raise DataError(f"{path}: is not a table; allowed: {', '.join(ENDINGS)}")
        tables, _ = read_tables(str(file), schema)
        (table,) = tables.values()
        return self._table(table)

    @torch.inference_mode()
    def images(self, paths: Sequence[str]) -> Predictions:
        """Predicts images.

        Args:
            paths: files, or folders, whose images are read in the order of their names.

        Raises:
            ValueError: a file is not an image, or the model reads text.
        """
        if not isinstance(self._settings, ImageSettings):
            raise ConfigError(f"{self._weights.folder}: the model reads text, not images")
        data = self._data
        assert isinstance(data, ImageDataConfig)
        size, files = self._settings.image_size, [f for p in paths for f in _images_of(p)]
        each = isinstance(data, AttributeDataConfig)
        apart, parts = each or data.loss == "sigmoid", []
        report = Progress("predict", len(files), "img")

        def pixels(file: Path) -> Tensor:
            image = decode(file.read_bytes(), str(file))
            return evaluation_image(image, size, data.evaluation_resize)

        for begin in range(0, len(files), BATCH):
            pixels_BCHW = torch.stack([*map(pixels, files[begin : begin + BATCH])])
            inputs_BCHW = normalize(pixels_BCHW.to(self._device), data.mean, data.std)
            logits_BK = self._model(inputs_BCHW).logits.float()
            parts.append((logits_BK.sigmoid() if apart else logits_BK.softmax(-1)).cpu())
            report(min(1.0, (begin + BATCH) / len(files)))
        named = zip(map(str, files), torch.cat(parts), strict=True)
        return self._result([self._of_classes(name, p_K, one=not each) for name, p_K in named])

    @cached_property
    def _data(self) -> DataSettings:
        """The data settings of training, or those from a folder's preprocessing file."""
        return config_from_weights(self._weights).data

    @property
    def _schema(self) -> Schema:
        """The schema of texts."""
        if self.reads_images:
            raise ConfigError(f"{self._weights.folder}: the model reads images, not text")
        data = self._data
        return data.schema_of if isinstance(data, SequenceDataConfig) else Schema()

    @torch.inference_mode()
    def _table(self, table: Table) -> Predictions:
        schema, settings, tokenizer = self._schema, self._settings, self._tokenizer()
        assert isinstance(settings, ScoringConfig)
        length = getattr(self._data, "max_length", None) or settings.sequence_length
        form = form_of(settings.kind, tokenizer)
        rows = encode_rows(table, schema, tokenizer, form, length)
        texts = table.column(schema.text)
        order_N = rows.lengths_N.argsort(kind="stable")
        padded = PaddedRows(rows, to_longest=True, order_N=order_N)
        outputs: dict[int, Tensor] = {}
        report = Progress("predict", len(rows), "seq")
        for batch, own_B, number_B in held_out_batches(padded, BATCH, 0, 1, self._device, report):
            ids_RT, named = model_inputs(batch, form.segments)
            outputs_BK = self._model(ids_RT, **named).logits.float().view(len(own_B), -1)
            numbers = map(padded.row_of, number_B.tolist())
            outputs |= zip(numbers, outputs_BK[own_B].cpu(), strict=True)
        predictions = [
            self._of_row(text, outputs[row], rows.choices) for row, text in enumerate(texts)
        ]
        return self._result(predictions, rows.cut)

    def _of_row(self, text: str, output_K: Tensor, choices: int) -> Prediction:
        """Makes a prediction from the scores of classes or choices, or from the number."""
        if choices > 1:
            return self._of_classes(text, output_K.softmax(-1), names=[*map(str, range(choices))])
        if len(output_K) == 1:
            return Prediction(input=text, value=output_K.item(), probabilities={})
        return self._of_classes(text, output_K.softmax(-1))

    def _of_classes(
        self, name: str, p_K: Tensor, *, names: Sequence[str] | None = None, one: bool = True
    ) -> Prediction:
        names = names or self._classes or [str(k) for k in range(len(p_K))]
        best = p_K.argsort(descending=True).tolist()
        probabilities = {names[k]: p_K[k].item() for k in best}
        label = names[best[0]] if one else None
        return Prediction(input=name, label=label, probabilities=probabilities)

    def _result(self, predictions: Sequence[Prediction], truncated: int = 0) -> Predictions:
        return Predictions(
            checkpoint=str(self._weights.folder), predictions=predictions, truncated=truncated
        )


def _images_of(path: str) -> Iterator[Path]:
    """The images of a folder, or the file itself."""
    place = user_path(path)
    if place.is_file():
        yield place
        return
    if not place.is_dir():
        raise DataError(f"{path}: no such file or folder")
    files = sorted(file for file in place.rglob("*") if file.is_file() and is_image(file.name))
    if not files:
        raise DataError(f"{path}: has no images")
    yield from files
