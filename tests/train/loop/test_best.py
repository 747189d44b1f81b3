"""Which validation was the best, and when a run ends for want of a better one: by hand."""

import pytest

from polyad.parallel.checkpoint.finding import best_checkpoint
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.train.loop.best import is_over, judge, why_it_is_over
from polyad.train.state import TrainState


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
        judge(state, score, higher_is_better=higher)
    assert (state.best_score, state.best_step) == best
    assert state.validations_since_best == since
    assert [is_over(state, patience) for patience in (None, since, since + 1)] == [
        False, True, False,
    ]  # fmt: skip
    assert f"after step {len(scores)}" in why_it_is_over(state, since)


def test_a_mark_that_leads_nowhere_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint is marked as the best; a run with"):
        best_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-00000003", "../../elsewhere", "\udcff"):
        content = f"{name}\n".encode(errors="surrogateescape")
        (tmp_path / "checkpoints" / "best").write_bytes(content)
        with pytest.raises(CheckpointError, match="which is no checkpoint beside it") as caught:
            best_checkpoint(tmp_path)
        assert "\n" not in str(caught.value)
