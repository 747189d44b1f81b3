"""The keys under `data:` of `kind: sequences`, and benchmarks that have a name.

A benchmark defines its columns, task, metrics and splits. Sources: Wang et al. 2019, "GLUE",
table 1; Socher et al. 2013 (SST); Casanueva et al. 2020 (Banking77); Roemmele et al. 2011 (COPA);
Zellers et al. 2018 (SWAG). The labels of GLUE's test splits are hidden: -1 in each row.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from polyad.data.config import Config, DataSettings
from polyad.data.errors import check_path

TaskKind: TypeAlias = Literal["classification", "regression", "multiple_choice"]
Metric: TypeAlias = Literal["accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman"]

METRICS_OF: Mapping[TaskKind, tuple[Metric, ...]] = {
    "classification": ("accuracy",),
    "regression": ("pearson", "spearman"),
    "multiple_choice": ("accuracy",),
}
"""The default metrics of a task."""
ALLOWED_METRICS = {**METRICS_OF, "classification": ("accuracy", "f1", "macro_f1", "matthews")}
HIDDEN_LABEL = -1
"""The label of a row whose label is hidden."""


class ColumnNames(Config):
    """Names of the columns of a table."""

    text: str = "text"
    """Column with the text, or with the first text of a pair."""

    pair: str | None = None
    """Column with the second text of a pair; null: there are no pairs."""

    label: str = "label"
    """Column with the label: a class, a number to predict, or the index of the right choice, from
    0."""

    choices: list[str] | None = Field(default=None, min_length=2)
    """One column per choice; null: there are no choices."""

    domain: str | None = None
    """Column with the domain of a row, such as its category or source; null: rows have no
    domains."""


class Schema(ColumnNames):
    """The columns of a table, and what is predicted from them."""

    task: TaskKind = "classification"
    metrics: tuple[Metric, ...] = ("accuracy",)
    source: str | None = None
    """Its location on the hub, as `hub:OWNER/NAME:CONFIG`."""
    splits: Mapping[str, str] = {}
    """The names of splits there, if they differ from ours."""


def _glue(config: str, text: str, pair: str | None = None, suffix: str = "", **keys: Any) -> Schema:
    """Returns the schema of a benchmark of GLUE, whose splits may have a suffix."""
    splits = {name: f"{name}{suffix}" for name in ("validation", "test")} if suffix else {}
    source = f"hub:nyu-mll/glue:{config}"
    return Schema(text=text, pair=pair, source=source, splits=splits, **keys)


BENCHMARKS: dict[str, Schema] = {
    "glue/cola": _glue("cola", "sentence", metrics=("matthews",)),
    "glue/sst2": _glue("sst2", "sentence"),
    "glue/mrpc": _glue("mrpc", "sentence1", "sentence2", metrics=("accuracy", "f1")),
    "glue/stsb": _glue(
        "stsb", "sentence1", "sentence2", metrics=("pearson", "spearman"), task="regression"
    ),
    "glue/qqp": _glue("qqp", "question1", "question2", metrics=("accuracy", "f1")),
    "glue/mnli": _glue("mnli", "premise", "hypothesis", suffix="_matched"),
    "glue/mnli-mm": _glue("mnli", "premise", "hypothesis", suffix="_mismatched"),
    "glue/qnli": _glue("qnli", "question", "sentence"),
    "glue/rte": _glue("rte", "sentence1", "sentence2"),
    "glue/wnli": _glue("wnli", "sentence1", "sentence2"),
    "sst5": Schema(source="hub:SetFit/sst5"),
    "banking77": Schema(source="hub:legacy-datasets/banking77", metrics=("accuracy", "macro_f1")),
    "copa": Schema(
        text="premise",
        pair="question",
        choices=["choice1", "choice2"],
        task="multiple_choice",
        source="hub:aps/super_glue:copa",
    ),
    "swag": Schema(
        text="sent1",
        pair="sent2",
        choices=["ending0", "ending1", "ending2", "ending3"],
        task="multiple_choice",
        source="hub:allenai/swag:regular",
    ),
}
"""Schemas of benchmarks, by the name that `data.path` or `data.benchmark` gives."""


def _known(name: str | None) -> str | None:
    if name is not None and name not in BENCHMARKS:
        raise ValueError(f"it must be one of {', '.join(BENCHMARKS)}")
    return name


class SequenceDataConfig(DataSettings):
    """Labelled text sequences, and how they are read."""

    kind: Literal["sequences"] = "sequences"
    """Texts, or pairs of texts, each with a class, a number or a right choice."""

    path: Annotated[str, AfterValidator(check_path)]
    """A .csv, .tsv, .jsonl or .parquet file, a folder with one per split or saved by `datasets`, a
    benchmark such as glue/sst2, or hub:OWNER/NAME[:CONFIG]."""

    benchmark: Annotated[str | None, AfterValidator(_known)] = None
    """Benchmark that defines columns, metrics and splits, such as glue/sst2; null: the one named in
    `path`, if any."""

    task: TaskKind | None = None
    """What is predicted: a class, a number, or the right one of several choices; null: as the
    benchmark defines, otherwise a class."""

    columns: ColumnNames | None = None
    """Names of the columns; null: as the benchmark defines, otherwise text and label."""

    metrics: list[Metric] | None = Field(default=None, min_length=1)
    """Metrics; their mean is the validation score. null: as the benchmark defines, otherwise
    accuracy, or the Pearson and Spearman correlations if numbers are predicted."""

    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the training rows that is held out for validation if there is no validation
    split."""

    tokenizer: Annotated[str | None, AfterValidator(check_path)] = None
    """A tokenizer file, a folder with one, or a name on the Hugging Face hub; null: the tokenizer
    of checkpoint.init_from."""

    max_length: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per sequence; the rest is cut off. null: the model's maximum input
    length."""

    padding: Literal["longest", "max_length"] = "longest"
    """Length to which sequences are padded: `longest`, that of the longest sequence in the
    micro-batch, rounded up to a multiple of 8 tokens, or always `max_length`. Results are the
    same."""

    group_by_length: int = Field(default=32, ge=1)
    """Number of sequences of similar length that follow each other in the order of an epoch, to
    reduce padding; 1: no grouping by length."""

    @property
    def schema_of(self) -> Schema:
        """The benchmark's schema, overridden by the keys."""
        name = self.benchmark or (self.path if self.path in BENCHMARKS else None)
        schema = BENCHMARKS[name] if name else Schema()
        task = self.task or schema.task
        metrics = self.metrics or (schema.metrics if task == schema.task else METRICS_OF[task])
        columns = self.columns.model_dump() if self.columns else {}
        return schema.model_copy(update={**columns, "task": task, "metrics": tuple(metrics)})
