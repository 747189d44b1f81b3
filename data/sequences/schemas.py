"""Benchmarks of labelled sequences: their columns, what is learned, how it is scored, and splits.

Sources: Wang et al. 2019, "GLUE", table 1; Socher et al. 2013 (SST); Casanueva et al. 2020
(Banking77); Roemmele et al. 2011 (COPA); Zellers et al. 2018 (SWAG). The labels of GLUE's test
splits are hidden: -1 in each row.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

TaskKind: TypeAlias = Literal["classification", "regression", "multiple_choice"]
Metric: TypeAlias = Literal["accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman"]

METRICS_OF: Mapping[TaskKind, tuple[Metric, ...]] = {
    "classification": ("accuracy",),
    "regression": ("pearson", "spearman"),
    "multiple_choice": ("accuracy",),
}
"""The metrics of a task where nothing says others."""
ALLOWED_METRICS: Mapping[TaskKind, tuple[Metric, ...]] = {
    "classification": ("accuracy", "f1", "macro_f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "multiple_choice": ("accuracy",),
}
SPLITS = ("train", "validation", "test")
HIDDEN = -1
"""The label of a row whose label is not told."""


class Schema(NamedTuple):
    """What the columns of a table mean."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    choices: tuple[str, ...] = ()
    domain: str | None = None
    task: TaskKind = "classification"
    metrics: tuple[Metric, ...] = METRICS_OF["classification"]
    source: str | None = None
    """Where it is on the hub, as `hub:OWNER/NAME:CONFIG`."""
    splits: Mapping[str, str] = {}
    """What a split is called there, where that is not its own name."""


def _glue(
    config: str,
    text: str,
    pair: str | None = None,
    *,
    metrics: tuple[Metric, ...] = ("accuracy",),
    task: TaskKind = "classification",
    suffix: str = "",
) -> Schema:
    splits = {name: f"{name}{suffix}" for name in ("validation", "test")} if suffix else {}
    return Schema(
        text, pair, task=task, metrics=metrics, source=f"hub:nyu-mll/glue:{config}", splits=splits
    )


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
        "premise",
        "question",
        choices=("choice1", "choice2"),
        task="multiple_choice",
        source="hub:aps/super_glue:copa",
    ),
    "swag": Schema(
        "sent1",
        "sent2",
        choices=("ending0", "ending1", "ending2", "ending3"),
        task="multiple_choice",
        source="hub:allenai/swag:regular",
    ),
}
"""By the name that `data.path` or `data.benchmark` gives."""
