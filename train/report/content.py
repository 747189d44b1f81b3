"""The content of a report, for both the page and `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyad.train.experts.kept_activation import Kept
from polyad.train.experts.knockout import ExpertWithout
from polyad.train.experts.probing import RoutedLayer
from polyad.train.measures.measure import Result
from polyad.train.measures.specialization import Specialization, Specialized
from polyad.train.report.classes import ClassPass
from polyad.train.report.history import History, last
from polyad.train.report.snippets import Piece, Place
from polyad.train.report.top_images import ImagePass
from polyad.train.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A token that an expert gets much of, in its context."""

    coefficient: float
    place: Place
    pieces: list[Piece]
    among_all: bool
    """Whether it is one of the highest of all tokens."""
    among_words: bool
    """Whether it is one of the highest of those that are words or parts of words."""


@dataclass(frozen=True, kw_only=True)
class ExpertReport:
    """One expert's coefficients over the tokens that were read."""

    name: str
    load: float
    """Its mean coefficient, divided by that of its level."""
    active: float
    """Share of the tokens with a coefficient above 0."""
    dominant: float
    """Share of the tokens with a coefficient of at least 0.5."""
    snippets: list[Snippet]
    """The highest of all tokens and of words, the highest first."""
    without: ExpertWithout | None = None
    """The loss without it; None where that was not asked for."""


@dataclass(frozen=True, kw_only=True)
class TextPass:
    """Top-activating tokens."""

    data: str
    split: str
    tokens: int
    """Tokens that were read."""
    of_tokens: int
    """Tokens of the whole split."""
    perplexity: float | None
    """As `polyad evaluate` gives it; None where the report does not read the whole split."""
    layers: dict[str, list[ExpertReport]]
    """By the layer's name."""
    division: Specialized
    """How experts divide the work, by classes of tokens."""
    left_out: int | None = None
    """Tokens that were read without experts; None where that was not asked for."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole content of a report."""

    run: str
    kind: str
    """The model in words."""
    is_sparse: bool
    """Whether experts are selected; those of a muMoE are not."""
    parameters: int
    active_parameters: int
    checkpoint: str
    checkpoint_step: int
    is_best: bool
    """Whether it is the checkpoint of the best validation, of a run that keeps that one."""
    total_steps: int
    most_validated: int | None
    """Samples that a validation in training reads, at most; None: the whole split."""
    history: History
    task: type[Task[Any]]
    """What was learned."""
    routed: list[RoutedLayer]
    """The layers with experts, in the order of the model; empty for a dense one."""
    text: TextPass | None
    """None where it was not asked for, the model does not read text, or it has no experts."""
    images: ImagePass | None = None
    """None where they were not asked for, or the model does not read images."""
    classes: ClassPass | None = None
    """Predictions of labelled sequences, or of images with one class each; None where nothing was
    read."""

    measures: Mapping[str, Result] = field(default_factory=dict)
    """What measures found in the same pass, by their names."""
    kept: Mapping[str, Kept] = field(default_factory=dict)
    """What groups of units keep of the activation of all, by the layer's name."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the curves: those are in metrics.jsonl."""
        history, units = self.history, f"{self.task.unit.name}s"
        return {
            "run": self.run,
            "model": self.kind,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "checkpoint": self.checkpoint,
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_is_best": self.is_best,
            "step": history.last_record["step"],
            "total_steps": self.total_steps,
            units: history.last_record.get(units),
            "loss": history.final_loss,
            self.task.validation_score: self.validation,
            "validation_max_windows": self.most_validated,
            "routing": {
                name: {measure: layer.last(measure) for measure in layer.scalars}
                for name, layer in history.layers.items()
            },
            "fluctuation": {
                name.removeprefix("fluctuation/"): last(values)
                for name, values in history.scalars.items()
                if name.startswith("fluctuation/")
            },
            "kept_activation": self.kept,
            "text": None if self.text is None else _text(self.text),
            "images": self.images,
            "classes": self.classes,
            # How experts divide the work is told with the text, or with the classes.
            **{name: each for name, each in self.measures.items() if name != Specialization.name},
        }

    @property
    def validation(self) -> float | None:
        """The newest validation score of training."""
        values = self.history.scalars.get(self.task.validation_score, [])
        return next((value for value in reversed(values) if value is not None), None)


def _text(text: TextPass) -> dict[str, Any]:
    return {
        "data": text.data,
        "split": text.split,
        "tokens": text.tokens,
        "perplexity": text.perplexity,
        "division": text.division.layers,
        "tokens_without_experts": text.left_out,
        "layers": {
            name: [
                {
                    "expert": expert.name,
                    "load": expert.load,
                    "active": expert.active,
                    "dominant": expert.dominant,
                    "without": expert.without,
                    "top": [_snippet(one) for one in expert.snippets if one.among_all],
                    "top_words": [_snippet(one) for one in expert.snippets if one.among_words],
                }
                for expert in experts
            ]
            for name, experts in text.layers.items()
        },
    }


def _snippet(snippet: Snippet) -> dict[str, Any]:
    return {
        "coefficient": snippet.coefficient,
        "document": snippet.place.document,
        "offset": snippet.place.offset,
        "position": snippet.place.position,
        "text": "".join(piece.text for piece in snippet.pieces),
        "token": "".join(piece.text for piece in snippet.pieces if piece.is_peak),
    }
