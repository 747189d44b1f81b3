"""`polyad schema`: what editors read to complete and check configurations."""

import json
from typing import Any, Literal

Kind = Literal["run", "study"]


def schema(kind: Kind) -> dict[str, Any]:
    """The JSON Schema of a file for `polyad train`, or for `polyad study`."""
    from polyad.train.config.run import RunConfig
    from polyad.train.config.text import schema_of
    from polyad.train.study.config import StudyConfig

    if kind == "run":
        return schema_of(RunConfig, "A run of Polyad")
    return schema_of(StudyConfig, "A study of Polyad")


def schema_text(kind: Kind) -> str:
    """The same as text, as it lies in `configs/`."""
    return json.dumps(schema(kind), indent=1) + "\n"
