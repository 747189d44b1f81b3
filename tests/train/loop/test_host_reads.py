"""A step waits for the device at few places, whatever the number of layers.

It runs on a CPU, which never waits: a read is known by the kind of operation. Those are reading a
number or list from a tensor, copying to NumPy, and operations whose output size depends on values.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyad.model.build import read_model_config
from polyad.train.loop.losses import LossConfig
from tests.helpers.everyday import everyday
from tests.helpers.training import MODEL, Case, build_engine, moe_model, mumoe_model, take_step

pytestmark = pytest.mark.distributed


READS = {
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__array__,
}  # fmt: skip
SIZED_BY_VALUES = (
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "_local_scalar_dense", "equal", "is_nonzero",
)  # fmt: skip
OURS = ("/model/", "/parallel/", "/train/", "/deepspeed/", "/megatron/")


class HostReads(TorchFunctionMode):
    """A context that counts reads from Python by their place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._inner = _SizedByValues(self.places)

    def __enter__(self) -> Any:
        self._inner.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inner.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS:
            if not _of_an_optimizer():
                self.places[f"{getattr(func, '__name__', func)} at {_place()}"] += 1
            with mock.patch.object(self._inner, "silent", True):  # it was counted here
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _SizedByValues(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self._places, self.silent = places, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_", "_unsafe_index") and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)
            for each in (args[1] or ())
        )
        if by_mask and name.startswith("index_put"):
            by_mask = args[2].dim() > 0  # a number is filled in without counting the places
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if not self.silent and (name in SIZED_BY_VALUES or by_mask or unsized):
            self._places[f"{name} at {_place()}"] += 1
        return func(*args, **(kwargs or {}))


def _of_an_optimizer() -> bool:
    """Whether torch's optimizer asks: it keeps the numbers of its steps on the host."""
    return any("/torch/optim/" in frame.filename for frame in traceback.extract_stack()[-6:])


def _place() -> str:
    """The nearest line of the program, or of DeepSpeed or megatron-core."""
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in OURS) and "/tests/" not in frame.filename:
            return f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"
    return "?"


def reads_of_a_step(case: Case) -> dict[str, int]:
    """How often the host reads in the third step of a run, by place; called in worker processes."""
    engine, world = build_engine(case)
    options = {"losses": case.losses, "progress": 0.1, "own": lambda: (0, 1, 2)}
    for step in range(3):
        with HostReads() as reads:
            _ = take_step(engine, world, case, step, **options).statistics.numbers
    return dict(reads.places)


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
