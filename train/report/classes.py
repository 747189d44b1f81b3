"""What a model predicts of labelled samples: scores of each class, confusions, the samples with the
largest loss, and the experts of each class.

Shapes: B samples of a batch, N all that are read, K classes, or choices.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.sequences.config import Metric
from polyad.data.sequences.samples import form_of
from polyad.train.errors import ConfigError
from polyad.train.experts.by_class import FEW_CLASSES, LevelByClass
from polyad.train.measures.specialization import Specialized
from polyad.train.reading import Reading
from polyad.train.tasks.samples import ImageSamples, SequenceSamples
from polyad.train.tasks.scores import (
    METRICS,
    ClassScore,
    accuracy,
    scores_of_predictions,
)
from polyad.train.tasks.sequences import SequenceTask

MOST_CHARACTERS = 300
"""Characters of a text that are shown; of a choice a quarter."""
MOST_CONFUSIONS = 20
"""The most frequent confusions that are named."""


class Confusion(NamedTuple):
    """Samples of one class that are predicted to be of another."""

    true: str
    predicted: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample with a large loss."""

    number: int
    """In its split."""
    texts: list[str]
    """What the model reads of it; of an image none."""
    true: str
    predicted: str
    loss: float
    probability: float | None
    """The probability of what is predicted; None for a number."""
    probability_of_true: float | None


class Described(NamedTuple):
    """What is said of a sample for people."""

    texts: list[str]
    names: Sequence[str]
    """The names of the K classes, or of this sample's choices."""


@dataclass(frozen=True, kw_only=True)
class ClassPass:
    """Scores, confusions, examples, and the experts of each class."""

    task: str
    """`classification`, `regression` or `multiple_choice`."""
    data: str
    split: str
    unit: str
    """What a sample is called: sequence, image."""
    samples: int
    """Samples that were read."""
    of_samples: int
    """Samples of the whole split."""
    metrics: Mapping[Metric, float]
    loss: float
    """The mean."""
    held: Mapping[str, int]
    """Samples of each class, by its name; without classes nothing."""
    scores: Mapping[str, ClassScore]
    """By the name of the class."""
    matrix_KK: npt.NDArray[np.int64] | None
    """How many samples of each class (row) are predicted to be of each (column); None with more
    than `FEW_CLASSES`, and without classes."""
    confusions: list[Confusion]
    """The most frequent ones."""
    examples: list[Example]
    """Those with the largest loss, the largest first."""
    groups: list[str]
    """What experts are counted by: the classes, or what stands for them."""
    division: Specialized
    """How experts divide the work."""

    @property
    def layers(self) -> dict[str, list[LevelByClass]]:
        """The levels of each layer, counted by class, by the layer's name."""
        return {
            name: [level.labels["class"] for level in levels]
            for name, levels in self.division.layers.items()
        }

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "task": self.task,
            "data": self.data,
            "split": self.split,
            f"{self.unit}s": self.samples,
            f"{self.unit}s_in_split": self.of_samples,
            "loss": self.loss,
            **{str(name): value for name, value in self.metrics.items()},
            "per_class": {
                name: {f"{self.unit}s": self.held[name]} | score.to_json()
                for name, score in self.scores.items()
            },
            "confusion_matrix": self.matrix_KK,
            "confusions": self.confusions,
            "largest_losses": self.examples,
            "expert_classes": self.groups,
            "experts": self.layers,
            "entropies": {
                name: [level.entropy for level in levels]
                for name, levels in self.division.layers.items()
            },
        }


