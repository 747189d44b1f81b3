"""Labelled sequences: classification, regression and multiple choice.

Shapes: B samples of a micro-batch, C choices of a sample (1 without choices), T tokens of the
longest sequence, K classes, N samples of a split.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.data.sequences.samples import PaddedRows, SequenceBatch, TrainingRows
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.config import load_yaml
from polyad.model.decoder import DecoderSettings
from polyad.model.heads import HEAD, ClassificationHeadConfig
from polyad.model.output import RoutingStats
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights, open_weights
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.labelled import (
    TITLES,
    LabelledTask,
    Outcomes,
    class_scores,
    file_of_classes,
    metric_of,
)
from polyad.train.tasks.task import CheckpointExtras, Predictor, Score, Sections, Unit
from polyad.train.tasks.text import kept_with_tokenizer, with_vocabulary
from polyad.train.tasks.vocabulary import (
    CLASSES_FILE,
    class_names_of,
    names_of,
    same_ids,
    tokenizer_of,
)

ScoringConfig: TypeAlias = DecoderSettings | BertConfig
CLASSIFIER, POOLER = "head.classifier.", "head.pooler."
"""Name prefixes of a BERT's last layer, and of its pooler, which pre-training may have learned."""


def model_inputs(batch: SequenceBatch, segments: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the inputs of a model: token ids of each sequence, and named inputs.

    Args:
        batch: Sequences.
        segments: Whether the model gets segment ids: which of two texts a token belongs to.
    """
    named = {"mask_BT": batch.mask_BCT.flatten(0, 1)}
    if segments:
        named["segments_BT"] = batch.second_BCT.flatten(0, 1).long()
    return batch.ids_BCT.flatten(0, 1), named


class SequenceTask(LabelledTask[SequenceBatch]):
    """Predicts the label of each row of a table: a class, a number, or the right choice.

    Args:
        sections: Sections of the configuration.
        tokenizer: Encodes the rows.
        classes: The classes by number; None: those of the data.
    """

    data_settings = SequenceDataConfig
    unit = Unit("sequence", "seq")
    scores = (Score("score", "score", 4), Score("loss", "loss", 4))
    validation_score: ClassVar[str] = "validation_score"
    model: ScoringConfig
    data: SequenceData
    settings: SequenceDataConfig

    def __init__(
        self, sections: Sections, tokenizer: Tokenizer, classes: Sequence[str] | None = None
    ) -> None:
        settings, model = sections.data, sections.model
        assert isinstance(settings, SequenceDataConfig)
        head = getattr(model, "head", None)
        if not isinstance(model, ScoringConfig) or not isinstance(head, ClassificationHeadConfig):
            read = f"model.kind: {model.kind} and model.head.kind: {getattr(head, 'kind', None)}"
            raise ConfigError(
                f"data.kind: sequences is not allowed with {read}; allowed: gpt2, decoder or bert "
                "with classification"
            )
        if settings.max_length is not None and settings.max_length > model.sequence_length:
            raise ConfigError(
                f"data.max_length: {settings.max_length} is more than model.sequence_length: "
                f"{model.sequence_length}"
            )
        self.settings = settings
        self.data = data = SequenceData(
            settings,
            tokenizer,
            model_kind=model.kind,
            max_length=settings.max_length or model.sequence_length,
            classes=classes,
        )
        self.schema = data.schema
        self._seed, self._most = sections.seed, sections.evaluation.max_windows
        model = with_vocabulary(model, tokenizer.vocab_size, f"{self.place} and data.tokenizer")
        outputs = len(data.class_names) or 1
        if head.num_classes not in (None, outputs):
            raise ConfigError(
                f"model.head.num_classes: {head.num_classes} is not {outputs}, the outputs that "
                f"{self.place} needs; null takes it from the data"
            )
        head = head.model_copy(update={"num_classes": outputs})
        self.model = model.model_copy(update={"head": head})
        two_texts = self.schema.pair is not None or bool(self.schema.choices)
        if two_texts and isinstance(model, BertConfig) and model.num_segments < 2:
            raise ConfigError(
                f"model.num_segments: {model.num_segments} is not allowed with two texts in a "
                f"sequence of {self.place}; allowed: 2"
            )

    @classmethod
    def open(cls, sections: Sections) -> "SequenceTask":
        """Reads and encodes the rows, by default with the tokenizer of the weights that the run
        starts from."""
        settings = sections.data
        assert isinstance(settings, SequenceDataConfig)
        tokenizer: Tokenizer | None = None
        if settings.tokenizer is not None:
            tokenizer = load_tokenizer(settings.tokenizer)
        elif sections.init_from is not None:
            tokenizer = tokenizer_of(open_weights(Path(sections.init_from)))
        if tokenizer is None:
            raise ConfigError(
                "data.tokenizer: is missing; allowed: a file, a folder or a name on the Hugging "
                "Face hub; null takes that of checkpoint.init_from, if it has one"
            )
        task = cls(sections, tokenizer)
        for split in ("train", "validation"):
            if split == "train" or split in task.data.splits:
                task.data.encoded(split)
        return task

    @classmethod
    def open_held_out(cls, sections: Sections, weights: Weights) -> "SequenceTask":
        """Opens rows to score weights on, with the weights' tokenizer and classes."""
        tokenizer = tokenizer_of(weights)
        if tokenizer is None:
            raise ConfigError(f"{weights.folder}: contains no tokenizer")
        return cls(sections, tokenizer, names_of(weights))

    @functools.cached_property
    def samples(self) -> TrainingRows:
        """Training rows by their global number."""
        return self.data.training(self._seed)

    @property
    def notes(self) -> Sequence[str]:
        """How many sequences of each split were too long, and what was left out in reading."""
        notes = list(super().notes)
        for split in ("train", "validation"):
            if split in self.data.splits and (cut := self.data.encoded(split).cut):
                count = len(self.data.encoded(split)) * self.data.choices
                notes.append(
                    f"{split}: {cut:,} of {count:,} sequences are longer than "
                    f"{self.data.max_length:,} tokens and are truncated"
                )
        return notes

    def sequences_of_sample(self) -> tuple[int, int | None]:
        """The number of choices per sample, and the mean length of training sequences in tokens."""
        mean = float(self.data.encoded("train").lengths_R.mean())
        return self.data.choices, max(1, round(mean))

    def losses(
        self, model: Predictor, batch: SequenceBatch
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """The loss of each sample [B]: nats of the right class or choice, or the squared error;
        with the distillation loss mixed in if there is a teacher."""
        outputs_BK, routing = self._outputs(model, batch)
        losses_B = self._losses(outputs_BK, batch.labels_B)
        if self.teacher is not None:
            ids_RT, named = model_inputs(batch, self.data.has_segments)
            losses_B = self.teacher.mix_in(losses_B, outputs_BK, ids_RT, **named)
        return losses_B, routing

    def _outputs(
        self, model: Predictor, batch: SequenceBatch
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Scores of classes [B, K] or choices [B, C], or the predicted number [B, 1]."""
        ids_RT, named = model_inputs(batch, self.data.has_segments)
        logits_RK, routing = model(ids_RT, **named)
        return logits_RK.float().view(len(batch.labels_B), -1), routing

    def _losses(self, outputs_BK: Tensor, labels_B: Tensor) -> Tensor:
        if self.schema.task == "regression":
            return mse_loss(outputs_BK[:, 0], labels_B, reduction="none")
        return cross_entropy(outputs_BK, labels_B)

    @property
    def validated(self) -> Sequence[str]:
        """The score, the loss, and the metrics whose mean is the score."""
        return list(dict.fromkeys(("score", "loss", *self.schema.metrics)))

    def spread(self, split: str, most: int | None = None) -> tuple[PaddedRows, list[str]]:
        """The rows of a split from the shortest to the longest; at most `most`, spread evenly."""
        rows, domains = self.data.held_out(split, most), self.data.domains(split)
        return rows, [domains[rows.row_of(n)] for n in range(len(rows))] if domains else []

    def outcomes(self, model: Predictor, batch: SequenceBatch) -> Tensor:
        """Label, prediction and loss."""
        outputs_BK, _ = self._outputs(model, batch)
        losses_B = self._losses(outputs_BK, batch.labels_B)
        is_number = self.schema.task == "regression"
        predicted_B = outputs_BK[:, 0] if is_number else outputs_BK.argmax(-1)
        parts = (batch.labels_B, predicted_B, losses_B)
        return torch.stack([part.double() for part in parts], dim=-1)

    def scores_of(self, outcomes_NF: Outcomes) -> dict[str, float]:
        """Computes the metrics, their mean `score`, and the mean loss."""
        labels_N, predictions_N, losses_N = outcomes_NF.T
        if self.schema.task != "regression":
            labels_N, predictions_N = labels_N.astype(int), predictions_N.astype(int)
        metrics: dict[str, float] = {
            name: metric_of(name, labels_N, predictions_N) for name in self.schema.metrics
        }
        score = float(np.mean(list(metrics.values())))
        return {"score": score, **metrics, "loss": float(losses_N.mean())}

    def about_split(self, split: str, outcomes_NF: Outcomes) -> dict[str, Any]:
        """The metrics, the scores of each class, and how many sequences were longer than
        `max_length`."""
        per_class = {}
        if names := self.data.class_names:
            labels_N, predictions_N = outcomes_NF.T[:2].astype(int)
            for name, own in class_scores(names, labels_N, predictions_N).items():
                per_class[name] = {"sequences": own.pop("samples")} | own
        return {
            "metrics": list(self.schema.metrics),
            "per_class": per_class,
            "cut_off": self.data.encoded(split).cut,
            "max_length": self.data.max_length,
            "task": self.schema.task,
        }

    def rows(self, scores: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Rows of metrics, their mean, loss, scores per domain, and truncated sequences."""
        titles: dict[str, str] = {name: TITLES[name] for name in self.schema.metrics}
        rows = [(title, f"{scores[name]:.4f}") for name, title in titles.items()]
        rows.append(("score", f"{scores['score']:.4f}"))
        unit = "squared error" if self.schema.task == "regression" else "nats per sequence"
        rows.append(("loss", f"{scores['loss']:.4f} {unit}"))
        rows += self.domain_rows(scores, titles | {"loss": "loss"})
        rows.append(("scored", f"{scores['sequences_scored']:,} sequences"))
        if scores["cut_off"]:
            rows.append(("truncated", f"{scores['cut_off']:,}, to {scores['max_length']:,} tokens"))
        return rows

    def units_of(self, split: str) -> int:
        """The number of rows in a split."""
        return self.data.size(split)

    def kept(self) -> CheckpointExtras:
        """The tokenizer's file, the names of the classes, and fingerprints."""
        tokenizer, names = self.data.tokenizer, self.data.class_names
        kept = kept_with_tokenizer(self.fingerprint, tokenizer, tokenizer.file_bytes())
        classes = {CLASSES_FILE: file_of_classes(names)} if names else {}
        return CheckpointExtras(kept.state, {**kept.files, **classes})

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that the weights were trained with these token ids."""
        own = tokenizer_of(weights)
        if own is not None and not same_ids(own, self.data.tokenizer):
            raise ConfigError(
                f"data.tokenizer: {self.settings.tokenizer} is not the one that the {owner} was "
                f"trained with: their token ids mean different things"
            )

    def reinitialized_prefixes(self, weights: Weights) -> tuple[str, ...]:
        """The head, unless the weights have one for these classes; but not a BERT's pooler."""
        head = getattr(weights.model_config(), "head", None)
        names = class_names_of(weights.folder) or []
        ours = self.model.head
        assert isinstance(ours, ClassificationHeadConfig)
        same = isinstance(head, ClassificationHeadConfig) and head.num_classes == ours.num_classes
        same = same and _task_of(weights) in (None, self.schema.task)
        if same and names == self.data.class_names:
            return ()
        # A folder of a transformers BERT decides itself whether it has a pooler.
        pooled = (isinstance(weights, FamilyWeights) and self.model.kind == "bert") or any(
            name.startswith(POOLER) for name in weights.shapes()
        )
        return (CLASSIFIER,) if pooled else (HEAD,)

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """Numbers of the rows in the training split."""
        return {self.name: sorted({self.samples.row_of(sample) for sample in samples})}


def _task_of(weights: Weights) -> str | None:
    """The kind of task that the weights' head was trained for: a single output is a number or the
    score of a choice. None if they do not record it."""
    data = load_yaml(weights.config_yaml).get("data") if isinstance(weights, Checkpoint) else None
    if not data or data.get("kind") != "sequences":
        return None
    return SequenceDataConfig.model_validate(data).schema_of.task
