"""What a run that failed says of itself: whether it diverged."""

import json
from types import SimpleNamespace

import pytest

from polyad.launch.study.run import _has_diverged
from polyad.train.tasks.images import ImageClassification

GOOD = {"loss": 1.0, "grad_norm": 1.0, "skipped": False}
BAD = {"loss": None, "grad_norm": 1.0, "skipped": True}


@pytest.mark.parametrize(
    ("records", "diverged"),
    [
        ([GOOD, BAD, BAD], True),
        ([BAD, BAD, GOOD], False),
        ([BAD], False),
        ([GOOD, GOOD | {"validation_top1": 0.1, "validation_loss": None}], True),
        ([GOOD | {"validation_top1": 0.1, "validation_loss": None}, GOOD], False),
        ([GOOD, GOOD | {"validation_top1": 0.1, "validation_loss": 2.0}], False),
    ],
)
def test_a_run_has_diverged_by_its_last_steps_or_its_last_validation(tmp_path, records, diverged):
    lines = [json.dumps({"step": step, **each}) for step, each in enumerate(records, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = SimpleNamespace(train=SimpleNamespace(max_skipped_steps=2))
    run = SimpleNamespace(
        folder=tmp_path,
        variant=SimpleNamespace(config=config),
        study=SimpleNamespace(task=ImageClassification),
    )
    assert _has_diverged(run) == diverged