class Predictions:
    """Keeps what a model predicts of images with one class each, or of sequences.

    Args:
        samples: that are read.
    """

    blocks: Sequence[int] = ()

    def __init__(self, samples: ImageSamples | SequenceSamples) -> None:
        self._samples, self._outcomes = samples, Outcomes()

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        samples, batch = self._samples, reading.batch
        number_R = reading.number_R.cpu()
        if isinstance(samples, ImageSamples):
            losses_B, outputs_BK = samples.task.examined(reading.output.float(), batch.labels_B)
            number_B = torch.tensor(samples.numbers)[number_R]
        else:
            outputs_BK, losses_B = reading.output
            number_B = torch.from_numpy(samples.row_of)[batch.numbers_B.cpu()]
            if samples.task.schema.task == "regression":
                self._outcomes.add_numbers(number_B, batch.labels_B, outputs_BK[:, 0], losses_B)
                return
            outputs_BK = outputs_BK.softmax(-1)
        self._outcomes.add(number_B, batch.labels_B, outputs_BK, losses_B)

    def outcomes(self, examples: int) -> dict[str, Any]:
        """The fields of a `ClassPass` that predictions alone say.

        Args:
            examples: samples with the largest loss that are kept.

        Raises:
            ConfigError: outputs are not finite.
        """
        samples, split = self._samples, self._samples.split
        if isinstance(samples, ImageSamples):
            names = list(samples.task.data.manifest.class_names)
            return {"task": "classification"} | self._outcomes.result(
                names=names,
                numbers=False,
                examples=examples,
                describe=lambda number: Described([], names),
                measure=lambda labels, predicted: {"accuracy": accuracy(labels, predicted)},
            )
        task, schema, data = samples.task, samples.task.schema, samples.task.data
        return {"task": schema.task} | self._outcomes.result(
            names=data.class_names or [f"choice {n}" for n in range(data.choices)],
            numbers=schema.task == "regression",
            examples=examples,
            describe=lambda row: described(task, split, row),
            measure=lambda labels, predicted: {
                name: METRICS[name](labels, predicted) for name in schema.metrics
            },
        )

    def result(self, outcomes: dict[str, Any], division: Specialized) -> ClassPass:
        """What was found.

        Args:
            outcomes: what predictions alone say.
            division: of the work of experts, from the same pass.
        """
        task, classes = self._samples.task, self._samples.classes()
        assert classes is not None
        return ClassPass(
            data=task.name,
            split=self._samples.split,
            unit=task.unit.name,
            of_samples=task.units_of(self._samples.split),
            groups=classes[0],
            division=division,
            **outcomes,
        )


