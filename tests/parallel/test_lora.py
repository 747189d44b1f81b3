"""LoRA and frozen weights over processes: what is saved, and what stays to the last bit."""

import pytest
import torch

from polyad.model.build import build_model
from polyad.model.lora import LoRAConfig
from polyad.parallel.checkpoint.format import Box
from polyad.parallel.source import InitialWeights
from polyad.train.loop.optimizer import GroupConfig
from tests.helpers.everyday import everyday
from tests.helpers.small_decoders import small_decoder
from tests.helpers.training import (
    MODEL,
    Case,
    moved_though_frozen,
    optimizer_of,
    tensors,
    train,
)

pytestmark = pytest.mark.distributed

SGD = Case(optimizer="sgd", learning_rate=0.5, clip=0.5)
LINEAR = LoRAConfig(
    rank=3, alpha=6.0, targets=("attention.*", "feed_forward.*"), trained=("final_norm.*",)
)
MIXTURE = LINEAR.model_copy(update={"trained": (), "experts": True})
ADAPTED = SGD.but(lora=LINEAR)


@pytest.mark.slow
@everyday(
    ("stage", "precision"),
    [(1, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")],
    keep=[(3, "bf16")],
)
def test_frozen_groups_stay_to_the_last_bit_and_have_no_moments(
    workers, tmp_path, stage, precision
):
    frozen = GroupConfig(match="blocks.0.*", freeze=True)
    case = Case(groups=(frozen,), stage=stage, precision=precision, save_to=str(tmp_path / "a"))
    workers(2).run(train, case)
    saved = tmp_path / "a" / "step-00000004"
    found, initial = tensors(saved), InitialWeights(build_model(MODEL), 7)
    names = {name for name, _ in found}
    assert names == {name for name, _ in build_model(MODEL).named_parameters()}
    for name in names:
        weight = found[(name, "master")]
        start = initial.read(Box.whole(name, "master", tuple(weight.shape)))
        is_frozen = name.startswith("blocks.0.")
        assert torch.equal(weight, start) == is_frozen, name
        assert ((name, "exp_avg") in found) != is_frozen


@everyday(
    ("optimizer", "changes", "precision"),
    [
        (optimizer, changes, precision)
        for optimizer, changes in (
            ("adamw", {"lora": MIXTURE}), ("sgd", {"lora": MIXTURE, "momentum": 0.9}),
            ("muon", {"groups": (GroupConfig(match="experts.*", freeze=True),)}),
            ("muon", {"groups": (
                GroupConfig(match="experts.*"), GroupConfig(match="*", freeze=True))}),
        )
        for precision in ("fp32", "bf16")
    ],
    keep=[("adamw", {"lora": MIXTURE}, "bf16")],
)  # fmt: skip
def test_frozen_weights_of_a_mixture_stay_to_the_last_bit(workers, optimizer, changes, precision):
    case = Case(model=small_decoder("norm over heads"), expert=2, stage=1, learning_rate=0.05)
    case = case.but(optimizer=optimizer, precision=precision, **changes)
    assert optimizer_of(case).weight_decay > 0
    assert workers(2).run(moved_though_frozen, case) == [[], []]


@everyday("stage", [1, 3], keep=[1])
def test_a_group_moves_by_its_factor_of_the_step(workers, tmp_path, stage):
    case = SGD.but(clip=0.0, learning_rate=0.1, last_step=1)
    workers(1).run(train, case.but(save_to=str(tmp_path / "plain")))
    groups = (GroupConfig(match="attention.*", learning_rate=0.25),)
    case = case.but(groups=groups, layer_decay=0.5, stage=stage, save_to=str(tmp_path / "groups"))
    workers(2).run(train, case)
    plain, grouped = (tensors(tmp_path / each / "step-00000001") for each in ("plain", "groups"))
    initial = InitialWeights(build_model(MODEL), 7)
    for (name, field), whole_step in plain.items():
        shape = tuple(whole_step.shape)
        start = initial.read(Box.whole(name, field, shape))
        # Of two blocks: 2^-2 in the first, 2^-1 in the second, 2^-3 in front of them.
        factor = {"b": 0.25, "t": 0.125, "p": 0.125, "f": 1.0}[name[0]]
        factor = 0.5 if name.startswith("blocks.1.") else factor
        factor *= 0.25 if ".attention." in name else 1.0
        moved, wanted = grouped[(name, field)] - start, factor * (whole_step - start)
        torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-7)
        assert moved.any()
