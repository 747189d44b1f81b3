"""What every task owes: a run in pieces is the run in one, and n processes are one."""

import pandas as pd
import pytest

from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state, assert_two_train_as_one
from tests.helpers.runs import evaluation, records, run
from tests.train.tasks.conftest import MODELS

pytestmark = pytest.mark.distributed

LAST = "checkpoints/step-00000012"
UNITS = {"sequences": "sequences", "pairs": "sequences", "masked text": "tokens"}
SCORES = {
    "images": {"top1", "top5", "loss"},
    "networks": {"top1", "top5", "loss"},
    "attributes": {"accuracy", "all_right", "loss"},
    "sequences": {"score", "accuracy", "macro_f1", "loss"},
    "pairs": {"score", "accuracy", "loss"},
    "masked text": {"accuracy", "loss"},
}


@everyday("name", MODELS, keep=["images"])
def test_a_run_in_pieces_is_bitwise_the_run_in_one(workers, task_run, task_config, tmp_path, name):
    config = task_config(tmp_path, name)
    for steps in (6, 12):
        assert workers(1).run(run, config, f"train.steps={steps}") == [steps]
    assert_equal_state(tmp_path / "run" / LAST, task_run(name) / LAST)
    ours, theirs = records(tmp_path / "run"), records(task_run(name))
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    last = theirs[-1]
    assert {f"validation_{score}" for score in SCORES[name]} <= last.keys()
    units = UNITS.get(name, "images")
    assert last[units] == 12 * 8 or units == "tokens"
    assert units == "tokens" or not any("tokens" in key for key in last)


LAYOUTS = [
    *((name, ()) for name in MODELS if name != "networks"),
    *(("sequences", keys) for keys in (
        ("parallel.tensor_parallel_size=2",),
        ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
        ("parallel.expert_parallel_size=2",),
        ("parallel.zero_stage=3", "model.feed_forward={kind: dense}"),
        ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true",
         "model.feed_forward.graph=attention"),
    )),
    ("pairs", ("parallel.tensor_parallel_size=2",)),
]  # fmt: skip


@everyday(("name", "layout"), LAYOUTS, keep=[("attributes", ())])
def test_two_processes_train_and_score_as_one(workers, task_config, tmp_path, name, layout):
    keys = ("optimizer={kind: sgd, learning_rate: 0.1}", "train.steps=4")
    model = [key for key in layout if key.startswith("model.")]
    numbers = {"keys": ("loss", "grad_norm", "routing/"), "rel": 2e-5, "abs": 1e-6}
    folder, _ = assert_two_train_as_one(
        workers, task_config(tmp_path, name), (*keys, *model), layout, **numbers
    )
    one, two = (scores_of(workers(n).run(evaluation, folder)[0]) for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-5, abs=1e-6)


def scores_of(result):
    """The numbers of a result by key, but for those of the clock."""
    flat = pd.json_normalize(result).to_dict("records")[0]
    others = {key for key in flat if "second" in key} | {"processes"}
    return {k: v for k, v in flat.items() if isinstance(v, int | float) and k not in others}