class Outcomes:
    """Predictions and losses of single samples, as a pass finds them."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, number_B: Tensor, labels_B: Tensor, outputs_BK: Tensor, losses_B: Tensor) -> None:
        """Adds samples of which one output is right.

        Args:
            number_B: of each in its split.
            labels_B: the right ones.
            outputs_BK: probabilities.
            losses_B: in nats.
        """
        highest_B, predicted_B = outputs_BK.max(-1)
        of_true_B = outputs_BK.gather(-1, labels_B.unsqueeze(-1)).squeeze(-1)
        self._keep(number_B, labels_B, predicted_B, losses_B, highest_B, of_true_B)

    def add_numbers(
        self, number_B: Tensor, labels_B: Tensor, outputs_B: Tensor, losses_B: Tensor
    ) -> None:
        """Adds samples whose label is a number.

        Args:
            number_B: of each in its split.
            labels_B: the right numbers.
            outputs_B: predicted ones.
            losses_B: squared errors.
        """
        unknown_B = torch.full_like(losses_B, torch.nan)
        self._keep(number_B, labels_B, outputs_B, losses_B, unknown_B, unknown_B)

    def _keep(self, *parts: Tensor) -> None:
        self._parts.append(torch.stack([part.double().cpu() for part in parts]))

    def result(
        self,
        *,
        names: Sequence[str],
        numbers: bool,
        examples: int,
        describe: Callable[[int], Described],
        measure: Callable[[npt.NDArray[Any], npt.NDArray[Any]], dict[Metric, float]],
    ) -> dict[str, Any]:
        """The fields of `ClassPass` that follow from them.

        Args:
            names: of the classes, or of the places of choices; of numbers none.
            numbers: whether labels are numbers.
            examples: how many are kept.
            describe: says for people what a sample of a number is.
            measure: metrics from labels and predictions.

        Raises:
            ConfigError: losses are not finite.
        """
        found_6N = torch.cat(self._parts, dim=1).numpy()
        number_N, labels_N, predicted_N, losses_N, highest_N, of_true_N = found_6N
        if not np.isfinite(losses_N).all():
            raise ConfigError(
                "the outputs of the model are not finite: its weights hold NaN or inf, or are too "
                "large"
            )
        if not numbers:
            labels_N, predicted_N = labels_N.astype(int), predicted_N.astype(int)
        shown = np.lexsort((number_N, -losses_N))[:examples]
        return {
            "samples": len(losses_N),
            "loss": float(losses_N.mean()),
            "metrics": measure(labels_N, predicted_N),
            "examples": [
                _example(
                    describe(int(number_N[n])),
                    number=int(number_N[n]),
                    label=labels_N[n].item(),
                    predicted=predicted_N[n].item(),
                    loss=float(losses_N[n]),
                    probabilities=None if numbers else (float(highest_N[n]), float(of_true_N[n])),
                )
                for n in shown
            ],
            **of_classes([] if numbers else names, labels_N, predicted_N),
        }


def of_classes(
    names: Sequence[str], labels_N: npt.NDArray[Any], predicted_N: npt.NDArray[Any]
) -> dict[str, Any]:
    """The fields of `ClassPass` about single classes.

    Args:
        names: of the K classes; none: there are none.
        labels_N: numbers of the right classes.
        predicted_N: of predicted ones.
    """
    if not names:
        return {"held": {}, "scores": {}, "matrix_KK": None, "confusions": []}
    classes = len(names)
    held_K = np.bincount(labels_N, minlength=classes)
    pairs = Counter(zip(labels_N.tolist(), predicted_N.tolist(), strict=True))
    matrix_KK = None
    if classes <= FEW_CLASSES:
        matrix_KK = np.array([[pairs[t, p] for p in range(classes)] for t in range(classes)])
    wrong = sorted((-count, t, p) for (t, p), count in pairs.items() if t != p)
    return {
        "held": dict(zip(names, held_K.tolist(), strict=True)),
        "scores": scores_of_predictions(names, labels_N, predicted_N),
        "matrix_KK": matrix_KK,
        "confusions": [Confusion(names[t], names[p], -n) for n, t, p in wrong[:MOST_CONFUSIONS]],
    }


def _example(
    said: Described,
    *,
    number: int,
    label: float,
    predicted: float,
    loss: float,
    probabilities: tuple[float, float] | None,
) -> Example:
    if probabilities is None:
        true, found = f"{label:.4g}", f"{predicted:.4g}"
    else:
        true, found = said.names[int(label)], said.names[int(predicted)]
    highest, of_true = probabilities or (None, None)
    return Example(
        number=number,
        texts=said.texts,
        true=true,
        predicted=found,
        loss=loss,
        probability=highest,
        probability_of_true=of_true,
    )


def described(task: SequenceTask, split: str, row: int) -> Described:
    """A row as text, from the tokens that the model reads.

    Args:
        task: of the data.
        split: of it.
        row: in the split.
    """
    pieces, choices = task.data.encoded(split).pieces, task.data.choices
    form = form_of(task.model.kind, task.data.tokenizer)
    two = task.schema.pair is not None or bool(task.schema.choices)
    firsts, seconds = [], []
    for sequence in range(row * choices, (row + 1) * choices):
        start, stop = pieces.starts_R1[sequence : sequence + 2]
        ids, begin = (
            pieces.ids_S[start : stop - len(form.after)].tolist(),
            pieces.second_R[sequence],
        )
        end_of_first = begin - len(form.between) if two else len(ids)
        firsts.append(task.data.tokenizer.decode(ids[len(form.before) : end_of_first]))
        seconds.append(task.data.tokenizer.decode(ids[begin:]) if two else "")
    if task.schema.choices:
        names = [f"{n}: {short(text, MOST_CHARACTERS // 4)}" for n, text in enumerate(seconds)]
        return Described([short(firsts[0])], names)
    texts = [firsts[0], seconds[0]] if two else firsts
    return Described([short(text) for text in texts], task.data.class_names)


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text of at most so many characters, with an ellipsis where it was longer.

    Args:
        text: any.
        most: characters.
    """
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
