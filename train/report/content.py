"""The content of a report, for both the page and `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyad.train.experts.by_class import LevelByClass
from polyad.train.experts.probing import RoutedLayer
from polyad.train.measures.measure import Result
from polyad.train.measures.specialization import Specialization, Specialized
from polyad.train.report.classes import ClassPass
from polyad.train.report.history import History, last
from polyad.train.report.top_images import ImagePass
from polyad.train.report.top_text import TextPass
from polyad.train.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Results on held-out data."""

    text: TextPass | None = None
    """None if not requested, the model does not read text, or it has no experts."""
    images: ImagePass | None = None
    """None if not requested, or the model does not read images."""
    classes: ClassPass | None = None
    """Predictions for labelled sequences, or images with one class each; None if nothing was
    read."""
    measures: Mapping[str, Result] = field(default_factory=dict)
    """Results of measures in the same pass, by name."""

    @property
    def division(self) -> Specialized:
        """Specialization of the experts, which is measured whenever text or classes are read."""
        division = self.measures[Specialization.name]
        assert isinstance(division, Specialized)
        return division

    @property
    def by_class(self) -> dict[str, list[LevelByClass]]:
        """The levels of each layer, counted by class, by layer name."""
        if self.classes is None:
            return {}
        return {
            name: [level.labels["class"] for level in levels]
            for name, levels in self.division.layers.items()
        }

    def to_json(self) -> dict[str, Any]:
        """JSON values; specialization is part of the text, or of the classes."""
        text = classes = None
        if self.text is not None:
            text = {
                "data": self.text.data,
                "split": self.text.split,
                "tokens": self.text.tokens,
                "perplexity": self.text.perplexity,
                "division": self.division.layers,
                "tokens_without_experts": self.text.left_out,
                "layers": self.text.layers_to_json(),
            }
        if self.classes is not None:
            classes = self.classes.to_json()
            classes["experts"] = self.by_class
            classes["entropies"] = {
                name: [level.entropy for level in levels]
                for name, levels in self.division.layers.items()
            }
        others = {name: each for name, each in self.measures.items() if name != Specialization.name}
        found = {"text": text, "images": self.images, "classes": classes}
        return found | others


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole content of a report."""

    run: str
    kind: str
    """The model in words."""
    is_sparse: bool
    """Whether experts are selected, unlike in a muMoE."""
    parameters: int
    active_parameters: int
    checkpoint: str
    checkpoint_step: int
    is_best: bool
    """Whether it is the checkpoint with the best validation, if the run keeps that."""
    total_steps: int
    most_validated: int | None
    """Maximum number of samples that a validation during training reads; None: the whole split."""
    history: History
    task: type[Task[Any]]
    """The training task."""
    loss_unit: str
    """The unit of the training loss; empty: no unit."""
    routed: list[RoutedLayer]
    """The layers with experts, in the model's order; empty for a dense model."""
    read: HeldOut

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
            **self.read.to_json(),
        }

    @property
    def of_weights(self) -> str:
        """Describes the weights that read the data."""
        if self.history.steps:
            return f"of step {self.checkpoint_step:,}"
        return f"of {self.checkpoint}"

    @property
    def validation(self) -> float | None:
        """The newest validation score of training."""
        return last(self.history.scalars.get(self.task.validation_score, []))
