"""What the small files of a checkpoint can say; which validation is the best, by hand."""

import json
import math

import pytest

from polyad.parallel.checkpoint.format import CheckpointError, State
from polyad.parallel.checkpoint.load import best_checkpoint
from polyad.train.state import TrainState


def test_a_state_is_what_the_loop_writes():
    """Names, and values of every kind, come through; what is not known is left to newer ones."""
    state = TrainState(
        step=7, recent_losses=[2.5], recent_grad_norms=[0.5], first_loss=math.nan,
        versions={"torch": "2"}, end_of_text="<eos>", unfinished={
            "step": 7, "loss": math.nan, "grad_norm": math.inf, "learning_rate": 1e-3,
            "step_seconds": 0.1, "mfu": None, "skipped": False, "skipped_steps": 0,
            "tokens_per_second": 5.0, "tokens": 9, "routing/load_max": 1.5,
            "routing/blocks.0/load": [0.5, 0.5], "spike": {"step": 7},
        },
    )  # fmt: skip
    assert State.model_fields.keys() - {"saved_at"} <= TrainState.__dataclass_fields__.keys()
    content = json.dumps(state.to_json() | {"of_a_newer_version": 1}).encode()
    back = TrainState.from_json(State.model_validate_json(content).model_dump())
    back.versions = state.versions
    assert repr(back) == repr(state)


@pytest.mark.parametrize(
    ("scores", "higher", "best", "since"),
    [
        ([0.5, 0.7, 0.6, 0.7], True, (0.7, 2), 2),
        ([3.0, 2.0, 2.5], False, (2.0, 2), 1),
        ([float("nan"), 2.0, float("inf"), float("nan")], True, (2.0, 2), 2),
        ([float("nan"), float("nan")], False, (None, 0), 2),
    ],
)
def test_the_best_of_all_so_far(scores, higher, best, since):
    state = TrainState()
    for state.step, score in enumerate(scores, start=1):
        state.judge(score, higher_is_better=higher)
    assert (state.best_score, state.best_step) == best
    assert state.validations_since_best == since
    assert [state.is_over(patience) for patience in (None, since, since + 1)] == [
        False, True, False,
    ]  # fmt: skip
    assert f"after step {len(scores)}" in state.why_it_is_over(since)


def test_a_mark_that_leads_nowhere_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best; a run with"):
        best_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-00000003", "../../elsewhere", "\udcff"):
        content = f"{name}\n".encode(errors="surrogateescape")
        (tmp_path / "checkpoints" / "best").write_bytes(content)
        with pytest.raises(
            CheckpointError, match="but there is no such checkpoint in the same folder"
        ) as caught:
            best_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)
