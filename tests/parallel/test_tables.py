"""Mixtures of decoders and transcoders over processes: n of them compute what one computes."""

import pytest

from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing
from tests.helpers.training import Case, table_model, train

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5)
MODELS = {
    "scores": table_model(),
    # More than a process of four has.
    "many": table_model(top_k=7),
    "product keys": table_model(num_experts=[3, 4]),
    "gated": table_model(activation="swiglu", hidden_size=24),
    "transcoder": table_model(kind="transcoder"),
}
LAYOUTS = [(2, 1, 3), (2, 2, 1), (2, 2, 3), (4, 2, 2), (4, 4, 1)]


@everyday(
    ("name", "processes", "tensor", "stage"),
    [(name, *layout) for name in MODELS for layout in LAYOUTS],
    keep=[("scores", 4, 2, 2), ("many", 4, 4, 1), ("product keys", 2, 2, 3)],
)
def test_sgd_gives_equal_losses_norms_weights_and_statistics(
    workers, whole_runs, tmp_path, name, processes, tensor, stage
):
    case = SGD.but(model=MODELS[name])
    expected, saved = whole_runs(case)
    case = case.but(tensor=tensor, stage=stage, save_to=str(tmp_path))
    results = workers(processes).run(train, case)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert_same_course(results[0], expected)
    assert_same_routing(results[0], expected)
    assert_near_state(tmp_path / "step-00000004", saved)
    assert {"routing/active", "routing/load_max"} <= set(expected["routing"][-1])
