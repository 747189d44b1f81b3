"""The keys under `data:` of `kind: sequences`."""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from polyad.data.config import Config, DataSettings
from polyad.data.domains import LeaveOut
from polyad.data.errors import check_path
from polyad.data.sequences.schemas import BENCHMARKS, METRICS_OF, Metric, Schema, TaskKind


class ColumnNames(Config):
    """What the columns of a table are called."""

    text: str = "text"
    """The text, or the first of two."""

    pair: str | None = None
    """The second text; null: there is none."""

    label: str = "label"
    """The class, the number, or the number of the right choice from 0."""

    choices: list[str] | None = Field(default=None, min_length=1)
    """Of multiple choice: a column for each choice, or one with lists of them; null: none."""

    domain: str | None = None
    """The name of the row's domain, as a category or a source; null: rows have no domains."""


def _known(name: str | None) -> str | None:
    if name is not None and name not in BENCHMARKS:
        raise ValueError(f"one of {', '.join(BENCHMARKS)} is")
    return name


class SequenceDataConfig(DataSettings):
    """Which labelled sequences a run reads, and how."""

    kind: Literal["sequences"] = "sequences"
    """Texts, or pairs of texts, of which each has a class, a number or a right choice."""

    path: Annotated[str, AfterValidator(check_path)]
    """A .csv, .tsv, .jsonl or .parquet file, a folder with one for each split, a benchmark as
    glue/sst2, or hub:OWNER/NAME[:CONFIG]."""

    benchmark: Annotated[str | None, AfterValidator(_known)] = None
    """Whose columns, metrics and splits these are, as glue/sst2; null: what `path` names, or
    none."""

    task: TaskKind | None = None
    """What is learned: a class, a number or the right one of several choices; null: as the
    benchmark says, else a class."""

    columns: ColumnNames | None = None
    """Names of the columns; null: the benchmark's, else text and label."""

    metrics: list[Metric] | None = Field(default=None, min_length=1)
    """The scores, whose mean is the validation score; null: the benchmark's, else accuracy, or
    Pearson's and Spearman's correlation of numbers."""

    leave_out: LeaveOut = None
    """Domains that are not trained on: `test` is then all of their rows, and train and validation
    are those of the others; null: none."""

    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training rows, or of those of each domain, that is held out where there is no
    validation split."""

    tokenizer: Annotated[str | None, AfterValidator(check_path)] = None
    """A tokenizer file, the folder of one, or its name on the hub; null: that of
    checkpoint.init_from."""

    max_length: int | None = Field(default=None, ge=1)
    """Tokens after which a sequence is cut off; null: the model's longest."""

    padding: Literal["longest", "max_length"] = "longest"
    """To the longest sequence of a micro-batch, in steps of 8 tokens, or always to max_length. What
    is learned is the same."""

    group_by_length: int = Field(default=32, ge=1)
    """Sequences of similar length that follow each other in the order of an epoch, so that there is
    little padding; 1: in any order."""

    @property
    def schema_of(self) -> Schema:
        """The benchmark's schema with what the keys say in place of it."""
        name = self.benchmark or (self.path if self.path in BENCHMARKS else None)
        known = BENCHMARKS[name] if name else Schema()
        task = self.task or known.task
        metrics = METRICS_OF[task] if task != known.task else known.metrics
        schema = known._replace(task=task, metrics=tuple(self.metrics or metrics))
        if self.columns is not None:
            schema = schema._replace(
                text=self.columns.text,
                pair=self.columns.pair,
                label=self.columns.label,
                choices=tuple(self.columns.choices or ()),
                domain=self.columns.domain,
            )
        return schema


assert set(METRICS_OF) == set(get_args(TaskKind))
