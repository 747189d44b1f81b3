"""A step waits for the device at few places, whatever the number of layers."""

import pytest
import torch

from polyad.model.build import read_model_config
from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.host_reads import HostReads, reads_of_a_step
from tests.helpers.training import MODEL, Case, moe_model, mumoe_model

pytestmark = pytest.mark.distributed

LOSSES = LossConfig(load_balance=0.01, router_z=0.001)
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 4, "num_layers": 2, "hidden_size": 16}
MODELS = {
    "dense": MODEL,
    "sparse": moe_model(balancing_rate=0.01),
    "similarity": moe_model(graph="similarity"),
    "attention": moe_model(graph="attention", balancing_rate=0.01),
    "fixed head": moe_model(graph="attention", attention_head=2),
    "cp": mumoe_model(),
    "ring": mumoe_model(factorization="tr", expert_rank=2),
    "vit": read_model_config(IMAGES | {
        "kind": "vit", "num_heads": 2,
        "feed_forward": {"kind": "smoe", "num_experts": 4, "router_noise": 1.0,
                         "capacity_factor": 1.0},
        "head": {"kind": "mumoe", "num_experts": [4], "rank": 3},
    }),
    "mixer": read_model_config(IMAGES | {
        "kind": "mixer",
        "token_feed_forward": {"kind": "mumoe", "num_experts": [4], "rank": 3, "hidden_size": 8,
                               "gate_input": "normalized", "gate_norm": "batch"},
        "channel_feed_forward": {"kind": "smoe", "num_experts": 4},
    }),
}  # fmt: skip
ONE = [
    *((name, Case(stage=stage, precision=precision))
      for name in ("dense", "sparse") for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    *((name, Case(stage=1, precision="bf16")) for name in list(MODELS)[2:]),
]  # fmt: skip
TWO = [
    *((name, Case(stage=stage, precision="bf16"))
      for name in ("dense", "sparse") for stage in (1, 2, 3)),
    ("dense", Case(stage=1, tensor=2)),
    ("sparse", Case(stage=1, tensor=2, precision="bf16")),
    ("cp", Case(stage=2, precision="bf16")),
]  # fmt: skip
CASES = [(name, n, case) for n, cases in ((1, ONE), (2, TWO)) for name, case in cases]


def name_of(value):
    if isinstance(value, Case):
        return f"zero{value.stage}-{value.precision}-tp{value.tensor}"
    return str(value)


def reads_without_norms(places):
    """All reads but those in which DeepSpeed looks at the norm: one for each parameter group, when
    the device has computed it; and those of experts on a CPU, where a read costs nothing."""
    left_out = ("deepspeed/runtime/utils.py", "kernels/cpu_experts.py")
    return sum(n for place, n in places.items() if not any(file in place for file in left_out))


@everyday(
    ("model", "processes", "case"),
    CASES,
    keep=[
        ("sparse", 2, Case(stage=1, tensor=2, precision="bf16")),
        ("cp", 2, Case(stage=2, precision="bf16")),
    ],
    ids=lambda case: "-".join(map(name_of, case)),
)
def test_the_host_reads_at_most_four_times_in_a_step(workers, model, processes, case):
    losses = LOSSES if model in ("sparse", "similarity", "attention") else LossConfig()
    found = workers(processes).run(reads_of_a_step, case.but(model=MODELS[model], losses=losses))
    for places in found:
        assert 0 < reads_without_norms(places) <= 4, places


@pytest.mark.slow
@everyday("model", ["sparse", "similarity", "attention"], keep=["attention"])
def test_exchanging_experts_read_once_for_each_layer_and_micro_batch(workers, model):
    case = Case(stage=2, precision="bf16", expert=2, model=MODELS[model], losses=LOSSES)
    for places in workers(2).run(reads_of_a_step, case):
        ours = {place: n for place, n in places.items() if "parallel/expert.py" in place}
        assert list(ours.values()) == [4]  # 2 layers, 2 micro-batches
        assert reads_without_norms(places) - 4 <= 4, places


def test_what_would_wait_is_counted():
    x = torch.arange(6.0)
    with HostReads() as reads:
        _ = x.sum().item(), x.tolist(), x[x > 2], torch.nonzero(x), bool(x[0] > 1)
        x[x > 2] = 0.0  # filled in by a mask: nothing to count
    found = sorted(place.split()[0] for place in reads.places)
    assert found == ["__bool__", "index", "item", "nonzero", "tolist"]
