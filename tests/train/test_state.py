"""What the small files of a checkpoint can say; which validation is the best, by hand."""

import json
import math

import pytest

from polyad.parallel.checkpoint.format import CheckpointError, State
from polyad.parallel.checkpoint.load import best_checkpoint
from polyad.train.state import TrainState


def test_a_state_is_what_the_loop_writes():
    """Names, and values of every kind, come through; what is not known is left to newer ones."""
    unfinished = {
        "step": 7, "loss": math.nan, "grad_norm": math.inf, "mfu": None, "skipped": False,
        "routing/load_max": 1.5, "routing/blocks.0/load": [0.5, 0.5], "spike": {"step": 7},
    }  # fmt: skip
    state = TrainState(
        step=7, recent_losses=[2.5], recent_grad_norms=[0.5], best_score=math.nan,
        end_of_text="<eos>", unfinished=unfinished,
    )  # fmt: skip
    content = json.dumps(state.to_json() | {"of_a_newer_version": 1}).encode()
    back = TrainState(**State.model_validate_json(content).model_dump())
    back.saved_at = None
    assert repr(back) == repr(state)


@pytest.mark.parametrize(
    ("scores", "higher", "best", "since"),
    [
        ([0.5, 0.7, 0.6, 0.7], True, (0.7, 2), 2),
        ([3.0, 2.0, 2.5], False, (2.0, 2), 1),
        ([math.nan, 2.0, math.inf, math.nan], True, (2.0, 2), 2),
        ([math.nan, math.nan], False, (None, 0), 2),
    ],
)
def test_the_best_of_all_so_far(scores, higher, best, since):
    state = TrainState()
    for state.step, score in enumerate(scores, start=1):
        state.judge(score, higher_is_better=higher)
    assert (state.best_score, state.best_step) == best
    assert state.validations_since_best == since
    over = [state.is_over(patience) for patience in (None, since, since + 1)]
    assert over == [False, True, False]


def test_a_mark_that_leads_nowhere_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best; a run with"):
        best_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name in (b"step-00000003\n", b"../../elsewhere\n", b"\xff\n"):
        (tmp_path / "checkpoints" / "best").write_bytes(name)
        with pytest.raises(CheckpointError, match="there is no such checkpoint in the same") as got:
            best_checkpoint(tmp_path)
        assert "\n" not in str(got.value)
